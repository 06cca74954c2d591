"""Runs NumPy's functions and operators with SparseTensors as torch's functions of the same meaning.

a @ np.ones((8, 2)), np.multiply(x, a)      →      a @ torch.from_numpy(...), torch.multiply(torch.from_numpy(x), a)
x += a                                      →      the same, and its elements are written to x
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gossamer.sparsity.tensor.extension import unsupported
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor
from gossamer.sparsity.torch_functions.in_place import into

_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv, "power": operator.pow,
    "floor_divide": operator.floordiv, "remainder": operator.mod, "matmul": operator.matmul, "invert": operator.invert,
    "bitwise_and": operator.and_, "bitwise_or": operator.or_, "bitwise_xor": operator.xor, "left_shift": operator.lshift,
    "right_shift": operator.rshift, "equal": operator.eq, "not_equal": operator.ne, "less": operator.lt,
    "less_equal": operator.le, "greater": operator.gt, "greater_equal": operator.ge,
}  # fmt: skip
"""Operators, which also take a number in front. torch.equal means something else: whether whole tensors are equal."""


def array_ufunc(self: SparseTensor, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
    """Implements NumPy's protocol: calls torch's function with arrays as tensors. NumPy calls it if an operand is sparse."""
    name = ufunc.__name__
    function = _OPERATORS.get(name) or getattr(torch, "conj" if name == "conjugate" else name, None)
    written = kwargs.pop("out", None)
    known = written is None or (len(written) == 1 and isinstance(written[0], np.ndarray))
    if method != "__call__" or kwargs or function is None or not known:
        raise unsupported(f"numpy.{name}", "use a function of torch, or to_dense().numpy(), or to_scipy()")
    if written is not None and not written[0].flags.writeable:
        raise ValueError("output array is read-only")
    result = function(*map(_of_torch, inputs))
    if written is None:
        return result
    into(_of_torch(written[0]), result)
    return written[0]


def _of_torch(operand: Any) -> Any:
    if isinstance(operand, np.ndarray):
        return torch.as_tensor(operand)
    return operand.item() if isinstance(operand, np.generic) else operand


SparseTensor.__array_ufunc__ = array_ufunc  # type: ignore[attr-defined]
