"""What operands and results of a region are: matrices with a token a row, sequences of tokens, images.

A kernel knows the sizes that are fixed. For the shape of the first operand, a layout says how many tokens there are, what sizes
and types results have, and how the kernel sees tensors that lie in memory one element after the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from gossamer.dialects.window import Sizes, Window
from gossamer.runtime.compiled_kernel import Memory

Shape = tuple[int, ...]

View = Callable[[Sequence[Any], Any], tuple[Any, ...]]
"""(contiguous operands, results) → what a kernel is called with. Tensors may be `Memory` instead."""


@dataclass(frozen=True)
class Matrices:
    """[T, K] → [T, M], ...: `results` are columns and type of each."""

    results: tuple[tuple[int, torch.dtype], ...]

    def tokens(self, given: Shape) -> int:
        """Rows of results."""
        return given[0]

    def outputs(self, given: Shape) -> list[tuple[Shape, torch.dtype]]:
        """A row for each token."""
        return [((self.tokens(given), columns), dtype) for columns, dtype in self.results]

    def view(self, given: Shape) -> View | None:
        """As they are."""
        return None


@dataclass(frozen=True)
class Sequences(Matrices):
    """[sequences, length, K] → [sequences length, M], ...; `by_position`: the first operand is [length, sequences, K]."""

    by_position: bool

    def tokens(self, given: Shape) -> int:
        """Those of all sequences."""
        return given[0] * given[1]

    def view(self, given: Shape) -> View:
        """A matrix, and the length of sequences behind all others."""
        rows, length = (given[0] * given[1], given[2]), given[not self.by_position]

        def view(operands: Sequence[Any], out: Any) -> tuple[Any, ...]:
            x, *others = operands
            return [Memory(x.data_ptr(), rows), *others, length], out, length

        return view


@dataclass(frozen=True)
class Images:
    """[N, C, H, W] → [N, M, H', W'] with a window that slides over them.

    dims      how many of depth, height and width the kernel is told
    channels  those of the result, None for those of the images
    """

    window: Window
    dims: int
    channels: int | None
    dtype: torch.dtype

    def tokens(self, given: Shape) -> int:
        """Images."""
        return given[0]

    def outputs(self, given: Shape) -> list[tuple[Shape, torch.dtype]]:
        """A batch of images. RuntimeError where the window does not fit."""
        channels = given[1] if self.channels is None else self.channels
        return [((given[0], channels, *slid_over(self.window, given)), self.dtype)]

    def view(self, given: Shape) -> View:
        """Images as [N, channels, pixels], and their sizes behind all operands; a number for each channel as it is."""
        ((shape, _),) = self.outputs(given)
        read, written = ((*each[:2], prod(each[2:])) for each in (given, shape))
        sizes = sizes_of(given)[3 - self.dims :]

        def view(operands: Sequence[Any], out: Any) -> tuple[Any, ...]:
            x, *others = operands
            seen = [Memory(each.data_ptr(), written) if len(each.shape) > 2 else each for each in others]
            return [Memory(x.data_ptr(), read), *seen, *sizes], Memory(out.data_ptr(), written)

        return view


def sizes_of(given: Shape) -> Sizes:
    """Depth, height and width of images of this shape; rows of pixels are images of height 1."""
    depth, height, width = *[1] * (5 - len(given)), *given[2:]
    return depth, height, width


def slid_over(window: Window, given: Shape) -> Shape:
    """Sizes of the result for images of this shape. RuntimeError where the window does not fit."""
    found = window.output(*sizes_of(given))
    if not window.pointwise and min(found) < 1:
        sizes, kernel = ("x".join(map(str, each[5 - len(given) :])) for each in (sizes_of(given), window.kernel))
        raise RuntimeError(
            f"a convolution with a kernel of {kernel} (dilated by {window.dilation}) gives no pixel of images of {sizes}"
        )
    return found[5 - len(given) :]
