"""`QuantizationAwareLinear` is an nn.Linear that trains for int8. It rounds weight and input as `QuantizedLinear` does.

y = round(x) round(w)^T + bias        the gradients treat rounding as the identity

(Jacob et al., 2018, section 3; straight-through: Bengio et al., 2013.)
"""

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.sparsity.quantization.quantized_linear import dequantized, rows_on_grid, tokens_on_grid


class QuantizationAwareLinear(nn.Linear):
    """A linear layer with float parameters, whose results are those of the `QuantizedLinear` made of it.

    Rounding keeps zeros of the weight. In training, `GradualMasks`, `distill` or `train_sparse` keep them, as in any linear
    layer. Results have the input's dtype; sums are in floats. NaN and infinity make NaN.
    """

    @classmethod
    def of(cls, linear: nn.Linear) -> Self:
        """Turns a linear layer into one of this class in place. Its parameters stay."""
        linear.__class__ = cls
        made: Any = linear
        return made

    def forward(self, input: Tensor) -> Tensor:
        """Computes what nn.Linear computes, with rounded weight and input."""
        if self.in_features == 0:
            return super().forward(input)
        x, weight = _RoundedTokens.apply(input), _RoundedRows.apply(self.weight)
        return F.linear(x, weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, trains for int8"


class _Rounded(torch.autograd.Function):
    """A function that rounds, with the gradient of the identity."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Saves nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _RoundedRows(_Rounded):
    @staticmethod
    def forward(weight: Tensor) -> Tensor:
        return dequantized(*rows_on_grid(weight.float())).to(weight.dtype)


class _RoundedTokens(_Rounded):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        q, step = tokens_on_grid(x.reshape(-1, x.shape[-1]).float())
        return (q.float() * step).to(x.dtype).view(x.shape)
