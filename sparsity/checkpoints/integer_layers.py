"""Linear layers whose weight a file has in integers, and the model in floats: what makes them like those of the file.

    in the file                                     the layer becomes
    weight_int8, weight_scale                       QuantizedLinear
    input_scale, input_zero_point, input_offset     with a calibrated input, where these are there, too
    weight_groups                                   GroupedLinear, of 4 or 8 bits by the width of its lines

`Conv1D` of transformers becomes one, too. Nothing is rounded, and the weight that a layer has is not looked at, so that it may
be on the meta device.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.sparsity.pruning.choose_layers import is_transposed
from gossamer.sparsity.quantization.grouped_linear import GROUP, GroupedLinear
from gossamer.sparsity.quantization.linear_layers import become_linear, sizes
from gossamer.sparsity.quantization.quantized_linear import InputGrid, QuantizedLinear

Shapes = Mapping[str, tuple[int, ...]]
"""Of the tensors in a file, by name."""

Integers = QuantizedLinear | GroupedLinear


@dataclass(frozen=True)
class FloatLayer:
    """A layer that is to be one of integers: of so many bits in groups, or of int8 throughout, its input maybe calibrated."""

    layer: nn.Module
    bits_in_groups: int | None
    calibrated: bool = False

    def become(self) -> Integers:
        """Turns it, in place, into one whose buffers are still to be filled."""
        return self._emptied(become_linear(self.layer))

    def look(self) -> Integers:
        """What it will be, on the meta device."""
        weight, bias = self.layer._parameters["weight"], self.layer._parameters.get("bias")
        assert weight is not None
        outputs, inputs = sizes(self.layer)
        like = nn.Linear(inputs, outputs, bias is not None, device="meta", dtype=weight.dtype)
        return self._emptied(like)

    def _emptied(self, linear: nn.Linear) -> Integers:
        weight = linear._parameters.pop("weight")  # a SparseTensor, perhaps
        assert weight is not None
        rows, columns = weight.shape

        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=weight.device)

        bits = self.bits_in_groups
        if bits is None:
            values, scale = buffer(rows, columns, dtype=torch.int8), buffer(rows, dtype=torch.float32)
            grid = InputGrid(*(buffer(dtype=torch.float32) for _ in range(2))) if self.calibrated else None
            return QuantizedLinear.become(linear, values, scale, weight.dtype, grid)
        return GroupedLinear.become(linear, buffer(0, GROUP * bits // 8, dtype=torch.uint8), weight.dtype)


def in_integers(modules: Mapping[str, nn.Module], file: Shapes) -> dict[str, FloatLayer]:
    """The layers, by name, that have floats and of which a file has integers."""
    found: dict[str, FloatLayer] = {}
    for name, layer in modules.items():
        is_linear = isinstance(layer, nn.Linear) or is_transposed(layer)
        if not is_linear or layer._parameters.get("weight") is None or tensor_of(name, "weight") in file:
            continue
        groups = file.get(tensor_of(name, "weight_groups"), ())
        if tensor_of(name, "weight_int8") in file:
            found[name] = FloatLayer(layer, None, tensor_of(name, "input_scale") in file)
        elif len(groups) == 2 and groups[1] * 8 in (4 * GROUP, 8 * GROUP):
            found[name] = FloatLayer(layer, groups[1] * 8 // GROUP)
    return found


def tensor_of(layer: str, part: str) -> str:
    """The name of a layer's tensor in the model's state dict."""
    return f"{layer}.{part}".lstrip(".")
