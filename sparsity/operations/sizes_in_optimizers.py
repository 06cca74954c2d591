"""Fixes the sizes of a parameter's arrays in compiled steps of optimizers, as Dynamo does for plain parameters.

After steps with other numbers of nonzeros Dynamo would make the sizes open, which fails in its code for optimizers (2.13).
"""

from functools import wraps
from typing import Any

from torch import Tensor

_FIXED = "_dynamo_static_indices"  # the mark of torch._dynamo.mark_static on a tensor
_OPEN = "_dynamo_propagated_dynamic_indices"  # the mark of compiled code for open sizes
_fixed: list[Tensor] = []


def fix_sizes(kind: type[Tensor]) -> None:
    """Makes Dynamo fix the sizes for parameters of a class of tensors. It imports Dynamo."""
    from gossamer.runtime.torch_internals import OptimizerVariable, off
    from gossamer.runtime.torch_names import OPTIMIZERS

    method = vars(OptimizerVariable).get("var_getattr")
    if method is not None and not off(OPTIMIZERS):
        OptimizerVariable.var_getattr = _fixing(kind, method)


def _fixing(kind: type[Tensor], method: Any) -> Any:
    @wraps(method)
    def var_getattr(variable: Any, tx: Any, name: str) -> Any:
        if name == "param_groups":
            parameters = [p for group in variable.value.param_groups for p in group["params"] if isinstance(p, kind)]
            _fix([getattr(p, array) for p in parameters for array in p.__tensor_flatten__()[0]])  # type: ignore[attr-defined]
        return method(variable, tx, name)

    return var_getattr


def _fix(arrays: list[Tensor]) -> None:
    """Marks arrays as static until the frame is compiled."""
    from gossamer.runtime.torch_internals import callback_handler

    for array in arrays:
        marks = vars(array)
        marks[_FIXED] = set(range(array.dim()))
        marks.pop(_OPEN, None)
    _fixed.extend(arrays)
    if _fixed and _free not in callback_handler.end_callbacks:  # torch.compiler.reset() empties that list
        callback_handler.register_end_callback(_free)


def _free(_: object) -> None:
    for array in _fixed:
        vars(array).pop(_FIXED, None)
    _fixed.clear()
