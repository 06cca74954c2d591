"""Embedding tables in few bits: near their floats, in one call, converted, copied and shared; and what is refused."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import gossamer
from gossamer.dialects.errors import ArgumentError, IndexRangeError
from tests.backend.harness import assert_same, compile_and_run

KINDS = ("int8", "int4", "float16")
TABLES = [nn.Embedding, nn.EmbeddingBag]


@pytest.mark.parametrize(("weights", "error"), [("float16", 1e-3), ("int8", 0.01), ("int4", 0.15)])
def test_they_are_near_their_floats(weights: Any, error: float) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.EmbeddingBag(60, 33, mode="sum", padding_idx=1), nn.Embedding(60, 33)])
    floats = copy.deepcopy(model)
    gossamer.quantize(model, weights=weights, only=TABLES)
    x = torch.randint(0, 60, (5, 7))
    for ours, theirs in zip(model, floats, strict=True):
        assert float((ours(x) - theirs(x)).detach().norm() / theirs(x).detach().norm()) < error
        theirs.weight.data.copy_(ours.weight)
        assert_same(ours(x), theirs(x))
        assert torch.equal(compile_and_run(ours, x).output, ours(x))


class Mixed(nn.Module):
    """Tables of all kinds, most of which one call can compute."""

    def __init__(self, kinds: tuple[Any, ...] = KINDS) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            [gossamer.quantize(nn.EmbeddingBag(50, 16, mode="sum"), weights=kind, only=TABLES) for kind in kinds]
        )

    def forward(self, rows: Tensor) -> Tensor:
        return torch.cat([bag(rows) for bag in self.bags], 1)


@pytest.mark.parametrize("dynamic", [None, True])
def test_tables_of_one_kind_are_one_call(dynamic: bool | None) -> None:
    model = Mixed(("int8", "int4", "int8", "float16", "int8"))
    run = compile_and_run(model, torch.randint(0, 50, (6, 4)), dynamic=dynamic, regions=5, min_gain=1.1)
    assert sorted(decision.reason for decision in run.decisions) == ["one of 3 in a call"] * 3 + ["stored rows"] * 2
    for size in (6, 9, 1, 0):
        rows = torch.randint(0, 50, (size, 4))
        with torch.no_grad():
            assert torch.equal(run.function(rows), model(rows))


def test_in_a_model_that_trains_other_layers() -> None:
    model = nn.Sequential(Mixed(), nn.Linear(48, 3))
    rows = torch.randint(0, 50, (6, 4))
    run = compile_and_run(model, rows, grad=True, regions=3, min_gain=1.1)
    run.output.square().sum().backward()
    made = model[1].weight.grad
    model.zero_grad()
    model(rows).square().sum().backward()
    assert_same(made, model[1].weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_conversion_changes_results_and_not_the_table(weights: Any, dtype: torch.dtype) -> None:
    model = gossamer.quantize(nn.EmbeddingBag(50, 16, mode="sum"), weights=weights, only=TABLES)
    rows = torch.randint(0, 50, (6, 4))
    before, size = model(rows), sum(buffer.nbytes for buffer in model.buffers())
    after = model.to(dtype)(rows)
    assert after.dtype is dtype and torch.equal(after, before.to(dtype))
    assert sum(buffer.nbytes for buffer in model.buffers()) == size and model.weight.dtype is dtype
    assert torch.equal(model.float()(rows), before)


@pytest.mark.parametrize("weights", KINDS)
def test_copies_and_files_of_torch_hold_the_same(weights: Any) -> None:
    model, file = gossamer.quantize(nn.EmbeddingBag(50, 16), weights=weights, only=TABLES), io.BytesIO()
    other = gossamer.quantize(nn.EmbeddingBag(50, 16), weights=weights, only=TABLES)
    torch.save(model.state_dict(), file)
    file.seek(0)
    rows = torch.randint(0, 50, (6, 4))
    run = compile_and_run(other, rows)
    other.load_state_dict(torch.load(file, weights_only=True))
    for function in (other, run.function, copy.deepcopy(model), copy.deepcopy(other)):
        with torch.no_grad():
            assert torch.equal(function(rows), model(rows))


def test_layers_that_share_a_table_still_do() -> None:
    model = nn.ModuleList([nn.Embedding(50, 16), nn.EmbeddingBag(50, 16)])
    model[1].weight = model[0].weight
    gossamer.quantize(model, only=TABLES)
    assert model[0].weight_int8 is model[1].weight_int8
    copied = copy.deepcopy(model)
    assert copied[0].weight_int8 is copied[1].weight_int8 is not model[0].weight_int8


@pytest.mark.parametrize("weights", KINDS)
def test_masks_are_multiplied_in(weights: Any) -> None:
    torch.manual_seed(0)
    model, tied = nn.ModuleList([nn.Embedding(50, 16), nn.EmbeddingBag(50, 16)]), nn.Linear(16, 50)
    tied.weight = model[0].weight
    floats = tied.weight.detach().clone()
    gossamer.sparsify(model, "magnitude", density=0.5, only="0")
    prune.random_unstructured(model[1], "weight", 0.5)
    expected = [layer.weight.detach().clone() for layer in model]
    gossamer.quantize(nn.ModuleList([model, tied]), weights=weights, only=TABLES)
    for layer, table in zip(model, expected, strict=True):
        assert bool((layer.weight[table == 0] == 0).all()) and (layer.weight - table).norm() < 0.2 * table.norm()
    assert torch.equal(tied.weight, floats)


def test_weights_of_entries_learn_beside_them() -> None:
    model = gossamer.quantize(nn.EmbeddingBag(50, 16, mode="sum"), only=TABLES)
    rows, weights = torch.randint(0, 50, (6, 4)), torch.randn(6, 4, requires_grad=True)
    model(rows, per_sample_weights=weights).sum().backward()
    assert weights.grad is not None
    assert_same(weights.grad, model.weight.sum(1)[rows])


def test_an_index_out_of_range_is_an_error_that_names_it() -> None:
    model = gossamer.quantize(nn.Embedding(50, 16), only=TABLES)
    with pytest.raises(IndexRangeError, match=r"index 50 at place 1 .* has 50 rows"):
        model(torch.tensor([3, 50]))


def test_a_layer_that_stays_floats_is_told_why() -> None:
    model = nn.ModuleList([nn.Embedding(50, 16, max_norm=1.0), nn.Embedding(50, 2000), nn.Embedding(50, 16)])
    with pytest.warns(UserWarning, match=r"1 Embedding \(max_norm .*; 1 Embedding \(its rows have 2000 columns"):
        gossamer.quantize(model, only=TABLES)
    assert [type(each).__name__ for each in model] == ["Embedding", "Embedding", "StoredEmbedding"]


def test_a_table_that_is_not_finite_is_refused_before_anything_changes() -> None:
    model = nn.Embedding(50, 16)
    model.weight.data[3, 2] = torch.inf
    with pytest.raises(gossamer.GossamerError, match=r"the table of '', of shape .* has a NaN"):
        gossamer.quantize(model, only=TABLES)
    assert type(model) is nn.Embedding


def test_scales_of_another_type_never_reach_a_kernel() -> None:
    codes, rows = torch.zeros(5, 4, dtype=torch.int8), torch.zeros(2, 3, dtype=torch.int64)
    for table, scale, said in (
        (codes, torch.ones(5, dtype=torch.float64), "scales are torch.float64"),
        (codes, torch.ones(4), r"scales are torch.float32 \[4\], must be float32 \[5\]"),
        (codes.double(), torch.ones(5), "in few bits is torch.float64"),
        (codes[:, :2].contiguous(), torch.ones(5), r"must be \[rows, 4\]"),
    ):
        with pytest.raises(ArgumentError, match=said):
            torch.ops.gossamer.sum_bags.default([table], [rows], [None], [None], [-1], "sum", False, [scale], [4])
