"""Replaces layers of `torch.ao.quantization.quantize_dynamic` by `QuantizedLinear`, because Dynamo cannot trace the former."""

from typing import Any

import torch
from torch import Tensor, nn

from gossamer.sparsity.quantization.quantize import is_sparse
from gossamer.sparsity.quantization.quantized_linear import QuantizedLinear

_MODULE = "torch.ao.nn.quantized.dynamic.modules.linear"


def take_dynamic(model: nn.Module) -> None:
    """Turns a model's dynamically quantized linear layers with many zeros into `QuantizedLinear`, in place.

    Weights and their scales stay exactly the same. Layers whose weight is asymmetric, float16 or dense stay as they are.
    """
    for layer in model.modules():
        kind = type(layer)  # compared by name, because importing torch.ao takes a second
        if kind.__name__ == "Linear" and kind.__module__ == _MODULE:
            _take(layer)


def _take(layer: Any) -> None:
    weight, bias = layer.weight(), layer.bias()
    scale = _scale(weight) if weight.dtype is torch.qint8 else None
    if scale is None or not is_sparse(weight.int_repr()):
        return
    del layer._modules["_packed_params"], layer.scale, layer.zero_point
    made = QuantizedLinear.become(layer, weight.int_repr(), scale, torch.float32)
    made.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))


def _scale(weight: Tensor) -> Tensor | None:
    """Returns a scale for each row of a quantized matrix, None if zero points are not 0, or scales are not by row."""
    if weight.qscheme() is torch.per_tensor_affine:
        same = torch.full(weight.shape[:1], weight.q_scale(), dtype=torch.float32)
        return same if weight.q_zero_point() == 0 else None
    if weight.qscheme() is not torch.per_channel_affine or weight.q_per_channel_axis() != 0:
        return None
    return None if bool(weight.q_per_channel_zero_points().any()) else weight.q_per_channel_scales().float()
