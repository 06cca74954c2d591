"""Runs functions of torch that have no sparse implementation on the dense tensor, with a warning.

Functions that compute nothing (sizes, properties, copies, in-place arithmetic of optimizers) go to aten's operators, see
pointwise.py.
"""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ContextDecorator
from contextvars import ContextVar, Token
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F

from gossamer.dialects.errors import GossamerError, OptionError
from gossamer.runtime.operations import constant
from gossamer.runtime.torch_internals import tree_map_only
from gossamer.sparsity.tensor.pointwise import ON_VALUES
from gossamer.sparsity.tensor.shapes import to_dense
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor

_strict: ContextVar[bool] = ContextVar("gossamer.strict", default=False)
_told: set[str] = set()

# Methods and operators that compute, but are no functions of torch, torch.linalg, torch.special, torch.fft or F.
_METHODS = (
    "repeat", "unfold", "view_as", "item", "tolist", "type_as", "masked_fill",
    "__and__", "__or__", "__xor__", "__invert__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__mod__",
    "__lshift__", "__rshift__", "__rmod__", "__floordiv__", "__rfloordiv__", "__rpow__", "__rdiv__", "__rtruediv__",
    "__contains__", "__bool__", "__float__", "__int__", "__complex__", "__index__", "__reversed__", "_threshold",
)  # fmt: skip
# Functions of torch that return a property of a tensor, and compute nothing from its elements.
_QUESTIONS = (
    "can_cast", "get_device", "is_complex", "is_conj", "is_distributed", "is_floating_point", "is_inference", "is_neg",
    "is_same_size", "is_signed", "is_storage", "is_tensor", "numel", "promote_types", "resolve_conj", "resolve_neg",
    "result_type",
)  # fmt: skip
_HOMES = (torch, F, torch.linalg, torch.special, torch.fft)
_ALIASES = frozenset(getattr(each, "__name__", "") for each in vars(F).values() if callable(each))  # logsigmoid is log_sigmoid


class strict(ContextDecorator):
    """Within this context, an operation that would make a SparseTensor dense raises a GossamerError instead of one warning.

        with gossamer.strict():
            y = model(a, x)

    It is also a decorator. A compiled function checks this when it is compiled, so make its first call within the context.
    `to_dense()`, and operations whose result is always dense, such as a + 1, raise nothing.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._tokens: list[Token[bool]] = []

    def __enter__(self) -> None:
        self._tokens.append(_strict.set(self._enabled))

    def __exit__(self, *_: Any) -> None:
        _strict.reset(self._tokens.pop())


def densified(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function with dense tensors in place of SparseTensors, with a warning. Gradients flow through it."""
    _tell(func)
    args, kwargs = tree_map_only(SparseTensor, to_dense, (list(args), dict(kwargs)))
    return func(*args, **kwargs)


@constant
def computes(func: Callable[..., Any]) -> bool:
    """Whether a function returns something that it computes from the elements of its arguments."""
    return _name_computes(func.__name__)


@cache
def _name_computes(name: str) -> bool:
    if name in _METHODS:
        return True
    if name in ON_VALUES or name in _QUESTIONS or name.startswith("_") or name.endswith("_"):
        return False
    plain = name.removeprefix("linalg_").removeprefix("special_").removeprefix("fft_")
    return plain in _ALIASES or any(callable(getattr(home, plain, None)) for home in _HOMES)


@constant
def _tell(func: Callable[..., Any]) -> None:
    """Warns once for each function. Raises GossamerError under `strict`."""
    name = func.__name__.strip("_")
    if name == "chunk" and _is_being_sharded():
        raise OptionError(
            "FSDP2 keeps parameters in flat arrays of all elements, and a SparseTensor has none: shard a model with stored "
            "weights by gossamer.distributed.fully_shard, which keeps their nonzeros on every process and averages their "
            "gradients, or deal them by gossamer.distributed.ColwiseParallel and gossamer.distributed.RowwiseParallel"
        )
    message = f"SparseTensor has no sparse {name}, so it is computed on all elements, zeros too, and the result is dense"
    if _strict.get():
        raise GossamerError(f"{message}. Write to_dense() if you want that, or add it by gossamer.implements({name})")
    if name not in _told:
        _told.add(name)
        warnings.warn(
            f"{message}. Write to_dense() if you want that; gossamer.strict() makes this an error", UserWarning, stacklevel=5
        )


def _is_being_sharded() -> bool:
    """Whether torch's fully_shard is the caller, which takes a part of each parameter."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith("torch.distributed.fsdp."):
        frame = frame.f_back
    return frame is not None
