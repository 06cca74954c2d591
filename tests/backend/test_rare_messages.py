"""Message passing in rare cases: memory with gaps, numbers of extreme size, padding, and calls that only look like messages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gossamer.dialects.errors import IndexRangeError
from gossamer.sparsity.edges.sorted_edges import SortedEdges
from tests.backend.harness import assert_same, compile_and_run
from tests.backend.messages import EDGES, NODES, aggregated, edges, operations, trained


def with_gaps(x: Tensor) -> Tensor:
    """The same values with a stride of 2 between the last ones."""
    return torch.stack([x, x], -1)[..., 0]


def test_edges_in_order_and_their_weights_may_have_any_strides() -> None:
    def weighted(x: Tensor, index: Tensor, weight: Tensor, pairs: Tensor) -> Tensor:
        known = torch.zeros_like(x).index_add(0, index[1], x[index[0]] * weight[:, None])
        return known + torch.zeros_like(x).index_add(0, index[1], x[index[0]] * pairs[:, 1:])

    x, index, pairs = torch.randn(NODES, 6), edges(), torch.rand(EDGES, 2)
    index[1] = index[1].sort().values
    run = compile_and_run(weighted, x, index, torch.rand(EDGES), pairs, dynamic=True)
    assert operations(run) == ["aggregation", "aggregation"]
    constant = torch.full((1,), 3).expand(EDGES)  # a single number in memory
    everywhere = torch.full((1,), 0.5).expand(EDGES)
    weights = with_gaps(torch.rand(EDGES)), everywhere
    for each in (index.t().contiguous().t(), index.int().t().contiguous().t(), torch.stack([constant, constant])):
        for weight in weights:
            assert_same(run.function(x, each, weight, pairs), weighted(x, each, weight, pairs))


def test_sums_of_one_graph_may_repeat_a_single_number() -> None:
    def pooled(x: Tensor, index: Tensor, batch: Tensor) -> Tensor:
        return torch.zeros(3, x.shape[1]).index_add(0, batch, aggregated(x, index))

    x, index, batch = torch.randn(NODES, 6), edges(), torch.full((1,), 2).expand(NODES)
    run = compile_and_run(pooled, x, index, batch, regions=2)
    assert_same(run.output, pooled(x, index, batch))


def test_remembered_values_may_be_transposed() -> None:
    def with_degrees(x: Tensor, index: Tensor) -> Tensor:
        counts = [torch.zeros(NODES).index_add(0, ends, torch.ones(EDGES)) for ends in index]
        return aggregated(x, index).sin() * torch.stack(counts).t()[:, :, None]

    x, index = torch.randn(NODES, 2, 3), edges()
    run = compile_and_run(with_degrees, x, index, dense="inductor")
    assert operations(run) == ["aggregation"]
    assert_same(run.output, with_degrees(x, index))


class Embedded(nn.Module):
    """Maxima over neighbours, whose features are rows of a table."""

    def __init__(self, **options: bool | int) -> None:
        super().__init__()
        self.nodes = nn.Embedding(NODES, 4, **options)  # type: ignore[arg-type]
        with torch.no_grad():
            self.nodes.weight[0] = 3.0  # often the maximum

    def forward(self, index: Tensor) -> Tensor:
        each = index[1][:, None].expand(-1, 4)
        return torch.zeros(NODES, 4).scatter_reduce(0, each, self.nodes(index[0]), "amax", include_self=False)


@pytest.mark.parametrize("options", [{"padding_idx": 0}, {"scale_grad_by_freq": True}], ids=str)
def test_maxima_of_embeddings_have_the_gradients_of_the_embedding(options: dict[str, int]) -> None:
    run, ours, theirs = trained(Embedded(**options), edges())
    assert operations(run) == ["max aggregation", "max aggregation backward"]
    assert_same(ours[0], theirs[0])


SCALED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "over a number": lambda x, index: torch.zeros_like(x).index_add(0, index[1], x[index[0]] / 64),
    "alpha": lambda x, index: torch.zeros_like(x).index_add(0, index[1], x[index[0]], alpha=1 / 64),
    "products": lambda x, index: (x[index[0]] / 64 * x[index[1]]).sum(-1),
    "infinite": lambda x, index: torch.zeros_like(x).index_add(0, index[1], x[index[0]] * torch.inf),
}


@pytest.mark.parametrize("name", SCALED)
def test_numbers_that_may_not_come_after_a_sum_stay_before_it(name: str) -> None:
    """In f16, a sum may overflow before it is scaled. An infinite number makes NaN of a sum of nothing."""

    def with_a_sum(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return aggregated(x / 2048, index), SCALED[name](x, index)

    index = torch.stack([torch.randint(0, NODES, (NODES * 64,)), torch.arange(1, NODES + 1).repeat_interleave(64) % 59])
    x = (torch.rand(NODES, 8) * 10 + (500 if name == "products" else 2000)).half()
    run = compile_and_run(with_a_sum, x, index)
    assert "aggregation" in operations(run)
    for ours, theirs in zip(run.output, with_a_sum(x, index), strict=True):
        assert_same(ours, theirs)


def of_columns(x: Tensor, index: Tensor, group: Tensor) -> Tensor:
    return torch.zeros(5, x.shape[1]).scatter_add(0, group.expand(x.shape[0], -1), aggregated(x, index))


def of_columns_gathered(x: Tensor, index: Tensor, group: Tensor) -> Tensor:
    picked = torch.gather(x, 0, group.repeat(x.shape[0], 1))
    return torch.zeros_like(x).index_add(0, index[1][:NODES], picked) + aggregated(x, index)


@pytest.mark.parametrize("function", [of_columns, of_columns_gathered])
def test_an_index_for_each_feature_is_no_edge_list_if_there_are_as_many_nodes(function: Callable[..., Tensor]) -> None:
    given = torch.randn(NODES, NODES), edges(), torch.randint(0, 5, (NODES,))
    run = compile_and_run(function, *given)
    assert "aggregation" in operations(run)
    assert_same(run.output, function(*given))


def test_sums_over_no_or_all_dimensions_are_no_products_of_edges() -> None:
    def sums(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = aggregated(x, index)
        return y, (x[index[0]] * x[index[1]]).sum(dim=()), torch.sum(y * y, dim=None)

    x, index = torch.rand(NODES, 6), edges()
    run = compile_and_run(sums, x, index, regions=1)
    for ours, theirs in zip(run.output, sums(x, index), strict=True):
        assert_same(ours, theirs)


class Wrapped(Tensor):
    """A tensor around another one, as a DTensor is. Torch counts no writes to the tensor inside."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        made = Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> "Wrapped":
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        return func(*tree_map_only(cls, lambda t: t.inner, args), **(kwargs or {}))


