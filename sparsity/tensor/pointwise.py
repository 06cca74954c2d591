"""Runs aten's operators below autograd, such as copies and the arithmetic of optimizers, on the stored values.

Operands are SparseTensors of one pattern, and numbers. All others are refused with a message that says what to do.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gossamer.dialects.errors import GossamerError
from gossamer.runtime.modules.when_loaded import when_loaded
from gossamer.runtime.torch_internals import SetExcludeDispatchKeyGuard, return_and_correct_aliasing
from gossamer.sparsity.operations.dispatch import transformed
from gossamer.sparsity.operations.same_pattern import PatternError, share_pattern, traced, values_on
from gossamer.sparsity.operations.sizes_in_optimizers import fix_sizes
from gossamer.sparsity.operations.whole_arithmetic import leave_whole
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor

aten = torch.ops.aten

# Operators on subclasses run below the dispatch key that counts writes to tensors and lets views share the count. Writes to the
# stored values must be counted, too: products keep copies of them (see sliced_rows.py), and autograd saves them.
_COUNTING = torch.DispatchKey.ADInplaceOrView

# Operators that can be applied to the stored values alone. With a number, 0 must stay 0, except in place: in-place arithmetic
# is documented to work on stored values.
ON_VALUES = (
    "abs", "abs_", "add", "add_", "addcdiv_", "addcmul_", "alias", "cauchy_", "clone", "copy_", "detach", "div", "div_",
    "empty_like", "erfinv_", "exponential_", "fill_", "geometric_", "lerp_", "log_normal_", "maximum", "minimum", "mul", "mul_",
    "neg", "neg_", "normal_", "random_", "reciprocal_", "relu", "sgn", "sign", "sqrt", "sqrt_", "sub", "sub_", "tanh",
    "threshold_backward", "uniform_", "zero_", "zeros_like",
)  # fmt: skip


_ON_LISTS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")


def on_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Applies an operator to the stored values of tensors of one pattern."""
    first = _pattern(func, args, kwargs)
    if kwargs.get("layout") not in (None, torch.strided):
        raise PatternError(f"{func._schema.name} of a SparseTensor in {kwargs['layout']}: use to_sparse(layout=) on the result")
    tracing = traced(first.components)
    of_values = partial(_of_values, first)
    with nullcontext() if tracing else SetExcludeDispatchKeyGuard(_COUNTING, False):
        values = func(*map(of_values, args), **{name: of_values(each) for name, each in kwargs.items()})
    written, shared = _aliases(func)
    if written and not tracing:
        return args[0]
    result = _dealt_like(first, SparseTensor(first.format, first.shape, (*first.components[:-1], values)))
    return return_and_correct_aliasing(func, args, kwargs, result) if tracing or shared else result


@cache
def _aliases(func: Any) -> tuple[bool, bool]:
    """Returns whether an operator writes to its first operand, and whether its result shares memory with an operand."""
    first = func._schema.arguments[0].alias_info
    return first is not None and first.is_write, any(each.alias_info is not None for each in func._schema.returns)


