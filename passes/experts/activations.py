"""The activations of experts on vectors, by their names, and their derivatives."""

from collections.abc import Callable

from torch_mlir import ir
from torch_mlir.dialects import arith, math

from gossamer.passes.loops.vectors import splat_of

ALPHA, LIMIT = 1.702, 7.0
"""The constants of clamped_swiglu, the activation of gpt-oss."""
_SQRT_HALF, _SQRT_TWO_OVER_PI, _CUBIC = 0.7071067811865476, 0.7978845608028654, 0.044715
_DENSITY = 0.3989422804014327  # density of the normal distribution at 0


def hidden(activation: str, gate: ir.Value, up: ir.Value | None) -> ir.Value:
    """Returns activation(gate) * up for vectors, or activation(gate) without up."""
    if up is None:
        return _ACTIVATIONS[activation](gate)
    if activation == "clamped_swiglu":
        most = _splat(gate, LIMIT)
        gate, up = arith.minimumf(gate, most), arith.maximumf(arith.minimumf(up, most), _splat(up, -LIMIT))
        slope = _sigmoid(arith.mulf(gate, _splat(gate, ALPHA)))
        return arith.mulf(arith.mulf(gate, slope), arith.addf(up, _splat(up, 1.0)))
    return arith.mulf(_ACTIVATIONS[activation](gate), up)


def with_slopes(activation: str, gate: ir.Value, up: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """Returns `hidden`, its derivative by gate, and its derivative by up, or None without up."""
    if activation == "clamped_swiglu":
        assert up is not None
        return _clamped_with_slopes(gate, up)
    value, slope = _SLOPES[activation](gate)
    return (value, slope, None) if up is None else (arith.mulf(value, up), arith.mulf(slope, up), value)


def _clamped_with_slopes(gate: ir.Value, up: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    most = _splat(gate, LIMIT)
    own, other = arith.minimumf(gate, most), arith.maximumf(arith.minimumf(up, most), _splat(up, -LIMIT))
    more = arith.addf(other, _splat(up, 1.0))
    share = _sigmoid(arith.mulf(own, _splat(gate, ALPHA)))
    value = arith.mulf(own, share)
    slope = arith.addf(share, arith.mulf(arith.mulf(value, _splat(gate, ALPHA)), _rest(share)))
    inside = [arith.cmpf(arith.CmpFPredicate.OEQ, a, b) for a, b in ((gate, own), (up, other))]
    slopes = [
        arith.select(each, found, _splat(gate, 0.0))
        for each, found in zip(inside, (arith.mulf(slope, more), value), strict=True)
    ]
    return arith.mulf(value, more), slopes[0], slopes[1]


def _rest(share: ir.Value) -> ir.Value:
    """Returns 1 - share."""
    return arith.subf(_splat(share, 1.0), share)


def _relu_slope(x: ir.Value) -> tuple[ir.Value, ir.Value]:
    above = arith.cmpf(arith.CmpFPredicate.UGT, x, _splat(x, 0.0))
    return _relu(x), arith.select(above, _splat(x, 1.0), _splat(x, 0.0))


def _relu2_slope(x: ir.Value) -> tuple[ir.Value, ir.Value]:
    above = _relu(x)
    return arith.mulf(above, above), arith.addf(above, above)


def _sigmoid_slope(x: ir.Value) -> tuple[ir.Value, ir.Value]:
    share = _sigmoid(x)
    return share, arith.mulf(share, _rest(share))


def _tanh_slope(x: ir.Value) -> tuple[ir.Value, ir.Value]:
    value = math.tanh(x)
    return value, _rest(arith.mulf(value, value))


def _silu_slope(x: ir.Value) -> tuple[ir.Value, ir.Value]:
    share = _sigmoid(x)
    value = arith.mulf(x, share)
    return value, arith.addf(share, arith.mulf(value, _rest(share)))


def _gelu_slope(x: ir.Value) -> tuple[ir.Value, ir.Value]:
    share = _half(_splat(x, 1.0), math.erf(arith.mulf(x, _splat(x, _SQRT_HALF))))
    density = arith.mulf(math.exp(arith.mulf(arith.mulf(x, x), _splat(x, -0.5))), _splat(x, _DENSITY))
    return arith.mulf(x, share), arith.addf(share, arith.mulf(x, density))


def _gelu_tanh_slope(x: ir.Value) -> tuple[ir.Value, ir.Value]:
    square = arith.mulf(x, x)
    cubic = arith.mulf(arith.mulf(square, x), _splat(x, _CUBIC))
    inner = math.tanh(arith.mulf(arith.addf(x, cubic), _splat(x, _SQRT_TWO_OVER_PI)))
    share = _half(_splat(x, 1.0), inner)
    steep = arith.addf(_splat(x, 1.0), arith.mulf(square, _splat(x, 3 * _CUBIC)))
    more = arith.mulf(arith.mulf(steep, _splat(x, _SQRT_TWO_OVER_PI / 2)), _rest(arith.mulf(inner, inner)))
    return arith.mulf(x, share), arith.addf(share, arith.mulf(x, more))


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
    """Returns x / 2 * (1 + share)."""
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

_SLOPES: dict[str, Callable[[ir.Value], tuple[ir.Value, ir.Value]]] = {
    "identity": lambda x: (x, _splat(x, 1.0)),
    "relu": _relu_slope,
    "relu2": _relu2_slope,
    "sigmoid": _sigmoid_slope,
    "tanh": _tanh_slope,
    "silu": _silu_slope,
    "gelu": _gelu_slope,
    "gelu_tanh": _gelu_tanh_slope,
}
"""For each name, a function that returns an activation and its derivative."""