def test_a_write_to_one_edge_inside_a_wrapper_is_noticed() -> None:
    inner = torch.randint(0, NODES, (2, 2000))
    x, index, changed = torch.randn(NODES, 6), Wrapped(inner), inner.clone()
    changed[0, 900] = (changed[0, 900] + 7) % NODES
    run = compile_and_run(aggregated, x, index, regions=1)
    assert_same(run.output, aggregated(x, inner))
    index.copy_(changed)
    assert_same(run.function(x, index), aggregated(x, changed))


def test_a_sum_of_messages_whose_columns_are_divided_is_no_attention() -> None:
    def attended(x: Tensor, a: Tensor, index: Tensor) -> Tensor:
        z = a[:, 0][index[0]]
        most = torch.full((NODES,), -torch.inf).scatter_reduce(0, index[1], z, "amax")
        p = (z - most[index[1]]).exp()
        total = torch.zeros(NODES).index_add(0, index[1], p)
        return torch.zeros_like(x).index_add(0, index[1], p[:, None] * x[index[0]]) / (total + 1e-16)

    given = torch.randn(NODES, NODES), torch.randn(NODES, 1), edges()
    run = compile_and_run(attended, *given)
    assert "graph attention" not in operations(run)
    torch.testing.assert_close(run.output, attended(*given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(NODES, 0), (NODES, 2, 0)], ids=str)
def test_messages_without_features_stay_empty(shape: tuple[int, ...]) -> None:
    def both(x: Tensor, nodes: Tensor, index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        messages = x[index[0]] * weight
        return (
            aggregated(nodes, index),
            torch.zeros_like(x).index_add(0, index[1], messages),
            (x[index[0]] * x[index[1]]).sum(-1),
        )

    weight = torch.rand(EDGES, *shape[1:-1], 1)
    given = torch.randn(shape), torch.randn(NODES, 4), edges(), weight
    run = compile_and_run(both, *given, regions=1)
    for ours, theirs in zip(run.output, both(*given), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("end", ["source", "target"])
def test_negative_nodes_are_refused_where_torch_refuses_them(end: str) -> None:
    def selected(x: Tensor, index: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, index[1], x.index_select(0, index[0]))

    def indexed(x: Tensor, index: Tensor) -> Tensor:
        return torch.zeros_like(x).index_put((index[1],), x[index[0]], accumulate=True)

    x, index = torch.randn(NODES, 6), edges()
    both = [compile_and_run(each, x, index, regions=1).function for each in (selected, indexed)]
    index[int(end == "target"), 7] = -1
    with pytest.raises(IndexRangeError, match=f"{end} -1 is out of bounds: must be at least 0"), torch.no_grad():
        both[0](x, index)
    assert_same(both[1](x, index), indexed(x, index))


def test_operations_that_read_edges_in_several_ways_share_the_sorted_list(monkeypatch: pytest.MonkeyPatch) -> None:
    def summed(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        products = (x[index[1]] * x[index[0]]).sum(-1)
        return torch.zeros_like(x).index_add(0, index[1], x.index_select(0, index[0])), products

    x, index = torch.randn(NODES, 6), edges()
    run = compile_and_run(summed, x, index, regions=2)
    sorts, real = list[int](), SortedEdges.of

    def counted(*args: Any) -> SortedEdges:
        sorts.append(1)
        return real(*args)

    monkeypatch.setattr(SortedEdges, "of", counted)
    with torch.no_grad():
        run.function(x, index.flip(1))
    assert len(sorts) == 1


def test_relu_makes_zero_of_an_infinite_score() -> None:
    def attended(x: Tensor, a: Tensor, index: Tensor) -> Tensor:
        p = F.relu(a[index[0]] + a[index[1]]).exp()
        weight = p / torch.zeros(NODES, 1).index_add(0, index[1], p)[index[1]]
        return torch.zeros_like(x).index_add(0, index[1], x[index[0]] * weight)

    x, a, index = torch.randn(NODES, 3), torch.randn(NODES, 1), edges()
    a[5] = -torch.inf
    run = compile_and_run(attended, x, a, index)
    assert operations(run) == ["graph attention"]
    assert_same(run.output, attended(x, a, index))
