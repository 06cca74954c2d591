"""In-place arithmetic of optimizers that Dynamo is to leave whole, where it is of stored values.

    p.addcdiv_(m, v, value=-lr)      →      fma(m / v, -lr, p), written to p      (torch 2.13)

is the same for dense tensors. Of stored values it is not: m / v by itself is 0 / 0 where nothing is stored.
"""

from functools import wraps
from typing import Any

from torch import Tensor

from gossamer.runtime.torch_internals import TensorVariable

_TAKEN_APART = "method_addcdiv_", "method_addcmul_", "method_add_"


def leave_whole(kind: type[Tensor]) -> None:
    """Has Dynamo put these methods of a class of tensors into graphs as they are."""
    for name in _TAKEN_APART:
        if (method := vars(TensorVariable).get(name)) is not None:
            setattr(TensorVariable, name, _unless(kind, method))


def _unless(kind: type[Tensor], method: Any) -> Any:
    @wraps(method)
    def taken_apart(variable: Any, *args: Any, **kwargs: Any) -> Any:
        return None if issubclass(variable.python_type(), kind) else method(variable, *args, **kwargs)

    return taken_apart
