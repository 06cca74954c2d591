"""A call of a function of torch with a SparseTensor among its arguments: what refuses, what computes, where the result goes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gossamer.runtime.operations import untraced
from gossamer.sparsity.tensor.densify import without_sparse_way
from gossamer.sparsity.tensor.keywords import into, spelled
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor
from gossamer.sparsity.tensor.torch_refusals import refusal


@untraced
def call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls it as torch would, with what is registered for SparseTensors if something is."""
    if kwargs.get("out") is not None:
        rest = {name: value for name, value in kwargs.items() if name != "out"}
        return into(kwargs["out"], call(func, args, rest))
    ours = SparseTensor.functions.get(func)
    if ours is None:
        return without_sparse_way(func, args, kwargs)
    refused = None if torch.compiler.is_compiling() else refusal(func, args, kwargs)
    if kwargs:
        args, kwargs = spelled(ours, args, {name: value for name, value in kwargs.items() if name != "out"})
    result = ours(*args, **kwargs)
    if refused is not None:  # only now, for what we say ourselves knows of formats
        raise refused
    return result


SparseTensor.call = call
