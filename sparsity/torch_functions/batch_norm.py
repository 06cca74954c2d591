"""Batch norm in graphs over an unbacked number of values, which may be zero.

    y = F.batch_norm(x[mask], …)    →    mean = x[mask].sum(0) / count, …

torch's own batch norm branches on the number of values being zero, and in training on its being one. Dynamo cannot trace a
branch on an unbacked number, so it traces `any_batch_norm` instead. All other calls of torch.nn.functional.batch_norm stay as
they are.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.runtime.operations import Operation


def any_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Computes torch.nn.functional.batch_norm [N, C, ...] by operations that work for any number of values.

    Without values the running statistics stay. ValueError in training if each channel has one value.
    """
    x = input if input.dtype == torch.float64 else input.float()
    each = (1, -1, *(1,) * (x.dim() - 2))
    if training:
        dims = [0, *range(2, x.dim())]
        count = values_per_channel(x.detach())
        some = count.clamp(min=1)
        mean = x.sum(dims) / some
        centred = x - mean.view(each)
        var = centred.square().sum(dims) / some
        unbiased = var * some / (count - 1).clamp(min=1)
        for running, found in ((running_mean, mean), (running_var, unbiased)):
            if running is not None:
                moved = momentum * found.detach() + (1 - momentum) * running
                running.copy_(torch.where(count > 0, moved, running))
    else:
        assert running_mean is not None and running_var is not None
        centred, var = x - running_mean.view(each), running_var
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    y = centred * scale.view(each)
    return (y if bias is None else y + bias.view(each)).to(input.dtype)


def _values_per_channel(x: Tensor) -> Tensor:
    count = prod((x.shape[0], *x.shape[2:]))
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")  # torch's message
    return x.new_full((), count)


values_per_channel = Operation(
    "values_per_channel(Tensor x) -> Tensor", _values_per_channel, _values_per_channel, lambda x: x.new_empty(())
).register()


def trace_any_number() -> None:
    """Makes Dynamo trace batch norms of any number of values. It imports Dynamo."""
    from gossamer.runtime.torch_internals import (
        VariableTracker,
        free_unbacked_symbols,
        functions_apart,
        off,
        specialize_symnode,
    )
    from gossamer.runtime.torch_names import ANY_NUMBER

    if off(ANY_NUMBER):
        return
    functions = functions_apart()
    otherwise = functions.get(F.batch_norm)

    def traced(function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if not free_unbacked_symbols(_sizes(args[0] if args else kwargs.get("input"))):
            return None if otherwise is None else otherwise(function, tx, *args, **kwargs)
        positional = [specialize_symnode(each.realize()) for each in args]
        named = {name: specialize_symnode(each.realize()) for name, each in kwargs.items()}
        return tx.inline_user_function_return(VariableTracker.build(tx, any_batch_norm), positional, named)

    functions[F.batch_norm] = traced


def _sizes(variable: Any) -> Sequence[Any]:
    """Returns the sizes of a tensor that Dynamo knows."""
    from gossamer.runtime.torch_internals import TensorVariable

    value = variable.as_proxy().node.meta.get("example_value") if isinstance(variable, TensorVariable) else None
    return value.shape if isinstance(value, Tensor) else ()
