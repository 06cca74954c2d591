"""Applies elementwise functions to stored values within the step of an optimizer, because other elements are not trained.

    denom = variance.sqrt() + eps; p.addcdiv_(grad, denom)      →      the same on `values()`, as all have the same pattern

Outside of a step `a + eps` is dense, because zeros become eps. Dense operands give their elements at the stored entries. It
serves any subclass of torch.optim.Optimizer, in eager and in compiled steps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.runtime.modules import sizes
from gossamer.sparsity.operations.optimizer_calls import in_step
from gossamer.sparsity.tensor.arithmetic import at_entries
from gossamer.sparsity.tensor.shapes import to_dense
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, like, values_of

# Elementwise functions whose result may be nonzero where all operands are zero.
_ELEMENTWISE = (
    "add", "sub", "subtract", "rsub", "div", "divide", "true_divide", "floor_divide", "remainder", "fmod",
    "addcmul", "addcdiv", "lerp", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum", "fmax", "fmin", "pow",
    "float_power", "exp", "exp2", "log", "log2", "log10", "logaddexp", "xlogy", "rsqrt", "reciprocal", "sigmoid", "cos", "cosh",
    "acos", "atan2", "hypot", "copysign", "heaviside", "eq", "ne", "gt", "ge", "lt", "le", "where", "greater",
    "less", "not_equal", "masked_fill", "isnan", "isinf", "isfinite", "isclose", "logical_and", "logical_or", "logical_xor",
    "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "full_like", "ones_like", "rand_like",
    "randn_like", "softplus",
)  # fmt: skip
_OPERATORS = (
    "add", "radd", "sub", "rsub", "truediv", "rtruediv", "rdiv", "floordiv", "rfloordiv", "mod", "rmod", "pow",
    "rpow", "eq", "ne", "gt", "ge", "lt", "le", "and", "or", "xor", "invert",
)  # fmt: skip
_SUMS = ("add", "sub", "subtract", "rsub", "lerp", "__add__", "__radd__", "__sub__", "__rsub__")
_PRODUCTS = ("mm", "bmm", "matmul", "addmm", "baddbmm", "addbmm", "addr", "sspaddmm")
_INDEXED = (torch.Tensor.__setitem__, torch.Tensor.__getitem__)
_BY_ENTRY = frozenset(
    getattr(home, name) for names in (_ELEMENTWISE, [f"__{each}__" for each in _OPERATORS]) for name in names
    for home in (torch, torch.Tensor) if hasattr(home, name)
)  # fmt: skip


def acts_on_entries(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether this is a call in an optimizer's step that shall act on stored values only."""
    sparse = [each for each in args if isinstance(each, SparseTensor)]
    masked = func in _INDEXED and isinstance(args[1], SparseTensor)
    if not sparse or not (masked or func in _BY_ENTRY) or (func.__name__ in _SUMS and _has_matrix(args, sparse[0])):
        return False
    return in_step()


def writes_entries(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether this is a method that writes to SparseTensors, or a function of lists, in an optimizer's step."""
    name = func.__name__
    if not (name.startswith("_foreach_") or name.endswith("_")) or name.endswith("__"):
        return False
    first = args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]
    if name.endswith("_") and not isinstance(first, SparseTensor):
        return False
    return keeps_pattern(name)


def keeps_pattern(name: str) -> bool:
    """Whether a function writes only stored values of a SparseTensor: in an optimizer's step, except products of matrices."""
    return name.rstrip("_") not in _PRODUCTS and in_step()


def at_entries_of(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a function on stored values, also in place. Returns a SparseTensor if the result has a value for each entry."""
    if func.__name__.startswith("_foreach_"):
        return _of_lists(func, args, kwargs)
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    first = next(each for each in tensors if isinstance(each, SparseTensor))
    given = [_entries(first, each) for each in args]
    result = func(*given, **{name: _entries(first, each) for name, each in kwargs.items()})
    if func.__name__.endswith("_") and not func.__name__.endswith("__"):
        return args[0]
    same = isinstance(result, Tensor) and result.shape == values_of(first).shape
    return like(first, result) if same and func is not torch.Tensor.__getitem__ else result


def on_pattern(pattern: SparseTensor, tensor: Tensor) -> SparseTensor:
    """Returns the elements of a tensor at the entries of a pattern, as a SparseTensor."""
    return like(pattern, _entries(pattern, tensor))


def _has_matrix(args: Sequence[Any], sparse: SparseTensor) -> bool:
    """Whether an operand is dense and of the same size. Sums with such matrices are dense (iterations of Muon, Shampoo)."""
    dense = (each for each in args if isinstance(each, Tensor) and not isinstance(each, SparseTensor))
    return any(each.dim() == sparse.dim() and all(map(_same_size, each.shape, sparse.shape)) for each in dense)


def _of_lists(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a function of lists on stored values, one tensor at a time, because some tensors may be dense."""
    results = []
    for n in range(len(args[0])):
        each = [arg[n] if isinstance(arg, list | tuple) else arg for arg in args]
        first = next((tensor for tensor in each if isinstance(tensor, SparseTensor)), None)
        given = each if first is None else [_entries(first, tensor) for tensor in each]
        lists = [[mine] if isinstance(arg, list | tuple) else mine for mine, arg in zip(given, args, strict=True)]
        result = func(*lists, **kwargs)
        if result is not None:
            same = first is not None and result[0].shape == values_of(first).shape
            results.append(like(first, result[0]) if first is not None and same else result[0])
    return None if func.__name__.endswith("_") else tuple(results)


def _entries(pattern: SparseTensor, operand: Any) -> Any:
    """Returns the elements of an operand at the entries of a pattern, flat; numbers stay."""
    if not isinstance(operand, Tensor) or operand.dim() == 0:
        return operand
    if isinstance(operand, SparseTensor):
        structures = zip(operand.components[:-1], pattern.components[:-1], strict=False)
        if operand.format == pattern.format and all(a is b or _equal(a, b) for a, b in structures):
            return values_of(operand)
        operand = to_dense(operand)
    return at_entries(pattern, operand).to(operand.dtype)


def _same_size(one: int, other: int) -> bool:
    return sizes.known_true(one == other)


def _equal(one: Tensor, other: Tensor) -> bool:
    if torch.compiler.is_compiling():  # by sizes only, because the pattern is the same in every step
        return one.shape == other.shape
    return torch.equal(one, other)
