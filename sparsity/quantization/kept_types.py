"""`KeepsTypes` is the base of layers whose stored numbers keep their types in conversions such as `half` and `to`."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

_STORED = ("weight_", "input_", "_codes", "_scale")
"""A part of the name of each buffer with integers, scales, steps or bits."""


class KeepsTypes:
    """A layer with stored numbers.

    Conversions move its buffers, which keep their types: float16 would round scales, and sums of integers become infinite.
    They change only `_dtype`, that of the weight as floats.
    """

    _dtype: torch.dtype
    _buffers: dict[str, Tensor | None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        stored = (name for name in self._buffers if any(part in name for part in _STORED))
        held = {name: tensor for name in stored if (tensor := self._buffers[name]) is not None}
        super()._apply(fn, recurse)  # type: ignore[misc]
        for name, tensor in held.items():
            now = self._buffers[name]
            if now is not None and now.dtype is not tensor.dtype:
                self._buffers[name] = tensor.to(now.device)
        self._dtype = fn(torch.empty(0, dtype=self._dtype)).dtype
        return self
