"""Elementwise arithmetic of torch on SparseTensors. Functions that make zeros nonzero give dense results, see densify.py."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.sparsity.compiler.operands import dense as bound_dense
from gossamer.sparsity.operations.dense_results import sample
from gossamer.sparsity.operations.open_sizes import is_one
from gossamer.sparsity.operations.sparse_results import add_sparse, in_format, sizes_stay_inside
from gossamer.sparsity.tensor.block_edges import inside_of, within
from gossamer.sparsity.tensor.broadcasting import broadcast
from gossamer.sparsity.tensor.densify import densified
from gossamer.sparsity.tensor.einsum import einsum, of_one_dtype
from gossamer.sparsity.tensor.entries import letters_of
from gossamer.sparsity.tensor.extension import implements
from gossamer.sparsity.tensor.shapes import to_dense
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, bound_to, like, made_of, values_of

Function = Callable[..., Any]

# f(0) = 0: the result has the pattern of the operand.
_ZERO_PRESERVING = (
    "abs", "absolute", "arcsin", "arcsinh", "arctan", "arctanh", "asin", "asinh", "atan", "atanh", "ceil", "clone",
    "conj_physical", "deg2rad", "erf", "erfinv", "expm1", "fix", "floor", "frac", "log1p", "nan_to_num", "neg", "negative",
    "positive", "rad2deg", "relu", "round", "sgn", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "trunc",
)  # fmt: skip
_ACTIVATIONS = (
    "celu", "elu", "gelu", "hardshrink", "hardswish", "leaky_relu", "mish", "relu", "relu6", "selu", "silu", "softshrink",
    "softsign", "tanhshrink",
)  # fmt: skip


@implements(torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.multiply, torch.Tensor.multiply)
def mul(left: Any, right: Any) -> Tensor:
    """Multiplies sparse by a number, dense (broadcast; keeps the sparse pattern), or sparse (intersection of the patterns)."""
    if not isinstance(left, SparseTensor):
        left, right = right, left
    if not isinstance(right, Tensor) or right.dim() == 0:
        return like(left, within(left, values_of(left) * right))
    if isinstance(right, SparseTensor):
        left, right = broadcast("mul", left, right)
        if _same_pattern(left, right):
            return like(left, values_of(left) * values_of(right))
        letters = letters_of(left)
        return einsum(f"{letters},{letters}->{letters}", left, right)
    (left,) = broadcast("mul", left, beside=[right])
    return like(left, values_of(left) * at_entries(left, right))


@implements(torch.div, torch.Tensor.div, torch.Tensor.__truediv__, torch.true_divide, torch.Tensor.true_divide, torch.divide,
            torch.Tensor.divide)  # fmt: skip
def div(left: Any, right: Any, *, rounding_mode: str | None = None) -> Tensor:
    """Divides sparse by a number or a dense tensor (broadcast). Zeros stay zeros, even where the divisor is 0.

    The quotient of two sparse tensors is dense, because zeros of the divisor give infinities and NaNs.
    """
    if isinstance(right, SparseTensor):
        quotient: Tensor = densified(torch.div, (left, right), {"rounding_mode": rounding_mode})
        return quotient
    if not (isinstance(right, Tensor) and right.dim()):
        quotients = torch.div(within(left, values_of(left)), right, rounding_mode=rounding_mode)
        return like(left, within(left, quotients))
    (left,) = broadcast("div", left, beside=[right])
    divisor, inside = at_entries(left, right), inside_of(left)
    if inside is not None:  # padding of blocks is divided by 1, so that neither values nor gradients are NaN
        divisor = torch.where(inside, divisor, 1)
    return like(left, torch.div(values_of(left), divisor, rounding_mode=rounding_mode))


@implements(torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)
def add(left: Any, right: Any, *, alpha: float = 1) -> Tensor:
    """Adds sparse and sparse (union of the patterns, format of the first), or sparse and dense or a number (dense)."""
    if all(isinstance(each, Tensor) and each.dtype is torch.bool for each in (left, right)):
        alpha = bool(alpha)  # with a number, torch 2.13's Inductor writes integers into memory for bools
    if not (isinstance(left, SparseTensor) and isinstance(right, SparseTensor)):
        dense = [to_dense(each) if isinstance(each, SparseTensor) else each for each in (left, right)]
        total: Tensor = torch.add(*dense, alpha=alpha)
        return total
    left, right = broadcast("add", left, right)
    if _same_pattern(left, right):
        return like(left, torch.add(values_of(left), values_of(right), alpha=alpha))
    dtype = torch.promote_types(left.dtype, right.dtype)
    if alpha != 1:
        right = like(right, (values_of(right).to(dtype) * alpha).to(dtype))
    return _union(left, right)


@implements(torch.sub, torch.Tensor.sub, torch.Tensor.__sub__, torch.subtract, torch.Tensor.subtract)
def sub(left: Any, right: Any, *, alpha: float = 1) -> Tensor:
    """Returns left - alpha * right, as `add` does."""
    torch.sub(_nothing(left), _nothing(right))  # it refuses bools
    return add(left, right, alpha=-alpha)


@implements(torch.Tensor.__rsub__, torch.rsub)
def rsub(right: Any, left: Any, *, alpha: float = 1) -> Tensor:
    """Returns left - alpha * right, as `add` does."""
    return sub(left, right, alpha=alpha)


@implements(torch.addcmul, torch.Tensor.addcmul)
def addcmul(input: Tensor, left: Tensor, right: Tensor, *, value: float = 1) -> Tensor:
    """Returns input + value * left * right; sparse if the first is, and one of the others."""
    factors = left, right
    if isinstance(input, SparseTensor) and not any(isinstance(each, SparseTensor) for each in factors):
        return torch.addcmul(to_dense(input), *factors, value=value)
    with sizes_stay_inside():
        product = mul(*factors)
    return add(input, product, alpha=value)


@implements(torch.addcdiv, torch.Tensor.addcdiv)
def addcdiv(input: Tensor, left: Tensor, right: Tensor, *, value: float = 1) -> Tensor:
    """Returns input + value * left / right; sparse if the first two are."""
    torch.addcdiv(*map(_nothing, (input, left, right)))  # it refuses to divide integers
    if isinstance(right, SparseTensor) or not isinstance(left, SparseTensor):
        dense = [to_dense(each) if isinstance(each, SparseTensor) else each for each in (input, left, right)]
        return torch.addcdiv(*dense, value=value)
    with sizes_stay_inside():
        quotient = div(left, right)
    return add(input, quotient, alpha=value)


@implements(torch.lerp, torch.Tensor.lerp)
def lerp(input: Tensor, end: Tensor, weight: Any) -> Tensor:
    """Returns input + weight * (end - input); sparse if both are."""
    with sizes_stay_inside():
        way = sub(end, input)
        share = mul(way, weight) if isinstance(way, SparseTensor) or isinstance(weight, SparseTensor) else way * weight
    return add(input, share)


@implements(torch.full_like)
def full_like(input: SparseTensor, fill_value: Any, **kwargs: Any) -> Tensor:
    """Returns a tensor of one value; dense unless the value is 0."""
    if not fill_value:
        return torch.zeros_like(input, **kwargs)
    given: dict[str, Any] = {"dtype": input.dtype, "device": input.device}
    return torch.full(
        tuple(input.shape), fill_value, **given | {n: v for n, v in kwargs.items() if v is not None and n != "memory_format"}
    )


@implements(F.dropout)
def dropout(input: SparseTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> SparseTensor:
    """Applies dropout to the stored values."""
    return like(input, F.dropout(values_of(input), p, training))


@implements(torch.clamp, torch.Tensor.clamp, torch.clip, torch.Tensor.clip)
def clamp(input: SparseTensor, min: Any = None, max: Any = None) -> Tensor:
    """Clamps elements to bounds. The result is sparse if the bounds are numbers with 0 between them."""
    numbers = not any(isinstance(bound, Tensor) for bound in (min, max))
    if not (numbers and (min is None or min <= 0) and (max is None or max >= 0)):  # False for NaN
        out: Tensor = densified(torch.clamp, (input, min, max), {})
        return out
    return like(input, torch.clamp(values_of(input), min, max))


@implements(torch.clamp_min, torch.Tensor.clamp_min)
def clamp_min(input: SparseTensor, min: Any) -> Tensor:
    """Does `clamp` from below."""
    return clamp(input, min)


@implements(torch.clamp_max, torch.Tensor.clamp_max)
def clamp_max(input: SparseTensor, max: Any) -> Tensor:
    """Does `clamp` from above."""
    return clamp(input, None, max)


def _on_values(function: Function) -> Function:
    def apply(input: SparseTensor, *args: Any, **kwargs: Any) -> SparseTensor:
        return like(input, function(values_of(input), *args, **kwargs))

    return apply


def _of_one_pattern(function: Function) -> Function:
    def apply(left: Any, right: Any) -> Tensor:
        if isinstance(left, SparseTensor) and isinstance(right, SparseTensor) and _same_pattern(left, right):
            return like(left, function(values_of(left), values_of(right)))
        out: Tensor = densified(function, (left, right), {})
        return out

    return apply


def _of_truth(function: Function, ours: Function) -> Function:
    def apply(left: Any, right: Any) -> Tensor:
        truths = isinstance(right, Tensor) and isinstance(left, Tensor) and left.dtype == right.dtype == torch.bool
        out: Tensor = ours(left, right) if truths else densified(function, (left, right), {})
        return out

    return apply


for _name, _ours in (("and", mul), ("or", add)):
    for _function in (f"bitwise_{_name}", f"logical_{_name}"):
        implements(getattr(torch, _function), getattr(torch.Tensor, _function))(_of_truth(getattr(torch, _function), _ours))
    for _function in (f"__{_name}__", f"__r{_name}__"):
        implements(getattr(torch.Tensor, _function))(_of_truth(getattr(torch, f"bitwise_{_name}"), _ours))
maximum = implements(torch.maximum, torch.Tensor.maximum)(_of_one_pattern(torch.maximum))
"""The larger of two tensors; sparse if they share their pattern."""
minimum = implements(torch.minimum, torch.Tensor.minimum)(_of_one_pattern(torch.minimum))
"""The smaller of two tensors; sparse if they share their pattern."""

for _name in _ZERO_PRESERVING:
    _function = getattr(torch, _name)
    SparseTensor.functions[_function] = SparseTensor.functions[getattr(torch.Tensor, _name)] = _on_values(_function)
for _part in ("real", "imag"):
    SparseTensor.functions[getattr(torch, _part)] = SparseTensor.functions[getattr(torch.Tensor, _part).__get__] = _on_values(
        getattr(torch, _part)
    )
for _name in ("erf", "erfinv", "expm1", "log1p", "round"):
    SparseTensor.functions[getattr(torch.special, _name)] = _on_values(getattr(torch, _name))
SparseTensor.functions[torch.conj] = SparseTensor.functions[torch.Tensor.conj] = _on_values(torch.conj_physical)
SparseTensor.functions[torch.Tensor.__neg__] = _on_values(torch.neg)
SparseTensor.functions[torch.Tensor.__abs__] = _on_values(torch.abs)
for _name in _ACTIVATIONS:
    SparseTensor.functions[getattr(F, _name)] = _on_values(getattr(F, _name))


@implements(F.hardtanh)
def hardtanh(input: SparseTensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """Limits elements. Zeros stay zeros if 0 lies between the limits; else the result is dense. The caller works in place."""
    if min_val <= 0 <= max_val:
        return like(input, F.hardtanh(values_of(input), min_val, max_val))
    limited: Tensor = densified(F.hardtanh, (input, min_val, max_val), {})
    return limited


@implements(torch.pow, torch.Tensor.pow, torch.Tensor.__pow__)
def pow_(input: Any, exponent: Any) -> Tensor:
    """Computes powers. Zeros stay zeros if the exponent is a positive number; else the result is dense."""
    if isinstance(input, SparseTensor) and not isinstance(exponent, Tensor | complex) and exponent > 0:
        return like(input, values_of(input) ** exponent)
    power: Tensor = densified(torch.pow, (input, exponent), {})
    return power


def _new(name: str) -> Function:
    def make(input: SparseTensor, *args: Any, **kwargs: Any) -> Tensor:
        of_a_kind = torch.empty(0, dtype=input.dtype, device=input.device)
        new: Tensor = getattr(of_a_kind, name)(*args, **kwargs)
        return new

    return make


for _name in ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"):
    SparseTensor.functions[getattr(torch.Tensor, _name)] = _new(_name)


def _nothing(operand: Any) -> Any:
    """Returns an empty tensor of an operand's dtype, or the operand if it is a number."""
    return torch.empty(0, dtype=operand.dtype) if isinstance(operand, Tensor) and operand.dim() else operand


