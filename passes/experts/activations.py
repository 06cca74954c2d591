"""The activations of experts on vectors, by their names."""

from collections.abc import Callable

from torch_mlir import ir
from torch_mlir.dialects import arith, math

from gossamer.passes.loops.vectors import splat_of

ALPHA, LIMIT = 1.702, 7.0
"""Of clamped_swiglu, that of gpt-oss."""
_SQRT_HALF, _SQRT_TWO_OVER_PI, _CUBIC = 0.7071067811865476, 0.7978845608028654, 0.044715


def hidden(activation: str, gate: ir.Value, up: ir.Value | None) -> ir.Value:
    """activation(gate) * up, of vectors; activation(gate) without up."""
    if up is None:
        return _ACTIVATIONS[activation](gate)
    if activation == "clamped_swiglu":
        most = _splat(gate, LIMIT)
        gate, up = arith.minimumf(gate, most), arith.maximumf(arith.minimumf(up, most), _splat(up, -LIMIT))
        slope = _sigmoid(arith.mulf(gate, _splat(gate, ALPHA)))
        return arith.mulf(arith.mulf(gate, slope), arith.addf(up, _splat(up, 1.0)))
    return arith.mulf(_ACTIVATIONS[activation](gate), up)


def _splat(like: ir.Value, value: float) -> ir.Value:
    return splat_of(ir.VectorType(like.type), value)


def _sigmoid(x: ir.Value) -> ir.Value:
    return arith.divf(_splat(x, 1.0), arith.addf(math.exp(arith.negf(x)), _splat(x, 1.0)))


def _relu(x: ir.Value) -> ir.Value:
    return arith.maximumf(x, _splat(x, 0.0))


def _gelu(x: ir.Value) -> ir.Value:
    return _half(x, math.erf(arith.mulf(x, _splat(x, _SQRT_HALF))))


def _gelu_tanh(x: ir.Value) -> ir.Value:
    cubic = arith.mulf(arith.mulf(arith.mulf(x, x), x), _splat(x, _CUBIC))
    return _half(x, math.tanh(arith.mulf(arith.addf(x, cubic), _splat(x, _SQRT_TWO_OVER_PI))))


def _half(x: ir.Value, share: ir.Value) -> ir.Value:
    """x / 2 * (1 + share)"""
    return arith.mulf(arith.mulf(x, _splat(x, 0.5)), arith.addf(share, _splat(x, 1.0)))


_ACTIVATIONS: dict[str, Callable[[ir.Value], ir.Value]] = {
    "identity": lambda x: x,
    "relu": _relu,
    "relu2": lambda x: arith.mulf(_relu(x), _relu(x)),
    "sigmoid": _sigmoid,
    "tanh": math.tanh,
    "silu": lambda x: arith.mulf(x, _sigmoid(x)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}
