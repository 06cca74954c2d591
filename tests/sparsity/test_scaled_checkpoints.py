"""Checkpoints that compressed-tensors has quantized, on top of sparsity: gossamer.load reads them as floats."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gossamer
from gossamer import FormatError

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

SHAPES = {"tensor": (1,), "channel": (24, 1), "group": (24, 3)}


def written(bits: int, strategy: str, symmetric: bool, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """What the package writes of a pruned weight, and the weight that it reads."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 96, generator=draw) * (torch.rand(24, 96, generator=draw) < 0.4)
    scale = (torch.rand(SHAPES[strategy], generator=draw) * 0.1 + 0.05).to(dtype)
    zero = torch.randint(-3, 3, SHAPES[strategy], generator=draw).to(torch.int8) * (not symmetric)
    arguments = QuantizationArgs(
        num_bits=bits, type="int", strategy=strategy, group_size=32 if strategy == "group" else None, symmetric=symmetric
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, format="pack-quantized")
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    state = compressor.compress({"weight": weight.to(dtype), "weight_scale": scale, "weight_zero_point": zero}, scheme)
    return {name: tensor.contiguous() for name, tensor in state.items()}, compressor.decompress(state, scheme)["weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", [*SHAPES])
@pytest.mark.parametrize("bits", [4, 8, 3, 6])
def test_packed_integers_are_read_bit_by_bit(
    bits: int, strategy: str, symmetric: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    arrays, expected = written(bits, strategy, symmetric, dtype)
    save_file({f"up.{name}": tensor for name, tensor in arrays.items()}, tmp_path / "model.safetensors")
    model = nn.ModuleDict({"up": nn.Linear(96, 24, bias=False, dtype=dtype)})
    gossamer.load(model, tmp_path)
    weight = model["up"].weight
    assert isinstance(weight, Tensor) and torch.equal(weight, expected)
    if symmetric:
        assert weight.eq(0).float().mean() > 0.5


@pytest.mark.parametrize("bitmask", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_eight_bits_with_scales_are_read(dtype: torch.dtype, bitmask: bool, tmp_path: Path) -> None:
    """int-quantized and float-quantized, and the same under a bitmask."""
    codes = (torch.randn(6, 20) * 20 * (torch.rand(6, 20) < 0.4)).to(dtype)
    scale = torch.rand(6, 1) + 0.1
    arrays = {"weight_scale": scale, "bias": torch.ones(6)}
    mask = codes.float() != 0
    if bitmask:
        values = codes.view(torch.uint8)[mask].view(dtype)
        bits = torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little"))
        arrays |= {"compressed": values, "bitmask": bits, "shape": torch.tensor([6, 20])}
        arrays |= {"row_offsets": mask.sum(1).cumsum(0) - mask.sum(1)}
    else:
        arrays["weight"] = codes
    save_file(arrays, tmp_path / "model.safetensors")
    layer = gossamer.load(nn.Linear(20, 6), tmp_path / "model.safetensors")
    assert torch.equal(layer.weight, codes.float() * scale)
    assert torch.equal(layer.weight == 0, ~mask)


def test_a_layer_with_integers_of_its_own_keeps_them(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.ones(4, 4, dtype=torch.int8))
            self.register_buffer("weight_scale", torch.ones(4, 1))

    gossamer.save(Own(), tmp_path / "own.safetensors")
    read = gossamer.load(Own(), tmp_path / "own.safetensors")
    assert read.weight.dtype == torch.int8 and torch.equal(read.weight, torch.ones(4, 4, dtype=torch.int8))


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("weight_packed", lambda a: a[:, :-1].contiguous(), "does not pack"),
        ("weight_packed", lambda a: a.long(), "does not pack"),
        ("weight_scale", lambda a: a[:7].contiguous(), "do not fit"),
        ("weight_scale", lambda a: a.int(), "is no weight"),
        ("weight_shape", lambda a: a * 2, "weight_shape must be"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(part: str, change, said: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    arrays, _ = written(4, "group", True, torch.float32)
    arrays[part] = change(arrays[part])
    save_file(arrays, tmp_path / "broken.safetensors")
    layer = nn.Linear(192, 48, bias=False) if part == "weight_shape" else nn.Linear(96, 24, bias=False)
    with pytest.raises(FormatError, match=said):
        gossamer.load(layer, tmp_path / "broken.safetensors")
