"""Runs functions of lists of tensors one tensor at a time by the tensor's method, if patterns differ.

    torch._foreach_lerp_(averages, weights, 0.1)      →      average.lerp_(weight, 0.1) for each, whose pattern may grow

So averages of weights whose nonzeros move contain all past nonzeros (torch.optim.swa_utils).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

_PREFIX = "_foreach_"
_SCALED = ("addcmul", "addcmul_", "addcdiv", "addcdiv_")  # the factor is the fourth argument, and a keyword of methods


def is_of_lists(func: Callable[..., Any]) -> bool:
    """Whether a function takes lists of tensors."""
    return func.__name__.startswith(_PREFIX)


def one_by_one(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a function of lists by the method of each tensor. Returns the results."""
    name = func.__name__.removeprefix(_PREFIX)
    method = getattr(Tensor, name)
    results = []
    for n in range(len(args[0])):
        each = [arg[n] if _is_listed(arg, args[0]) else arg for arg in args]
        named = {key: value[n] if _is_listed(value, args[0]) else value for key, value in kwargs.items()}
        if name in _SCALED and len(each) > 3:
            named["value"] = each.pop()
        results.append(method(*each, **named))
    return None if name.endswith("_") else tuple(results)


def _is_listed(given: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether an argument has one value for each tensor. Factors may be the elements of a tensor."""
    return isinstance(given, list | tuple) or (isinstance(given, Tensor) and given.dim() == 1 and len(given) == len(tensors))
