"""Prevents Dynamo from decomposing in-place arithmetic of optimizers on SparseTensors. Dynamo would write:

    p.addcdiv_(m, v, value=-lr)      →      fma(m / v, -lr, p), written to p      (torch 2.13)
    torch._foreach_lerp_(m, g, w)    →      m + full_like(m, w) * (g - m)

For dense tensors this is the same. For stored values it is not: m / v alone is 0 / 0 where nothing is stored, and `full_like`
gives a dense tensor.
"""

from functools import wraps
from typing import Any

from torch import Tensor

_TAKEN_APART = "method_addcdiv_", "method_addcmul_", "method_add_"


def leave_whole(kind: type[Tensor]) -> None:
    """Makes Dynamo put these methods of a class of tensors into graphs undecomposed. It imports Dynamo."""
    from gossamer.runtime.torch_internals import TensorVariable, foreach_lerp, functions_apart

    for name in _TAKEN_APART:
        if (method := vars(TensorVariable).get(name)) is not None:
            setattr(TensorVariable, name, _unless(kind, method))
    functions = functions_apart()
    if (handler := functions.get(foreach_lerp)) is not None:
        functions[foreach_lerp] = _unless_listed(kind, handler)


def _unless(kind: type[Tensor], method: Any) -> Any:
    @wraps(method)
    def taken_apart(variable: Any, *args: Any, **kwargs: Any) -> Any:
        return None if issubclass(variable.python_type(), kind) else method(variable, *args, **kwargs)

    return taken_apart


def _unless_listed(kind: type[Tensor], handler: Any) -> Any:
    @wraps(handler)
    def taken_apart(function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        listed = args[0].unpack_var_sequence(tx) if args else ()
        whole = any(issubclass(each.python_type(), kind) for each in listed)
        return None if whole else handler(function, tx, *args, **kwargs)

    return taken_apart
