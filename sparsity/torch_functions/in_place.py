"""Implements methods that write to a SparseTensor: the result of the method out of place becomes the tensor's contents.

    a.add_(b), a += b, a.clamp_(-1, 1), a[0] = 0      →      a.add(b), …, and a gets the pattern of the result

- If the pattern stays, the stored values are written to, also in a graph, and autograd records it.
- Another pattern means other arrays, which graphs and autograd would not notice. So it is an error there. In other code it
  works, and the tensor from which `detach` or `.data` made this one gets the arrays, too: `parameter.data.copy_(b)`.
- A dense result is stored again in the format of the tensor, with the warning of densify.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from inspect import isfunction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.runtime.torch_internals import tree_map_only
from gossamer.sparsity.operations.same_pattern import PatternError
from gossamer.sparsity.tensor.densify import densified
from gossamer.sparsity.tensor.extension import implements, unsupported
from gossamer.sparsity.tensor.layouts import in_layout_of
from gossamer.sparsity.tensor.shapes import to_dense
from gossamer.sparsity.tensor.slices import fill_diagonal
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor
from gossamer.sparsity.torch_functions.lists import is_of_lists, one_by_one
from gossamer.sparsity.torch_functions.optimizer_steps import at_entries_of, keeps_pattern, on_pattern, writes_entries


def without_pattern(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a method that is not registered and computes no result: queries of properties, copies, in-place methods."""
    if torch.jit.is_tracing() and args and isinstance(args[0], Tensor):  # torch.jit would record the attempt below
        plain = _out_of_place(func.__name__)
        if plain is not None:
            return _write(func.__name__, plain, args, kwargs)
    try:
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    except PatternError:
        if func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
            raise  # the nodes of a backward pass have already freed their saved tensors
        if writes_entries(func, args):
            return at_entries_of(func, args, kwargs)
        if is_of_lists(func):
            return one_by_one(func, args, kwargs)
        plain = _out_of_place(func.__name__)
        if plain is None and not func.__name__.endswith("_"):
            return densified(func, args, kwargs)  # a function under a name that `computes` does not know
        if plain is None or not args or not isinstance(args[0], Tensor):
            raise
    return _write(func.__name__, plain, args, kwargs)


