"""Functions of lists of tensors, one after the other: where patterns differ, each is what the method of a tensor makes of it.

    torch._foreach_lerp_(averages, weights, 0.1)      →      average.lerp_(weight, 0.1) for each, whose pattern may grow

So averages of weights whose nonzeros move hold whatever was there once (torch.optim.swa_utils).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

_PREFIX = "_foreach_"
_SCALED = ("addcmul", "addcmul_", "addcdiv", "addcdiv_")  # whose factor comes fourth, and has a name in methods


def is_of_lists(func: Callable[..., Any]) -> bool:
    """Whether it is a function of lists."""
    return func.__name__.startswith(_PREFIX)


def one_by_one(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What it gives."""
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
    """Whether there is one for each; factors may be the elements of a tensor."""
    return isinstance(given, list | tuple) or (isinstance(given, Tensor) and given.dim() == 1 and len(given) == len(tensors))
