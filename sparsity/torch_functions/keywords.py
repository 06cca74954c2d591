"""Translates arguments of torch functions to ours: operands by keyword, `axis` for `dim`, `out`.

Our functions for SparseTensors may name their operands freely, because they get them by position.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.errors import GossamerError
from gossamer.runtime.operations import constant
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor
from gossamer.sparsity.torch_functions import in_place

_OPERANDS = ("self", "input", "mat", "mat1", "batch1", "tensor", "other", "vec", "vec1", "vec2", "mat2", "batch2", "exponent")
"""torch's names for tensors, in the order of its signatures."""
_SAME = {"axis": "dim", "axis0": "dim0", "axis1": "dim1", "keepdims": "keepdim", "x": "input"}


def spelled(ours: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments for our function."""
    named = {_SAME.get(name, name) if name not in _parameters(ours) else name: value for name, value in kwargs.items()}
    found = list(args)
    for name in _OPERANDS:
        if name in named and (name not in _parameters(ours) or name in ("self", "input")):
            found.insert(0 if name in ("self", "input") else len(found), named.pop(name))
    return found, named


def specialised(ours: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments in a graph, with constant numbers of dimensions, specialised when the graph is made."""
    of_dims = [name.endswith(("dim", "dims", "dim0", "dim1")) for name in _ordered(ours)]
    args = [_fixed(each) if dim else each for each, dim in zip_longest(args, of_dims[: len(args)])]
    return args, {name: _fixed(value) if name in ("dim", "dims") else value for name, value in kwargs.items()}


def _fixed(numbers: Any) -> Any:
    if isinstance(numbers, list | tuple):
        return type(numbers)([_fixed(each) for each in numbers])
    return int(numbers) if isinstance(numbers, torch.SymInt) else numbers


def into(name: str, out: Any, result: Any) -> Tensor:
    """Writes the result of a function into the tensor that was given as `out`, as torch does."""
    if not isinstance(out, Tensor) or not isinstance(result, Tensor):
        raise GossamerError("out= takes one tensor where an operand is a SparseTensor: use the result itself")
    if torch.is_grad_enabled() and (out.requires_grad or result.requires_grad):
        raise RuntimeError("functions with out=... arguments don't support automatic differentiation")
    if isinstance(out, SparseTensor):
        return in_place.overwrite(f"{name}(out=)", out, result)
    if out.shape != result.shape:
        out.resize_(result.shape)
    return in_place.into(out, result)


@constant
def _parameters(ours: Callable[..., Any]) -> frozenset[str]:
    return _names(ours)


@constant
def _ordered(ours: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(ours).parameters)


@cache
def _names(ours: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(ours).parameters)
