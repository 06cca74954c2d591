"""Checkpoints that compressed-tensors 0.11 wrote (tests/hub/written) are read exactly, and their layers are sparse regions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModelForCausalLM

import gossamer
from tests.backend.harness import compile_and_run
from tests.hub.written import write

LAYERS = 7
TOKENS = torch.arange(8)[None]


def folder(format: str) -> Path:
    return write.HERE / format


def expected(format: str) -> dict[str, Tensor]:
    """The weights by the formula that the checkpoint was made with."""
    state: dict[str, Tensor] = write.model("24" in format).state_dict()
    return state


def by_from_pretrained(format: str) -> Any:
    config = AutoConfig.from_pretrained(folder(format))
    assert config.quantization_config["version"] == "0.11.0"
    config.quantization_config["quant_method"] = "gossamer"
    return AutoModelForCausalLM.from_pretrained(folder(format), config=config).eval()


def by_load(format: str) -> Any:
    return gossamer.load(unread(format, torch.bfloat16), folder(format)).eval()


def unread(format: str, dtype: torch.dtype) -> Any:
    """The model with random weights."""
    config = AutoConfig.from_pretrained(folder(format))
    del config.quantization_config
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


@pytest.mark.parametrize("read", [by_from_pretrained, by_load])
@pytest.mark.parametrize("format", write.FORMATS)
def test_weights_are_exactly_those_that_were_written(format: str, read: Any) -> None:
    found = read(format).state_dict()
    wanted = expected(format)
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert found[name].dtype == weight.dtype and torch.equal(found[name], weight), name
        if name.endswith("_proj.weight"):
            assert 0.35 < weight.ne(0).float().mean() <= 0.5, "the layers that were packed have zeros"


@pytest.mark.parametrize("format", write.FORMATS)
def test_a_checkpoint_compiles_to_sparse_regions(format: str) -> None:
    torch._dynamo.reset()  # the weights of some checkpoints are the same
    read, dense = by_from_pretrained(format).float(), unread(format, torch.float64).eval()
    dense.load_state_dict(expected(format))
    found = compile_and_run(lambda tokens: read(tokens, use_cache=False).logits, TOKENS)
    layers = {each.name for each in found.regions if each.name.endswith("_proj.weight")}
    assert len(layers) == LAYERS, found.decisions
    torch.testing.assert_close(found.output, dense(TOKENS, use_cache=False).logits.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format", ["sparse-24-bitmask", "sparse-24-bitmask-of-fp8"])
def test_a_two_four_file_has_its_values_as_a_matrix_and_its_shape_as_a_column(format: str) -> None:
    arrays = load_file(folder(format) / "model.safetensors")
    packed = [name.removesuffix(".bitmask") for name in arrays if name.endswith(".bitmask")]
    assert len(packed) == LAYERS
    for layer in packed:
        rows, columns = arrays[f"{layer}.shape"].flatten().tolist()
        assert arrays[f"{layer}.shape"].shape == (2, 1) and f"{layer}.row_offsets" not in arrays
        assert arrays[f"{layer}.compressed"].shape == (rows, columns // 2)
        assert f"{layer}.weight" not in arrays


def test_a_file_without_a_pattern_has_its_values_in_a_row_and_offsets_of_rows() -> None:
    arrays = load_file(folder("sparse-bitmask") / "model.safetensors")
    up = "model.layers.0.mlp.up_proj"
    assert arrays[f"{up}.compressed"].dim() == 1 and arrays[f"{up}.shape"].shape == (2,)
    assert arrays[f"{up}.row_offsets"].shape == (32,) and f"{up}.weight" not in arrays
