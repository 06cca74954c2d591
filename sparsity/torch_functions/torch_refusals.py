"""Raises torch's own errors for SparseTensors: calls that torch refuses for dense tensors are refused with the same message.

    torch.permute(a, (0, 0))      →      torch.permute(torch.empty(a.shape, device="meta"), (0, 0))      →      RuntimeError

A tensor on the device "meta" has a shape and a dtype, but no elements, so the check costs no more than a call. Calls that have
passed are remembered by the shapes and dtypes of their arguments. Errors that depend on elements are not found.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError
from gossamer.runtime.torch_internals import tree_map_only
from gossamer.sparsity.operations.dispatch import watched
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor

_KEPT = 4096
_OF_META_TENSORS = (
    "Storage size calculation overflowed",  # SparseTensors of that shape may be small
    "is not on the expected device meta",  # a 0-d tensor, which stays on its device
)

_RANKS = {"mm": (2, 2), "mv": (2, 1), "bmm": (3, 3), "dot": (1, 1), "smm": (2, 2), "hspmm": (2, 2)}

_asked: set[Callable[..., Any]] = set()
_passed: set[Any] = set()
_OF_SPARSE_LAYOUTS = [
    "coalesce", "is_coalesced", "values", "resolve_conj", "__deepcopy__", "__iter__", "sparse_mask",
    "sparse_dim", "dense_dim", "to_sparse", "to_sparse_coo", "to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc",
    "smm", "hspmm", "sspaddmm", "saddmm", "_sparse_sum", "indices", "crow_indices", "col_indices", "ccol_indices",
    "row_indices", "_indices", "_values", "_nnz",
]  # fmt: skip


def ask_about(functions: Sequence[Callable[..., Any]]) -> None:
    """Enables the check for these functions, except those that only sparse tensors have."""
    for function in functions:
        module = getattr(function, "__module__", None) or ""
        if not module.startswith("torch.sparse") and function.__name__ not in _OF_SPARSE_LAYOUTS:
            _asked.add(function)


def check_ranks(func: Callable[..., Any], args: Sequence[Any]) -> None:
    """ArgumentError unless the operands of a product have its numbers of dimensions. Graphs cannot use the check on "meta"."""
    ranks = _RANKS.get(func.__name__)
    if ranks is not None and all(isinstance(each, Tensor) for each in args[:2]):
        found = tuple(each.dim() for each in args[:2])
        if found != ranks:
            raise ArgumentError(f"{func.__name__} takes tensors of {ranks[0]} and {ranks[1]} dimensions, got {found}")


def refusal(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception | None:
    """Returns the exception that torch raises for dense tensors, None if it raises none."""
    if func not in _asked:
        return None
    try:
        with torch.DisableTorchFunctionSubclass():
            key = func, _described(args), _described(kwargs) if kwargs else ()
        if key in _passed:
            return None
    except TypeError:  # an argument without a hash
        key = None
    if watched():
        return None
    devices = {each.device for each in _tensors((args, kwargs))}
    if len(devices) > 1 or torch.is_autocast_enabled(next(iter(devices)).type):
        return None
    try:
        with torch.no_grad():
            func(*_on_meta(func, args), **_on_meta(func, kwargs))
    except NotImplementedError:
        pass  # not available for meta tensors, or it depends on elements
    except Exception as refused:
        if not any(words in str(refused) for words in _OF_META_TENSORS):
            return refused
    if key is not None:
        if len(_passed) >= _KEPT:
            _passed.clear()
        _passed.add(key)
    return None


def _on_meta(func: Callable[..., Any], tree: Any) -> Any:
    if func is torch.Tensor.__getitem__:  # the elements of index tensors decide the size of its result
        return (_empty(tree[0]), tree_map_only(Tensor, _mask, tree[1])) if tree else {}
    return tree_map_only(Tensor, _empty, list(tree) if isinstance(tree, Sequence) else dict(tree))


def _mask(index: Tensor) -> Tensor:
    """Returns an index for meta tensors, which take only bools as masks."""
    return index.bool() if index.dtype == torch.uint8 else index


def _empty(tensor: Tensor) -> Tensor:
    if isinstance(tensor, SparseTensor):
        with torch.DisableTorchFunctionSubclass():
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if not tensor.dim() and tensor.is_cpu and tensor.layout is torch.strided:
        return tensor.detach()  # a number
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, tree)
    return found


def _described(argument: Any) -> Any:
    """Returns a hashable description of an argument, by which calls are remembered. TypeError for other arguments."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.dtype
    if isinstance(argument, list | tuple):
        return type(argument), *[_described(each) for each in argument]
    if isinstance(argument, Mapping):
        return tuple((name, _described(each)) for name, each in argument.items())
    if isinstance(argument, slice):
        raise TypeError
    hash(argument)
    return type(argument), argument