def _write(name: str, plain: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Calls a function out of place, and writes its result to its first operand. Returns that operand."""
    input, *others = args
    kept = input.clone() if torch.is_grad_enabled() and input.requires_grad else input  # autograd may save what it reads
    result = plain(kept, *others, **kwargs)
    return overwrite(name, input, result) if isinstance(input, SparseTensor) else into(input, result)


_INPLACE: dict[Callable[..., Any], int] = {
    each: each.__code__.co_varnames.index("inplace")
    for each in vars(F).values()
    if isfunction(each) and "inplace" in each.__code__.co_varnames[: each.__code__.co_argcount]
}
"""Functions that write to their operand by inplace=True, and the place of that argument."""


def asked_in_place(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of torch.nn.functional is called with inplace=True, and shall write to a SparseTensor."""
    place = _INPLACE.get(func)
    return place is not None and bool(kwargs.get("inplace", args[place] if place < len(args) else False))


def written(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Calls a function that is asked to work in place."""
    named = {name: value for name, value in kwargs.items() if name not in ("input", "inplace")}
    operands = args[: _INPLACE[func]] if args else (kwargs["input"],)
    return _write(func.__name__, func, operands, named)


@implements(torch.Tensor.__setitem__)
def setitem(input: Tensor, index: Any, value: Any) -> None:
    """Writes elements by any index, through the dense tensor. Index and value may be sparse, too."""
    if not isinstance(input, SparseTensor):
        input[tree_map_only(SparseTensor, to_dense, index)] = to_dense(value) if isinstance(value, SparseTensor) else value
        return

    def assigned(dense: Tensor, index: Any, value: Any) -> Tensor:
        copy = dense.clone()
        copy[index] = value
        return copy

    assigned.__name__ = "setitem"
    overwrite("setitem", input, densified(assigned, (input, index, value), {}))


def into(out: Tensor, result: Tensor) -> Tensor:
    """Writes the elements of a result of the same shape to a dense tensor, and returns the tensor."""
    if out.shape != result.shape:
        raise RuntimeError(f"output with shape {list(out.shape)} doesn't match the broadcast shape {list(result.shape)}")
    if not torch.can_cast(result.dtype, out.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {out.dtype}")
    return out.copy_(result.to_dense() if isinstance(result, SparseTensor) else result)


def into_torch_sparse(out: Tensor, source: SparseTensor) -> Tensor:
    """Writes a SparseTensor to a torch.sparse tensor, so that checkpoints of a prepared model load into a plain one."""
    if out.shape != source.shape:
        raise RuntimeError(f"output with shape {list(out.shape)} doesn't match the broadcast shape {list(source.shape)}")
    if torch.is_grad_enabled() and (out.requires_grad or source.requires_grad):
        raise unsupported("copy_ into a torch.sparse tensor, while autograd records it", "use it under torch.no_grad")
    converted: Any = source.detach().to(device=out.device, dtype=out.dtype)
    stored = in_layout_of(out, converted)
    if out.layout is not torch.sparse_coo:  # copy_ to COO takes any number of entries
        out.resize_as_sparse_(stored)
    return out.copy_(stored)


def overwrite(name: str, input: SparseTensor, result: Tensor) -> SparseTensor:
    """Writes the contents of a result to a SparseTensor, and returns the tensor."""
    if result.shape != input.shape:
        raise unsupported(f"{name}, which would change the shape {list(input.shape)}", "use the same without the underscore")
    if not torch.can_cast(result.dtype, input.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {input.dtype}")
    result = result.to(input.dtype)
    if keeps_pattern(name.removesuffix("(out=)")):
        result = on_pattern(input, result)
    if isinstance(result, SparseTensor) and result.format == input.format:
        structures = zip(result.components[:-1], input.components[:-1], strict=True)
        if all(a is b for a, b in structures):
            if torch.jit.is_tracing():  # torch.jit records operations on the arrays
                input._stored.copy_(result._stored)
                return input
            with torch.DisableTorchFunctionSubclass():
                input.copy_(result)
            return input
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and (input.requires_grad or result.requires_grad)):
        where = "in a graph" if torch.compiler.is_compiling() else "while autograd records it"
        raise unsupported(f"{name}, which changes the pattern, {where}", "use it without the underscore or inplace=True")
    stored = _stored_as(input, result.detach())
    given = [input._origin, input._detached() if input._detached is not None else None]
    for each in [each for each in given if each is not None and _over_the_same_arrays(each, input)]:
        _adopt(each, stored)
    _adopt(input, stored)
    return input


@implements(torch.Tensor.detach, torch.detach)
def detach(input: SparseTensor) -> SparseTensor:
    """Returns the tensor without its gradient, over the same arrays."""
    return _alias(torch.Tensor.detach, input)


@implements(torch.Tensor.data.__get__)  # type: ignore[attr-defined]
def data(input: SparseTensor) -> SparseTensor:
    """Implements `parameter.data`: a tensor over the same arrays that autograd does not track."""
    return _alias(torch.Tensor.data.__get__, input)  # type: ignore[attr-defined]


@implements(torch.Tensor.requires_grad_)
def requires_grad_(input: SparseTensor, requires_grad: bool = True) -> SparseTensor:
    """Implements requires_grad_. The tensor becomes independent of the one it was detached from, as nn.Parameter needs."""
    with torch.DisableTorchFunctionSubclass():
        input.requires_grad_(requires_grad)
    if not torch.compiler.is_compiling():
        input._origin = input._detached = None
    return input


def _alias(func: Callable[[Tensor], Tensor], input: SparseTensor) -> SparseTensor:
    if torch.is_inference_mode_enabled() and not input.is_inference():
        with torch.inference_mode(False):  # tensors of inference mode share no count of writes
            return _alias(func, input)
    with torch.DisableTorchFunctionSubclass():
        alias: Any = func(input)
    if isinstance(alias, SparseTensor) and not torch.compiler.is_compiling() and input.is_leaf:
        if input._origin is None:
            alias._origin = input  # no weak reference, because `module.to` cannot swap parameters that have one
        else:  # only two references, so that repeated detach() builds no chain
            alias._origin, alias._detached = input._origin, weakref.ref(input)
    return alias


def _over_the_same_arrays(one: SparseTensor, other: SparseTensor) -> bool:
    """Whether both still have the same arrays."""
    if one.format != other.format:
        return False
    return all(a.data_ptr() == b.data_ptr() for a, b in zip(one.components, other.components, strict=True))


@implements(torch.Tensor.data.__set__)  # type: ignore[attr-defined]
def set_data(input: SparseTensor, data: Tensor) -> None:
    """Implements `parameter.data = ...`: takes a SparseTensor's arrays, or stores a dense tensor, in the parameter's format."""
    if data.shape != input.shape or data.dtype != input.dtype or data.device != input.device:
        given = f"{data.dtype} {list(data.shape)} on {data.device}"
        raise unsupported(
            f".data = {given} for {input.dtype} {list(input.shape)} on {input.device}", "make a new parameter of it"
        )
    if torch.compiler.is_compiling():
        raise unsupported(".data = ... in a graph", "use copy_ under torch.no_grad")
    with torch.no_grad():
        _adopt(input, _stored_as(input, data.detach()))


def _stored_as(pattern: SparseTensor, tensor: Tensor) -> SparseTensor:
    """Returns a tensor in the format of another, with its pattern if that has all nonzeros."""
    if isinstance(tensor, SparseTensor):
        return tensor.to_format(pattern.format)
    sampled = on_pattern(pattern, tensor)
    if sampled.components[-1].count_nonzero() == tensor.count_nonzero():
        return sampled
    return SparseTensor.from_dense(tensor, pattern.format)


def _adopt(input: SparseTensor, stored: SparseTensor) -> None:
    """Gives a tensor the arrays of another."""
    SparseTensor.__init__(input, stored.format, input.shape, stored.components)
    input._repeated = None


def _out_of_place(name: str) -> Callable[..., Tensor] | None:
    """Returns `add` for `add_` and for `__iadd__`, None for methods that write nothing, or have no such counterpart."""
    if name in _OUT_OF_PLACE:
        return _OUT_OF_PLACE[name]
    if name.startswith("__i"):
        return getattr(torch.Tensor, f"__{name[3:]}", None)
    return getattr(torch.Tensor, name[:-1], None) if name.endswith("_") and not name.endswith("__") else None


def _copy(input: SparseTensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.expand(input.shape).to(input.dtype).clone()  # new arrays, which may be written to


_OUT_OF_PLACE: dict[str, Callable[..., Tensor] | None] = {
    "copy_": _copy,
    "fill_diagonal_": fill_diagonal,
    "bernoulli_": None,
    "resize_": None,
    "resize_as_": None,
    "addcdiv_": None,
}
"""Exceptions from the rule by names. None: no counterpart; addcdiv_ has None because optimizers use it on stored values."""
