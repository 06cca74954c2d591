"""Finds linear layers that can have integer weights, says why others cannot, and turns `Conv1D` into nn.Linear."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gossamer.sparsity.pruning.choose_layers import is_transposed
from gossamer.sparsity.quantization.aware_linear import QuantizationAwareLinear
from gossamer.sparsity.torch_functions.plain_model import evaluating


def why_not_linear(layer: nn.Module) -> str:
    """Returns why a layer cannot have integer weights, "" if it can."""
    if isinstance(layer, NonDynamicallyQuantizableLinear | nn.MultiheadAttention):
        return "attention reads its weight itself"
    if not (isinstance(layer, nn.Linear) or is_transposed(layer)):
        return "no linear layer"
    return "" if _computes_a_product(layer) else "computes in a way of its own"


def become_linear(layer: nn.Module) -> nn.Linear:
    """Turns `Conv1D` of transformers into an nn.Linear in place, so that hooks on it and references to it stay valid.

    Its transposed weight is a new parameter. Other layers stay as they are.
    """
    made: Any = layer
    if is_transposed(layer):
        weight: Any = made._parameters.pop("weight")
        for name in ("nf", "nx"):
            vars(made).pop(name, None)
        made.__class__ = nn.Linear
        made.in_features, made.out_features = weight.shape
        made._parameters = {"weight": nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad), **made._parameters}
    return made


def sizes(layer: nn.Module) -> tuple[int, int]:
    """Returns the numbers of outputs and inputs of a layer."""
    rows, columns = layer.weight.shape  # type: ignore[misc]
    return (columns, rows) if is_transposed(layer) else (rows, columns)


@torch.no_grad()
def _computes_a_product(layer: nn.Module) -> bool:
    """Whether a layer computes what nn.Linear does. Some subclasses route tokens, or have blocks on the diagonal."""
    if type(layer).forward in (nn.Linear.forward, QuantizationAwareLinear.forward) or is_transposed(layer):
        return True
    if layer._modules.keys() - {"parametrizations"} or layer._parameters.keys() - {"weight", "bias"}:
        return False
    weight: Tensor = layer.weight.detach()  # type: ignore[operator]
    x = torch.linspace(-1, 1, 2 * weight.shape[1], dtype=weight.dtype, device=weight.device).view(2, -1)
    wanted = F.linear(x, weight, layer.bias)  # type: ignore[arg-type]
    try:
        with evaluating(layer):
            found = type(layer).forward(layer, x)
    except Exception:  # a function that takes other inputs
        return False
    same_shape = isinstance(found, Tensor) and found.shape == wanted.shape
    return same_shape and bool((found - wanted).norm() <= 0.02 * wanted.norm())