def _union(left: SparseTensor, right: SparseTensor) -> SparseTensor:
    letters, format = letters_of(left), left.format
    one, other = (bound_to(letters, each) for each in of_one_dtype((left, right)))
    return made_of(in_format(lambda result: add_sparse(one, other, result), letters, format))


def at_entries(pattern: SparseTensor, dense: Tensor) -> Tensor:
    """Returns the elements of a dense tensor, broadcast to the shape, at the stored entries (flat), in the promoted dtype."""
    letters = letters_of(pattern)
    own = letters[len(letters) - dense.dim() :]
    single = [n for n, extent in enumerate(dense.shape) if is_one(extent) and not is_one(pattern.shape[n - dense.dim()])]
    factor = dense.squeeze(tuple(single)) if single else dense
    kept = "".join(letter for n, letter in enumerate(own) if n not in single)
    dtype = torch.promote_types(pattern.dtype, dense.dtype)
    bound = bound_to(letters, pattern)
    return sample(bound.with_values(bound.values.to(dtype)), [bound_dense(kept, factor.to(dtype))])


def _same_pattern(left: SparseTensor, right: SparseTensor) -> bool:
    """Whether both share the same position and coordinate tensors. Equal copies do not count."""
    if left.format != right.format:
        return False
    return all(a is b for a, b in zip(left.components[:-1], right.components[:-1], strict=True))
