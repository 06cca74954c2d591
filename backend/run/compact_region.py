"""What runs where a convolution was of whose filters, or channels, some are zeros altogether: torch's own, of the others.

    gossamer::region([x [N, C, ...], *leaves of the weight], key) -> [N, M, ...]

Which of them are left out is looked at again whenever the weight has changed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.backend.devices.device_kernel import Kernel
from gossamer.backend.graph.weight_expressions import run
from gossamer.backend.run.layouts import Images
from gossamer.backend.run.lost_zeros import ran_densely
from gossamer.runtime.remembered import Remembered

aten = torch.ops.aten


@dataclass(frozen=True)
class Compact:
    """The filters of a weight without what is zeros, and which rows and channels these are; None for all."""

    filters: Tensor
    rows: Tensor | None
    channels: Tensor | None

    @classmethod
    def of(cls, weight: Tensor) -> "Compact":
        """Of filters [M, C, taps]."""
        occupied = weight != 0  # a NaN is
        rows, channels = (_where(occupied.any(-1).any(axis)) for axis in (1, 0))
        for axis, kept in enumerate((rows, channels)):
            weight = weight if kept is None else weight.index_select(axis, kept)
        return cls(weight.contiguous(), rows, channels)


def _where(kept: Tensor) -> Tensor | None:
    return None if bool(kept.all()) else kept.nonzero().flatten()


@dataclass(eq=False)
class CompactRegion:
    """A convolution that leaves out what is zeros.

    evaluate  leaf values → the weight as a matrix [M, C taps]
    layout    of the images
    """

    evaluate: Callable[..., Tensor]
    layout: Images
    verify: bool

    def __post_init__(self) -> None:
        self._compacts = Remembered[Compact]("all" if self.verify else "uncounted", most=8)

    def __reduce__(self) -> tuple[Any, ...]:
        return CompactRegion, (self.evaluate, self.layout, self.verify)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """None of ours."""
        return ()

    def outputs(self, operands: Sequence[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Sizes and type of the result."""
        return self.layout.outputs(operands[0].shape)

    def __call__(self, operands: list[Tensor]) -> Tensor:
        x, leaves = operands[0], operands[1:]
        made = self._compacts.get(leaves, (), partial(self._compact, leaves))
        if made.rows is None and made.channels is None:
            ran_densely(leaves, lambda: True)
        ((shape, dtype),) = self.outputs(operands)
        out = x.new_zeros(shape, dtype=dtype)
        if made.filters.numel() == 0 or out.numel() == 0:
            return out
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            result = self._convolved(x if made.channels is None else x.index_select(1, made.channels), made.filters)
            return result.contiguous() if made.rows is None else out.index_copy_(1, made.rows, result)

    def _convolved(self, x: Tensor, filters: Tensor) -> Tensor:
        dims, window = x.dim() - 2, self.layout.window
        kernel, stride, dilation, before, after = (
            list(sizes[3 - dims :]) for sizes in (window.kernel, window.stride, window.dilation, window.before, window.after)
        )
        if before != after:
            x = aten.constant_pad_nd(x, [n for sides in zip(before[::-1], after[::-1], strict=True) for n in sides])
            before = [0] * dims
        shaped = filters.view(*filters.shape[:2], *kernel)
        return aten.convolution(x, shaped, None, stride, before, dilation, False, [0] * dims, 1)

    def _compact(self, leaves: Sequence[Tensor]) -> Compact:
        matrix = run(self.evaluate, leaves)
        return Compact.of(matrix.view(matrix.shape[0], -1, self.layout.window.taps))
