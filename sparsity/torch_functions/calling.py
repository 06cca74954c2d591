"""Calls a function of torch with a SparseTensor among its arguments: finds our function, torch's errors, and writes `out`.

`SparseTensor.__torch_function__` calls it. Our functions are registered by `implements` (tensor/extension.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.runtime.operations import untraced
from gossamer.runtime.torch_internals import tree_flatten, tree_map_only
from gossamer.sparsity.operations.dispatch import PLAIN
from gossamer.sparsity.tensor.densify import computes, densified
from gossamer.sparsity.tensor.extension import unsupported
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor
from gossamer.sparsity.torch_functions.in_place import asked_in_place, into_torch_sparse, without_pattern, written
from gossamer.sparsity.torch_functions.keywords import into, specialised, spelled
from gossamer.sparsity.torch_functions.optimizer_steps import acts_on_entries, at_entries_of
from gossamer.sparsity.torch_functions.torch_refusals import check_ranks, refusal


@untraced
def call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls the function that is registered for SparseTensors, or else torch's on the dense tensors or the stored values."""
    if not torch.compiler.is_compiling() and any(map(_foreign, args)):
        if _foreign(args[0]) and func is torch.Tensor.copy_ and len(args) > 1 and isinstance(args[1], SparseTensor):
            return into_torch_sparse(args[0], args[1])
        if _foreign(args[0]) and func.__name__.endswith("_") and not func.__name__.endswith("__"):
            raise unsupported(f"{func.__name__} into a torch.sparse tensor", "use the same without the underscore")
        args = tree_map_only(Tensor, _converted, list(args))
    if kwargs.get("out") is not None:
        rest = {name: value for name, value in kwargs.items() if name != "out"}
        result = call(func, args, rest) if _has_sparse((args, rest)) else func(*args, **rest)
        return into(func.__name__, kwargs["out"], result)
    if acts_on_entries(func, args):
        return at_entries_of(func, args, kwargs)
    if asked_in_place(func, args, kwargs):
        return written(func, args, kwargs)
    ours = SparseTensor.functions.get(func)
    if ours is None:
        return densified(func, args, kwargs) if computes(func) else without_pattern(func, args, kwargs)
    refused = None if torch.compiler.is_compiling() else refusal(func, args, kwargs)
    if kwargs:
        args, kwargs = spelled(ours, args, {name: value for name, value in kwargs.items() if name != "out"})
    if torch.compiler.is_compiling():
        check_ranks(func, args)
        args, kwargs = specialised(ours, list(args), dict(kwargs))
    result = ours(*args, **kwargs)
    if refused is not None:  # only now, because our own errors know formats and are better
        raise refused
    return result


def _has_sparse(given: Any) -> bool:
    return any(isinstance(each, SparseTensor) for each in tree_flatten(given)[0])


def _foreign(argument: Any) -> bool:
    """Whether an argument is a tensor in a layout of torch.sparse, or a list with one."""
    if isinstance(argument, list | tuple):
        return any(map(_foreign, argument))
    return type(argument) in PLAIN and argument.layout is not torch.strided


def _converted(tensor: Tensor) -> Tensor:
    return SparseTensor.from_torch(tensor) if _foreign(tensor) else tensor


SparseTensor.call = call
