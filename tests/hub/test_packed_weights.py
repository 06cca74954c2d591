"""`from_pretrained` of checkpoints that pack their weights: compressed-tensors' formats, by the method "gossamer"."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModelForCausalLM

import gossamer
from tests.hub.llama import config, logits, saved
from tests.sparsity.test_scaled_checkpoints import BaseCompressor, QuantizationArgs, QuantizationScheme


def in_bitmask(weight: Tensor, two_four: bool) -> dict[str, Tensor]:
    """The arrays of compressed-tensors 0.11."""
    mask = weight.float() != 0
    if two_four:
        groups = weight.float().abs().view(-1, 4)
        mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, groups.topk(2).indices, True).view(weight.shape)
    values, bits = weight[mask], torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little"))
    if two_four:
        return {"compressed": values.view(len(weight), -1), "bitmask": bits, "shape": torch.tensor(weight.shape)[:, None]}
    counts = mask.sum(1)
    return {
        "compressed": values, "bitmask": bits, "shape": torch.tensor(weight.shape), "row_offsets": counts.cumsum(0) - counts
    }  # fmt: skip


def packed(weight: Tensor, bits: int) -> dict[str, Tensor]:
    """What compressed-tensors writes as pack-quantized, in groups of 32."""
    scale = weight.view(len(weight), -1, 32).abs().amax(2) / 2 ** (bits - 1) + 1e-6
    arguments = QuantizationArgs(num_bits=bits, type="int", strategy="group", group_size=32, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, format="pack-quantized")
    return BaseCompressor.get_value_from_registry("pack-quantized").compress({"weight": weight, "weight_scale": scale}, scheme)


FORMATS: dict[str, Any] = {
    "sparse-bitmask": lambda weight: in_bitmask(weight, False),
    "sparse-24-bitmask": lambda weight: in_bitmask(weight, True),
    "pack-quantized-4": lambda weight: packed(weight, 4),
    "pack-quantized-8": lambda weight: packed(weight, 8),
    "dense": lambda weight: {"weight": weight},
}


def checkpoint(folder: Path, format: str) -> Any:
    """Writes one, and returns its quantization_config."""
    model = saved(folder)
    gossamer.finalize(gossamer.sparsify(model, "nm", n=2, m=4))
    state = model.state_dict()
    del state["lm_head.weight"]
    arrays = {}
    for name, tensor in state.items():
        layer, _, part = name.rpartition(".")
        of_layer = FORMATS[format](tensor) if layer.endswith("_proj") else {part: tensor}
        arrays |= {f"{layer}.{key}": array.contiguous() for key, array in of_layer.items()}
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    of_sparsity = {"format": format if "sparse" in format else "dense", "sparsity_structure": "2:4", "global_sparsity": 0.5}
    return model, {"quant_method": "compressed-tensors", "format": format.removesuffix("-4"), "sparsity_config": of_sparsity}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", [*FORMATS])
def test_a_checkpoint_of_compressed_tensors_is_read(format: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, said = checkpoint(tmp_path, format)
    ours = config(quantization_config=said)
    ours.quantization_config["quant_method"] = "gossamer"
    read = AutoModelForCausalLM.from_pretrained(tmp_path, config=ours, dtype=dtype)
    loaded = gossamer.load(AutoModelForCausalLM.from_config(config(), dtype=dtype), tmp_path).eval()
    assert read.dtype == dtype and torch.equal(logits(read), logits(loaded))
    up, original = (each.model.layers[0].mlp.up_proj.weight for each in (read, model))
    assert torch.equal(up == 0, original.to(dtype) == 0) or "pack" in format
    assert up.view(-1, 4).ne(0).sum(1).max() <= 2
    if "pack" not in format:
        assert torch.equal(up, original.to(dtype))


def test_what_was_packed_is_saved_plain_and_may_be_stored(tmp_path: Path) -> None:
    _, said = checkpoint(tmp_path / "packed", "sparse-bitmask")
    ours = config(quantization_config={**said, "quant_method": "gossamer", "weights": "stored"})
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", config=ours)
    assert isinstance(read.model.layers[0].mlp.up_proj.weight, gossamer.SparseTensor)
    read.save_pretrained(tmp_path / "plain")
    assert {*load_file(tmp_path / "plain" / "model.safetensors")} == {*read.state_dict()} - {"lm_head.weight"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(logits(again), logits(read))


def test_a_file_of_gossamer_is_read(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path, "dense")
    gossamer.save(model, tmp_path / "model.safetensors")
    assert any(name.endswith(".bitmask") for name in load_file(tmp_path / "model.safetensors"))
    found = AutoConfig.from_pretrained(tmp_path)
    found.quantization_config = {"quant_method": "gossamer"}
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path, config=found)), logits(model))
