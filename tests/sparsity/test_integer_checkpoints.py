"""Files of quantized layers, loaded into models that have floats."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import prune

import gossamer
from gossamer import FormatError
from gossamer.sparsity.quantization.grouped_linear import GroupedLinear
from gossamer.sparsity.quantization.quantized_linear import QuantizedLinear
from tests.backend.harness import compile_and_run, prune_

QUANTIZATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "int8": gossamer.quantize,
    "int4 in groups": lambda model: gossamer.quantize(model, weights="int4", group=16),
    "int8 in groups": lambda model: gossamer.quantize(model, weights="int8", group=16),
    "both": lambda model: gossamer.quantize(gossamer.quantize(model, weights="int4", group=16, only="2"), only=["0", "3.up"]),
}


def network(share: float | None = None) -> nn.Module:
    torch.manual_seed(0 if share is None else 1)
    inner = nn.Sequential()
    inner.add_module("up", nn.Linear(24, 40, bias=False))
    model = nn.Sequential(nn.Linear(48, 33), nn.ReLU(), nn.Linear(33, 24), inner, nn.Linear(40, 3))
    if share is not None:
        for layer in (model[0], model[2], inner[0]):
            prune_(layer, share, (1, 16))
    return model.eval()


@pytest.fixture(params=QUANTIZATIONS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[nn.Module, Path]:
    model, file = QUANTIZATIONS[request.param](network(0.5)), tmp_path / "model.safetensors"
    gossamer.save(model, file, deflate=request.param == "both")
    return model, file


def kinds(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


@torch.no_grad()
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_become_what_the_file_has(saved: tuple[nn.Module, Path], device: str) -> None:
    (model, file), x = saved, torch.randn(5, 48)
    with torch.device(device):
        other = network()
    first = other[0]  # type: ignore[index]
    assert gossamer.load(other, file) is other
    assert other[0] is first  # type: ignore[index]
    assert kinds(other) == kinds(model)
    assert {type(layer) for layer in other.modules()} & {QuantizedLinear, GroupedLinear}
    assert not any(tensor.is_meta for tensor in other.state_dict().values())
    assert torch.equal(other(x), model(x))
    for layer in (other, model):
        layer.bfloat16()
    assert torch.equal(other(x.bfloat16()), model(x.bfloat16()))


@torch.no_grad()
def test_stored_weights_make_room_for_integers(saved: tuple[nn.Module, Path]) -> None:
    (model, file), x = saved, torch.randn(5, 48)
    other = gossamer.load(gossamer.store_sparse(network(0.1)), file)
    assert kinds(other) == kinds(model)
    assert torch.equal(other(x), model(x))


@torch.no_grad()
def test_they_compile(tmp_path: Path) -> None:
    model, x = (
        gossamer.quantize(nn.Sequential(prune_(nn.Linear(64, 96), 0.1), nn.ReLU(), prune_(nn.Linear(96, 32), 0.1))),
        torch.randn(7, 64),
    )
    gossamer.save(model, tmp_path / "model.safetensors")
    other = gossamer.load(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)), tmp_path / "model.safetensors")
    torch.testing.assert_close(compile_and_run(other, x, regions=2).output, model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["0.weight_int8.shape", "0.weight_scale", "2.weight_groups", "4.weight"])
def test_what_does_not_fit_changes_nothing(tmp_path: Path, part: str) -> None:
    file = tmp_path / "model.safetensors"
    gossamer.save(QUANTIZATIONS["both"](network(0.5)), file)
    arrays, other = load_file(file), network()
    state, before = other.state_dict(), kinds(other)
    arrays[part] = arrays[part].flatten()[:-1].contiguous()
    save_file(arrays, file)
    with pytest.raises(FormatError):
        gossamer.load(other, file)
    assert kinds(other) == before
    assert all(torch.equal(tensor, state[name]) for name, tensor in other.state_dict().items())


def test_a_single_layer_and_one_that_a_mask_holds(tmp_path: Path) -> None:
    layer, file = gossamer.quantize(prune_(nn.Linear(20, 6), 0.3)), tmp_path / "model.safetensors"
    gossamer.save(layer, file)
    other: Tensor = gossamer.load(nn.Linear(20, 6), file).weight
    assert torch.equal(other, layer.weight)
    with pytest.raises(FormatError, match="not of this model"):
        gossamer.load(gossamer.sparsify(nn.Linear(20, 6), "magnitude", density=0.5), file)
    masked = gossamer.prepare(prune.random_unstructured(nn.Linear(20, 6), "bias", 0.5))
    with pytest.raises(FormatError, match="not of this model"):
        gossamer.load(masked, file)
    assert masked(torch.randn(2, 20)).shape == (2, 6)


def tables() -> nn.Module:
    bags = [nn.EmbeddingBag(60, 33, mode=mode, padding_idx=1) for mode in ("sum", "mean", "max")]
    return nn.ModuleDict({"bags": nn.ModuleList(bags), "words": nn.Embedding(60, 1), "out": nn.Linear(33, 3)})


def looked_up(model: Any, rows: Tensor) -> Tensor:
    found: Tensor = model["out"](sum(bag(rows) for bag in model["bags"])) + model["words"](rows).sum(1)
    return found


@torch.no_grad()
@pytest.mark.parametrize("weights", ["int8", "int4", "float16"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tables_become_what_the_file_has(weights: Any, device: str, tmp_path: Path) -> None:
    model, file = gossamer.quantize(tables(), weights=weights, only=[nn.Embedding, nn.EmbeddingBag]), tmp_path / "file"
    gossamer.save(model, file)
    with torch.device(device):
        other = tables()
    bag = other["bags"][0]  # type: ignore[index]
    gossamer.load(other, file)
    assert other["bags"][0] is bag and kinds(other) == kinds(model)  # type: ignore[index]
    rows = torch.randint(0, 60, (5, 7))
    assert torch.equal(looked_up(other, rows), looked_up(model, rows))


@torch.no_grad()
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_scales_of_tables_are_float32_under_any_default_type(weights: Any, other_default: torch.dtype, tmp_path: Path) -> None:
    model, file = gossamer.quantize(tables(), weights=weights, only=[nn.Embedding, nn.EmbeddingBag]), tmp_path / "file"
    gossamer.save(model, file)
    other = gossamer.load(tables(), file)
    assert other["words"].weight_scale.dtype is torch.float32  # type: ignore[index]
    rows = torch.randint(0, 60, (5, 7))
    assert torch.equal(looked_up(other, rows), looked_up(model, rows))


def test_a_file_of_tables_under_masks_is_refused(tmp_path: Path) -> None:
    gossamer.save(gossamer.quantize(tables(), only=[nn.Embedding, nn.EmbeddingBag]), tmp_path / "file")
    with pytest.raises(FormatError, match="not of this model"):
        gossamer.load(gossamer.sparsify(tables(), "magnitude", density=0.5, only=nn.EmbeddingBag), tmp_path / "file")


def test_a_file_of_tables_of_another_size_is_refused(tmp_path: Path) -> None:
    gossamer.save(gossamer.quantize(nn.EmbeddingBag(60, 33), weights="int4", only=[nn.EmbeddingBag]), tmp_path / "file")
    other = nn.EmbeddingBag(60, 32)
    with pytest.raises(FormatError, match=r"'weight_int4' has shape \(60, 17\), in this model \(60, 16\)"):
        gossamer.load(other, tmp_path / "file")
    assert type(other) is nn.EmbeddingBag