def on_lists(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Applies an operator on lists of tensors (torch._foreach_…, fused optimizers) to the stored values."""
    lists = [each for each in args if isinstance(each, list | tuple)]
    patterns = [_pattern_of_several(func, operands) for operands in zip_longest(*lists)]
    dealt = {at._dealt.mesh: at._dealt for at in patterns if at is not None and at._dealt is not None and at._dealt.gradient}
    if dealt and func._schema.name == "aten::_foreach_norm":
        raise PatternError("norms of parts that are dealt to processes: they are computed one by one")

    def of_values(given: Any) -> Any:
        if not isinstance(given, list | tuple):
            return given
        return [each if at is None else _of_values(at, each) for at, each in zip(patterns, given, strict=False)]

    results = func(*map(of_values, args), **kwargs)
    if func._schema.name == "aten::_amp_foreach_non_finite_check_and_unscale_":
        for each in dealt.values():  # all processes skip a step, or none
            each.largest(args[1])
    for argument, given in zip(func._schema.arguments, args, strict=False):
        if argument.is_write and isinstance(given, list | tuple):  # fused optimizers do not count their writes
            written = (each for each in given if isinstance(each, SparseTensor) and not traced(each.components))
            torch.autograd.graph.increment_version(each._stored for each in written)
    if not isinstance(results, list | tuple):
        return results
    return [_like(pattern, made) for pattern, made in zip(patterns, results, strict=True)]


def convert(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Implements aten._to_copy: converts the dtype of the values, and the device of all arrays."""
    tensor: SparseTensor = args[0]
    *structure, _ = tensor.components
    values = _own_values(tensor)
    if kwargs.get("device") is not None:
        structure = [component.to(kwargs["device"]) for component in structure]
    kwargs = {name: value for name, value in kwargs.items() if name not in ("layout", "memory_format")}
    return _dealt_like(tensor, SparseTensor(tensor.format, tensor.shape, (*structure, func(values, **kwargs))))


def has_metadata(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Implements aten._assert_tensor_metadata of exported programs, for the values. Guards of the graph check the shape."""
    asked = {**dict(zip(("size", "stride", "dtype"), args[1:], strict=False)), **kwargs}
    func(_own_values(args[0]), **{**asked, "size": None, "stride": None})


def conjugate(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Implements aten._conj by conjugating the values, because below autograd nothing reads the mark that it would set."""
    return on_values(aten._conj_physical.default, args, kwargs)


def any_is_true(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Implements aten._is_any_true. Autograd calls it after aten.isnan within torch.autograd.detect_anomaly."""
    found: Tensor = func(_own_values(args[0]))
    return found


def empty(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Implements aten.new_empty_strided, by which autograd copies a gradient with a gradient: other values of the pattern."""
    tensor, size, *_ = args
    if tuple(size) != tuple(tensor.shape):
        return refuse(func, args, kwargs)
    return on_values(aten.empty_like.default, (tensor,), kwargs)


def refuse(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Handles operators that are in no table: applies those on lists, and refuses all others."""
    if func.namespace == "aten" and func._schema.name.startswith(_ON_LISTS):
        return on_lists(func, args, kwargs)
    if _is_being_wrapped():
        raise PatternError(
            "DistributedDataParallel keeps parameters and gradients in flat buffers, and a SparseTensor has none: wrap a "
            "model with stored weights by gossamer.distributed.data_parallel(model), which averages their gradients by what is "
            "stored"
        )
    name = func._schema.name.removeprefix("aten::")
    raise PatternError(
        f"SparseTensor has no {name}: use to_dense(), gossamer.einsum, or values() and from_parts() for work on the "
        f"stored values. {_BY_VALUES}"
    )


def _is_being_wrapped() -> bool:
    """Whether the constructor of DistributedDataParallel is the caller, which reads all parameters of a model."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not DistributedDataParallel.__init__.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _pattern(func: Any, args: Any, kwargs: Any) -> SparseTensor:
    """Returns the first SparseTensor. PatternError unless all other operands are numbers or have its pattern."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    first = next(tensor for tensor in tensors if isinstance(tensor, SparseTensor))
    for tensor in tensors:
        if isinstance(tensor, SparseTensor):
            if tensor is not first and not _shares_pattern(first, tensor):
                raise PatternError(
                    f"{func._schema.name} of SparseTensors of different patterns ({first.format.name} with {first.nnz} values, "
                    f"{tensor.format.name} with {tensor.nnz}): use torch.add or torch.mul, which give a union or intersection"
                )
        elif tensor.dim():
            raise PatternError(f"{func._schema.name} of a SparseTensor and a dense {list(tensor.shape)}: use to_dense()")
    return first


def _pattern_of_several(func: Any, operands: Sequence[Any]) -> SparseTensor | None:
    return _pattern(func, operands, {}) if any(isinstance(operand, SparseTensor) for operand in operands) else None


def _shares_pattern(left: SparseTensor, right: SparseTensor) -> bool:
    if left.format != right.format or left.shape != right.shape:
        return False
    if traced(left.components):
        torch._check(left._stored.shape == right._stored.shape)
    return share_pattern(left.components[:-1], right.components[:-1])


def _of_values(pattern: SparseTensor, operand: Any) -> Any:
    """Returns the stored values of an operand that shares a pattern."""
    if not isinstance(operand, SparseTensor):
        return operand.full_tensor() if _is_shared_number(operand) else operand
    values = _own_values(operand)
    return values if operand is pattern else values_on(pattern.components[:-1], operand.components[:-1], values)


def _is_shared_number(operand: Any) -> bool:
    """Whether an operand is a number as a DTensor, such as the norm of gradients if FSDP2 shards some of them."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(operand, distributed.DTensor) and operand.dim() == 0


def _own_values(tensor: SparseTensor) -> Tensor:
    if transformed(tensor._stored):
        raise GossamerError(f"this copies or overwrites a SparseTensor without the derivatives of its values. {_BY_VALUES}")
    return tensor._stored


_BY_VALUES = (
    "torch.func and forward differentiation see it by its values: torch.func.grad(lambda v: loss(a.with_values(v)))(a.values())"
)


def _like(pattern: SparseTensor | None, made: Any) -> Any:
    if pattern is None or made.shape != pattern._stored.shape:  # such as a norm, which is a number
        return made
    return _dealt_like(pattern, SparseTensor(pattern.format, pattern.shape, (*pattern.components[:-1], made)))


def _dealt_like(tensor: SparseTensor, made: SparseTensor) -> SparseTensor:
    if tensor._dealt is not None:
        made._dealt = tensor._dealt
    return made


for _name in ON_VALUES:
    _packet = getattr(aten, _name)
    SparseTensor.operators.update({getattr(_packet, overload): on_values for overload in _packet.overloads()})
SparseTensor.operators[aten._to_copy.default] = convert
SparseTensor.operators[aten._assert_tensor_metadata.default] = has_metadata
SparseTensor.operators[aten._conj.default] = conjugate
SparseTensor.operators[aten.new_empty_strided.default] = empty
SparseTensor.operators[aten.isnan.default] = on_values
SparseTensor.operators[aten._is_any_true.default] = any_is_true
SparseTensor.operators[None] = refuse
when_loaded("torch._dynamo", partial(leave_whole, SparseTensor))
when_loaded("torch._dynamo", partial(fix_sizes, SparseTensor))
