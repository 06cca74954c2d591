"""In compiled steps of optimizers, the arrays of a parameter have the sizes of now, as Dynamo has it for plain parameters.

Open sizes, which Dynamo takes up after steps with other numbers of nonzeros, are an error of its own there (2.13).
"""

from functools import wraps
from typing import Any

from torch import Tensor

_FIXED = "_dynamo_static_indices"  # what torch._dynamo.mark_static leaves on a tensor
_OPEN = "_dynamo_propagated_dynamic_indices"  # and what compiled code does
_fixed: list[Tensor] = []


def fix_sizes(kind: type[Tensor]) -> None:
    """Has Dynamo, which is loaded by this, do so for parameters of a class of tensors."""
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
    """Until the frame is compiled."""
    from gossamer.runtime.torch_internals import callback_handler

    for array in arrays:
        marks = vars(array)
        marks[_FIXED] = set(range(array.dim()))
        marks.pop(_OPEN, None)
    _fixed.extend(arrays)
    if _fixed and _free not in callback_handler.end_callbacks:  # which torch.compiler.reset() empties
        callback_handler.register_end_callback(_free)


def _free(_: object) -> None:
    for array in _fixed:
        vars(array).pop(_FIXED, None)
    _fixed.clear()
