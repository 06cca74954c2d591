"""Message passing in rare cases: memory with gaps, numbers of extreme size, padding, and calls that only look like messages."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.backend.harness import assert_same, compile_and_run
from tests.backend.messages import EDGES, NODES, aggregated, edges, operations


def with_gaps(x: Tensor) -> Tensor:
    """The same values with a stride of 2 between the last ones."""
    return torch.stack([x, x], -1)[..., 0]


def test_edges_in_order_and_their_weights_may_have_any_strides() -> None:
    def weighted(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, index[1], x[index[0]] * weight[:, None])

    x, index = torch.randn(NODES, 6), edges()
    index[1] = index[1].sort().values
    run = compile_and_run(weighted, x, index, torch.rand(EDGES), dynamic=True)
    assert operations(run) == ["aggregation"]
    constant = torch.full((1,), 3).expand(EDGES)  # a single number in memory
    everywhere = torch.full((1,), 0.5).expand(EDGES)
    weights = with_gaps(torch.rand(EDGES)), everywhere
    for each in (index.t().contiguous().t(), index.int().t().contiguous().t(), torch.stack([constant, constant])):
        for weight in weights:
            assert_same(run.function(x, each, weight), weighted(x, each, weight))


def test_sums_of_one_graph_may_repeat_a_single_number() -> None:
    def pooled(x: Tensor, index: Tensor, batch: Tensor) -> Tensor:
        return torch.zeros(3, x.shape[1]).index_add(0, batch, aggregated(x, index))

    x, index, batch = torch.randn(NODES, 6), edges(), torch.full((1,), 2).expand(NODES)
    run = compile_and_run(pooled, x, index, batch, regions=2)
    assert_same(run.output, pooled(x, index, batch))
