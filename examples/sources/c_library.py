"""A library that gossamer.build made, called from Python without torch and Gossamer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_TYPES = {"int64": 4, "float32": 6}


class _Tensor(ctypes.Structure):
    """As the header has it."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("sizes", ctypes.c_int64 * 8),
        ("owner", ctypes.c_void_p),
    ]


class Library:
    """A model whose results are one array. One call at a time runs."""

    def __init__(self, path: Path) -> None:
        """RuntimeError where the library refuses this machine."""
        library = ctypes.CDLL(str(path.absolute()))
        load, self._run, self._release, self._error = (
            getattr(library, f"{path.stem}_{name}") for name in ("load", "run", "release", "error")
        )
        load.restype, self._error.restype = ctypes.c_void_p, ctypes.c_char_p
        self._model = ctypes.c_void_p(load())
        if not self._model:
            raise RuntimeError(self._error().decode())

    def __call__(self, *inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The result, float32, for contiguous arrays."""
        given, out = (_Tensor * len(inputs))(*map(_tensor, inputs)), _Tensor()
        if self._run(self._model, given, ctypes.byref(out)):
            raise RuntimeError(self._error().decode())
        floats = ctypes.cast(out.data, ctypes.POINTER(ctypes.c_float))
        found = np.ctypeslib.as_array(floats, tuple(out.sizes[: out.rank])).copy()
        self._release(ctypes.byref(out))
        return found


def _tensor(array: np.ndarray[Any, Any]) -> _Tensor:
    sizes: Sequence[int] = array.shape
    return _Tensor(array.ctypes.data, _TYPES[str(array.dtype)], array.ndim, (ctypes.c_int64 * 8)(*sizes))
