"""Look-ups with sparse gradients run beside the compiled graph: what may come before them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend.harness import assert_same


def test_indices_may_be_computed_in_the_graph() -> None:
    class Hashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.EmbeddingBag(7, 4, mode="sum", sparse=True) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.first(x % 7) * self.second(x // 7)
            return result

    model = Hashed()
    x = torch.randint(0, 49, (6, 3))
    compiled = torch.compile(model, backend="sparse", fullgraph=True, options={"dense": "eager", "strict": True})
    y = compiled(x)
    y.sum().backward()
    assert_same(y, model(x))
    assert model.first.weight.grad.is_sparse


def test_layers_before_a_table_may_write_to_memory_of_their_own() -> None:
    class Ranker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bottom = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
            self.table = nn.EmbeddingBag(50, 8, mode="sum", sparse=True)

        def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            return self.bottom(x), self.table(ids)

    model, x, ids = Ranker(), torch.randn(9, 5), torch.randint(0, 50, (9, 4))
    twin = copy.deepcopy(model)
    for function in (twin, torch.compile(model, backend="sparse", fullgraph=True, options={"dense": "eager", "strict": True})):
        y, rows = function(x, ids)
        rows += y  # also a result may be changed in place
        rows.square().sum().backward()
    assert_same(model.bottom[1].running_mean, twin.bottom[1].running_mean)
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None
        assert own.grad.is_sparse == other.grad.is_sparse
        assert_same(own.grad.to_dense(), other.grad.to_dense())


def test_offsets_and_indices_of_a_table_may_be_made_in_place() -> None:
    class Jagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.EmbeddingBag(50, 8, mode="sum", include_last_offset=True, sparse=True) for _ in "ab")

        def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
            ids.clamp_(max=49)
            first = self.first(ids, ends := F.pad(lengths.cumsum(0), (1, 0)))
            first += 1
            offsets, kept = ends.clone(), weights.clone()
            offsets[1:-1] += 1
            kept[::2] = 0
            return first * self.second(ids, offsets, kept), offsets

    model = Jagged()
    twin = copy.deepcopy(model)
    for function in (twin, torch.compile(model, backend="sparse", fullgraph=True, options={"dense": "eager", "strict": True})):
        ids, weights = torch.tensor([3, 60, 1, 3, 70, 9]), torch.arange(6.0, requires_grad=True)
        rows, offsets = function(ids, torch.tensor([2, 3, 1]), weights)
        rows.square().sum().backward()
        assert ids.tolist() == [3, 49, 1, 3, 49, 9] and offsets.tolist() == [0, 3, 6, 6]
        assert weights.grad is not None and weights.grad[::2].count_nonzero() == 0 and weights.grad[1] != 0
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None and own.grad.is_sparse
        assert_same(own.grad.to_dense(), other.grad.to_dense())


def test_a_graph_runs_uncompiled_if_its_look_ups_cannot_come_first() -> None:
    def weighted(x: Tensor, ids: Tensor, table: Tensor) -> Tensor:
        with torch.no_grad():
            weights = x.softmax(0)
        return (
            F.embedding_bag(ids, table, torch.tensor([0, 1]), mode="sum", per_sample_weights=weights, sparse=True) * x[:2, None]
        )

    x, ids, table = torch.randn(3, requires_grad=True), torch.tensor([0, 3, 3]), torch.randn(9, 4, requires_grad=True)
    with pytest.warns(UserWarning, match=r"runs uncompiled: a context, such as torch.no_grad\(\), comes before a look-up"):
        found = torch.compile(weighted, backend="sparse", options={"dense": "eager"})(x, ids, table)
    expected = weighted(x, ids, table)
    assert_same(found, expected)
    for own, other in zip(*(torch.autograd.grad(each.square().sum(), [x, table]) for each in (found, expected)), strict=True):
        assert own.is_sparse == other.is_sparse
        assert_same(own.to_dense(), other.to_dense())
