"""Runs NumPy's functions and operators with SparseTensors as torch's functions of the same meaning.

a @ np.ones((8, 2)), np.multiply(x, a)      →      a @ torch.from_numpy(...), torch.multiply(torch.from_numpy(x), a)
"""

from typing import Any

import numpy as np
import torch

from gossamer.sparsity.tensor.extension import unsupported
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor

_OF_TORCH = {"power": "pow", "invert": "bitwise_not", "conjugate": "conj"}
"""Torch's names of functions, where they differ from NumPy's."""


def array_ufunc(self: SparseTensor, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
    """Implements NumPy's protocol: calls torch's function with arrays as tensors. NumPy calls it if an operand is sparse."""
    name = ufunc.__name__
    function = getattr(torch, _OF_TORCH.get(name, name), None)
    if method != "__call__" or kwargs or function is None:
        raise unsupported(f"numpy.{name}", "use a function of torch, or to_dense().numpy(), or to_scipy()")
    return function(*(torch.as_tensor(each) if isinstance(each, np.ndarray) else each for each in inputs))


SparseTensor.__array_ufunc__ = array_ufunc  # type: ignore[attr-defined]
