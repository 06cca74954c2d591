"""Embedding tables of nonzeros: pruned rows and elements take little memory, and are looked up as they were."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import gossamer
from gossamer.dialects.errors import ArgumentError, IndexRangeError, OptionError
from tests.backend.harness import assert_same, compile_and_run

TABLES = [nn.Embedding, nn.EmbeddingBag]


def pruned_table(columns: int = 64, kind: Any = nn.EmbeddingBag, **given: Any) -> Any:
    """300 rows, half of them zeros, the others with a tenth of nonzeros; one of those is NaN, and one infinite."""
    torch.manual_seed(columns)
    table = kind(300, columns, **given)
    with torch.no_grad():
        table.weight.mul_(torch.rand(300, columns) > 0.9)
        table.weight[100:250] = 0
        table.weight[7, 0], table.weight[9, -1] = torch.nan, -torch.inf
    return table


@pytest.mark.parametrize("columns", [1, 7, 16, 33, 64, 200, 1000])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_those_of_the_floats(columns: int, mode: Any) -> None:
    table = pruned_table(columns, mode=mode, padding_idx=4)
    twin = copy.deepcopy(table).double()
    gossamer.store_sparse(table, only=TABLES)
    rows, offsets = torch.randint(0, 300, (60,)), torch.tensor([0, 0, 7, 20, 59])
    for given in ((rows.view(12, 5),), (rows, offsets), (rows[:0], offsets[:0])):
        torch.testing.assert_close(table(*given).double(), twin(*given), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_weights_of_entries_meet_zeros_as_in_torch() -> None:
    table = pruned_table(mode="sum")
    twin = copy.deepcopy(table)
    gossamer.store_sparse(table, only=TABLES)
    rows, weights = torch.randint(0, 300, (12, 5)), torch.randn(12, 5)
    weights[3, 2] = torch.inf
    found, expected = table(rows, per_sample_weights=weights), twin(rows, per_sample_weights=weights)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_embedding_of_any_type_is_exact(dtype: torch.dtype) -> None:
    table = pruned_table(33, nn.Embedding).to(dtype)
    twin = copy.deepcopy(table)
    gossamer.store_sparse(table, only=TABLES)
    rows = torch.randint(0, 300, (4, 5, 2))
    torch.testing.assert_close(table(rows), twin(rows), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(table.weight, twin.weight.detach(), rtol=0, atol=0, equal_nan=True)


def test_rows_of_zeros_take_a_bit_for_each_column() -> None:
    table = nn.Embedding(1000, 64)
    with torch.no_grad():
        table.weight[10:] = 0
    gossamer.store_sparse(table, only=TABLES)
    assert sum(buffer.nbytes for buffer in table.buffers()) == 10 * 64 * 4 + 1000 * 8
    assert not list(table.parameters())


def test_tables_are_one_call_in_a_graph() -> None:
    model = nn.ModuleList([pruned_table(mode="sum"), pruned_table(mode="sum"), pruned_table(mode="sum")])
    gossamer.store_sparse(model, only=TABLES)
    run = compile_and_run(lambda x: [table(x) for table in model], torch.randint(20, 300, (6, 4)), regions=3, min_gain=1.1)
    assert {decision.reason for decision in run.decisions} == {"one of 3 in a call"}
    rows = torch.randint(20, 300, (6, 4))
    for found, table in zip(run.function(rows), model, strict=True):
        assert torch.equal(found, table(rows))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_with_floats_loads_them(device: str, tmp_path: Path) -> None:
    model = nn.Sequential(pruned_table(), nn.Linear(64, 3))
    gossamer.store_sparse(model, only=TABLES)
    size = gossamer.save(model, tmp_path / "file")
    assert size < 0.2 * 4 * 300 * 64 + 4000
    with torch.device(device):
        other = nn.Sequential(nn.EmbeddingBag(300, 64), nn.Linear(64, 3))
    gossamer.load(other, tmp_path / "file")
    rows = torch.randint(20, 300, (6, 4))
    assert type(other[0]) is type(model[0]) and torch.equal(other(rows), model(rows))
    third = copy.deepcopy(model)
    third.load_state_dict(other.state_dict())
    assert torch.equal(third(rows), model(rows))


def test_a_mask_is_multiplied_in_and_a_shared_table_stays_shared() -> None:
    model = nn.ModuleList([nn.Embedding(50, 16), nn.EmbeddingBag(50, 16), nn.Embedding(50, 16)])
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[0].weight[10:] = 0
    prune.random_unstructured(model[2], "weight", 0.8)
    expected = copy.deepcopy(model[2].weight.detach())
    gossamer.store_sparse(model, only=TABLES)
    assert model[0].weight_nonzeros is model[1].weight_nonzeros
    assert_same(model[2](torch.arange(50)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finalize_makes_them_floats_again(dtype: torch.dtype) -> None:
    model = nn.ModuleList([nn.Embedding(50, 16), nn.EmbeddingBag(50, 16, mode="sum"), nn.Embedding(50, 16)]).to(dtype)
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    for layer in (model[0], model[2]):
        prune.remove(prune.random_unstructured(layer, "weight", 0.8), "weight")
    state, kinds = copy.deepcopy(model.state_dict()), [type(layer) for layer in model]
    gossamer.finalize(gossamer.store_sparse(model, only=TABLES))
    assert [type(layer) for layer in model] == kinds and list(model.state_dict()) == list(state)
    assert model[0].weight is model[1].weight and model[0].weight.requires_grad and not model[2].weight.requires_grad
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())
    assert vars(model[0]).keys() == vars(nn.Embedding(50, 16)).keys()


def test_tables_stay_floats_unless_asked_for_and_pruned() -> None:
    model = nn.ModuleList([nn.Embedding(50, 16), nn.Linear(16, 16)])
    with torch.no_grad():
        model[1].weight.mul_(torch.rand(16, 16) > 0.9)
    with torch.no_grad():
        model[0].weight[10:] = 0
    gossamer.store_sparse(model)
    assert type(model[0]) is nn.Embedding
    with pytest.raises(OptionError, match="no linear layer or table that was asked for has 50% of zeros"):
        gossamer.store_sparse(nn.Embedding(50, 16), only=TABLES)


def test_wrong_indices_and_damaged_tables_never_reach_memory() -> None:
    table = pruned_table()
    gossamer.store_sparse(table, only=TABLES)
    rows = torch.tensor([[3, 300]])
    with pytest.raises(IndexRangeError, match=r"index 300 at place 1 .* has 300 rows"):
        table(rows)
    table.weight_bits[3] = 255
    with pytest.raises(ArgumentError, match=r"a table has \d+ nonzeros and \d+ bits that are set"):
        table(rows[:, :1])


def gradient_of(found: Tensor, wanted: Tensor) -> Tensor:
    (made,) = torch.autograd.grad(found.square().sum(), [wanted])
    return made


def test_other_layers_train_beside_them() -> None:
    model = nn.Sequential(pruned_table(), nn.Linear(64, 3))
    gossamer.store_sparse(model, only=TABLES)
    rows = torch.randint(20, 300, (6, 4))
    run = compile_and_run(model, rows, grad=True, regions=1, min_gain=1.1)
    assert_same(gradient_of(run.output, model[1].weight), gradient_of(model(rows), model[1].weight))
