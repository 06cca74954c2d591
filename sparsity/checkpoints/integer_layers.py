"""Turns float layers of a model into quantized ones, if the file to load has their weights as integers.

    in the file                                     the layer becomes
    weight_int8, weight_scale                       QuantizedLinear
    input_scale, input_zero_point, input_offset     with a calibrated input, if the file also has these
    weight_groups                                   GroupedLinear, of 4 or 8 bits by the width of its lines
    gate_up_proj_codes, gate_up_proj_scale, …       QuantizedExperts

`Conv1D` of transformers becomes one, too. Nothing is rounded. The float weight of a layer is not read, so it may be on the meta
device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gossamer.sparsity.pruning.choose_layers import is_transposed
from gossamer.sparsity.quantization.grouped_linear import GROUP, GroupedLinear
from gossamer.sparsity.quantization.linear_layers import become_linear, sizes
from gossamer.sparsity.quantization.quantized_experts import PARTS, QuantizedExperts
from gossamer.sparsity.quantization.quantized_linear import InputGrid, QuantizedLinear
from gossamer.sparsity.torch_functions.open_experts import expert_weights

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of the tensors in a file, by name."""

Integers = QuantizedLinear | GroupedLinear | QuantizedExperts


@dataclass(frozen=True)
class FloatLayer:
    """A float layer to be quantized: in groups with `bits_in_groups`, or (None) in int8, maybe with a calibrated input."""

    layer: nn.Module
    bits_in_groups: int | None
    calibrated: bool = False
    weights: ClassVar[tuple[str, ...]] = ("weight",)

    def become(self) -> Integers:
        """Turns it in place into a quantized layer with empty buffers, which the caller fills."""
        return self._emptied(become_linear(self.layer))

    def look(self) -> Integers:
        """Returns a layer on the meta device that has the future buffers."""
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


@dataclass(frozen=True)
class FloatExperts:
    """Float experts that will be quantized.

    shapes  the shapes of the integers and of the scales of each weight
    """

    layer: nn.Module
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def become(self) -> Integers:
        """Turns them in place into quantized experts with empty buffers, which the caller fills."""
        return QuantizedExperts.become(self.layer, self._buffers())

    def look(self) -> nn.Module:
        """Returns a module on the meta device that has the future buffers."""
        look = nn.Module()
        for name, buffers in self._buffers("meta").items():
            for part, buffer in zip(PARTS, buffers, strict=True):
                look.register_buffer(f"{name}_{part}", buffer)
        return look

    def _buffers(self, device: str | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        found = {}
        for name, (codes, scale) in self.shapes.items():
            weight = self.layer.get_parameter(name)
            columns = weight.shape[1 if self.layer.is_transposed else 2]
            bits = torch.int8 if codes[-1] == columns else torch.uint8
            on = device or weight.device
            found[name] = torch.empty(codes, dtype=bits, device=on), torch.empty(scale, dtype=torch.float32, device=on)
        return found


def in_integers(modules: Mapping[str, nn.Module], file: Shapes) -> dict[str, FloatLayer | FloatExperts]:
    """Returns, by name, the float layers whose weights a file has as integers."""
    found: dict[str, FloatLayer | FloatExperts] = {}
    for name, layer in modules.items():
        codes, scales = ({e: file.get(tensor_of(name, f"{e}_{part}"), ()) for e in expert_weights(layer)} for part in PARTS)
        if parametrize.is_parametrized(layer):
            continue  # with another class, it would lose the tensors that are computed
        if codes and all(len(shape) == 3 for shape in (*codes.values(), *scales.values())):
            found[name] = FloatExperts(layer, {each: (codes[each], scales[each]) for each in codes})
            continue
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
    """Returns the name of a layer's tensor in the model's state dict."""
    return f"{layer}.{part}".lstrip(".")
