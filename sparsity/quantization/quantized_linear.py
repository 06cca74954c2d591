"""`QuantizedLinear` is an nn.Linear with an int8 weight and a scale for each row. It quantizes its input at every call.

y[t, m] = step[t] scale[m] sum_k q[t, k] w[m, k] + bias[m]       q[t, k] = round(x[t, k] (1 / step[t]))
                                                                 step[t] = max_k |x[t, k]| / 127

Both are symmetric and sums are exact, so zeros stay zeros, and a kernel has nothing to correct. Each token has a step, because
a few tokens of a transformer are much larger than the others, and because results then do not depend on the batch.

With a calibrated input, the layer has one step and a zero point z:

y[t, m] = step scale[m] (sum_k q[t, k] w[m, k] - z sum_k w[m, k]) + bias[m]       q[t, k] = round(x[t, k] (1 / step)) + z,
                                                                                  at least -128, at most 127

Inputs outside of the range are clipped.
"""

from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.dialects.errors import GossamerError
from gossamer.runtime.int8_product import int8_product
from gossamer.sparsity.quantization.kept_types import KeepsTypes

_MOST = 127
_LEAST = torch.finfo(torch.float32).tiny
"""The smallest step, which a token of zeros has."""


class InputGrid(NamedTuple):
    """The numbers step (q - zero) for integers q from -128 to 127. Both fields are float32 []; zero is such an integer."""

    step: Tensor
    zero: Tensor

    @classmethod
    def between(cls, low: float, high: float) -> Self:
        """Returns a grid from about `low` <= 0 to about `high` >= 0, with 0 on it."""
        step = torch.tensor(max((high - low) / 255, _LEAST), dtype=torch.float32)
        return cls(step, (-128 - low / step).round().clamp(-128, 127))

    def integers(self, x: Tensor) -> Tensor:
        """Returns the nearest q, as floats."""
        return ((x * (1 / self.step)).round() + self.zero).clamp(-128, 127)


class QuantizedLinear(KeepsTypes, nn.Linear):
    """A linear layer with an int8 weight.

    weight_int8   [out_features, in_features], int8, -127 to 127
    weight_scale  [out_features], float32
    weight        their product, computed at each access, never written. Its dtype is the original one, or that of a
                  conversion (`half`, `to`)

    Buffers of a calibrated input, otherwise None:
    input_scale, input_zero_point   those of an `InputGrid`; layers with the same input tensor share these buffers
    input_offset                    [out_features], float32: the zero point times the sums of rows of weight_int8

    The input has any floating type, [..., in_features]; the result has the same type. It computes in float32 and int32. A token
    with a NaN or an infinity gives only NaN. The gradient treats rounding as the identity (straight-through, Bengio et al.,
    2013); the weight has none.
    """

    weight_int8: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    input_zero_point: Tensor | None
    input_offset: Tensor | None

    @classmethod
    def of(cls, linear: nn.Linear, grid: InputGrid | None = None) -> Self:
        """Turns a linear layer into a quantized one in place, so that hooks on it and references to it stay valid.

        GossamerError if its weight has a NaN or an infinity.
        """
        weight = linear.weight.detach()
        values, scale = quantized(weight)
        del linear._parameters["weight"]
        return cls.become(linear, values, scale, weight.dtype, grid)

    @classmethod
    def become(
        cls, linear: nn.Module, values: Tensor, scale: Tensor, dtype: torch.dtype, grid: InputGrid | None = None
    ) -> Self:
        """Turns a linear layer without a weight into one with these integers, in place; `dtype` is that of `weight`."""
        linear.__class__ = cls
        made: Any = linear
        made._dtype = dtype
        made.register_buffer("weight_int8", values)
        made.register_buffer("weight_scale", scale)
        step, zero = grid if grid is not None else (None, None)
        made.register_buffer("input_scale", step)
        made.register_buffer("input_zero_point", zero)
        made.register_buffer("input_offset", None if zero is None else zero * values.sum(1, dtype=torch.int32))
        return made

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight as floats."""
        return dequantized(self.weight_int8, self.weight_scale).to(self._dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Computes nn.Linear by the formulas above."""
        grid, offset = None, self.input_offset
        if self.input_scale is not None and self.input_zero_point is not None:
            grid = InputGrid(self.input_scale, self.input_zero_point)
        if torch.is_grad_enabled() and input.requires_grad:
            y = _StraightThrough.apply(input, self.weight_int8, self.weight_scale, grid, offset)
            return y if self.bias is None else y + self.bias.to(y.dtype)
        return quantized_linear(input, self.weight_int8, self.weight_scale, self.bias, grid, offset)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, int8{'' if self.input_scale is None else ', calibrated'}"


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a matrix rounded to int8, and a float32 scale for each row. GossamerError if it is not finite."""
    check_finite(weight)
    return rows_on_grid(weight.float())


def rows_on_grid(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `quantized` of float32 rows without the check. The scale of a row that is not finite is NaN."""
    most = rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(rows.shape[0])
    scale = (most / _MOST).clamp_min(_LEAST) + most * 0
    return (rows / scale[:, None]).round().clamp(-_MOST, _MOST).to(torch.int8), scale


def tokens_on_grid(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float32 tokens [T, K] as int8, and the step of each, [T, 1]. The step of a token that is not finite is NaN."""
    most = rows.abs().amax(1, keepdim=True)
    step = (most / _MOST).clamp_min(_LEAST) + most * 0
    return (rows * (1 / step)).round().to(torch.int8), step


def check_finite(weight: Tensor, what: str = "a weight") -> None:
    """GossamerError if a matrix has a NaN or an infinity."""
    if not bool(weight.isfinite().all()):
        raise GossamerError(
            f"{what} of shape {tuple(weight.shape)} has a NaN or an infinity, which integers cannot hold: repair it, "
            "or `skip` the layer"
        )


def dequantized(values: Tensor, scale: Tensor) -> Tensor:
    """Returns the float32 matrix of integers and scales."""
    return values.float() * scale[:, None]


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    grid: InputGrid | None = None,
    offset: Tensor | None = None,
) -> Tensor:
    """Computes the formulas above: x [..., K] of any floating type, weight [M, K] of int8, scale and bias [M] → [..., M].

    The result has the dtype of x. With a grid, `offset` [M] is z sum_k w[m, k].
    """
    if weight.shape[1] == 0:
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    rows = x.reshape(-1, weight.shape[1]).float()
    if grid is None or offset is None:
        q, step = tokens_on_grid(rows)
        y = _sums(q, weight).float() * step * scale
    else:
        step = (rows * 0).sum(1, keepdim=True) + grid.step  # NaN for a token that is not finite
        y = (_sums(grid.integers(rows).to(torch.int8), weight).float() - offset) * step * scale
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def _sums(q: Tensor, weight: Tensor) -> Tensor:
    """Returns exact sums [T, M]. Graphs for CPUs get operations that other backends know, too."""
    if q.device.type != "cpu" or not torch.compiler.is_compiling():
        return int8_product(q, weight.t())
    return torch.ops.aten._int_mm(q, weight.t()) if weight.shape[1] > 1 else q.int() * weight.int().t()


class _StraightThrough(torch.autograd.Function):
    """Computes `quantized_linear` without bias. Its gradient is that of the product of floats."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, scale: Tensor, grid: InputGrid | None, offset: Tensor | None) -> Tensor:
        return quantized_linear(x, weight, scale, None, grid, offset)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], inputs[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale = ctx.saved_tensors
        return grads[0] @ dequantized(weight, scale).to(grads[0].dtype), None, None, None, None
