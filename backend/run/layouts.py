"""Layouts of a region's operands and results: matrices with a row for each token, sequences of tokens, images.

A kernel knows only the static sizes. A layout computes the other sizes from the shape of the first operand: the number of
tokens, and the sizes of the results. It also turns contiguous tensors into the kernel's arguments.
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
"""(contiguous operands, results) → the arguments of a kernel. `Memory` may take the place of tensors."""


@dataclass(frozen=True)
class Matrices:
    """[T, K] → [T, M], ...; `results` has the number of columns and the type of each result."""

    results: tuple[tuple[int, torch.dtype], ...]

    def tokens(self, given: Shape) -> int:
        """Returns the number of rows of the results."""
        return given[0]

    def outputs(self, given: Shape) -> list[tuple[Shape, torch.dtype]]:
        """Returns the sizes and type of each result, which has a row for each token."""
        return [((self.tokens(given), columns), dtype) for columns, dtype in self.results]

    def view(self, given: Shape) -> View | None:
        """Returns None: kernels take matrices unchanged."""
        return None


@dataclass(frozen=True)
class Sequences(Matrices):
    """[sequences, length, K] → [sequences length, M], ...

    by_position  whether the first operand is [length, sequences, K] instead
    """

    by_position: bool

    def tokens(self, given: Shape) -> int:
        """Returns the number of tokens of all sequences."""
        return given[0] * given[1]

    def view(self, given: Shape) -> View:
        """Returns the view as a matrix. The last argument is the length of the sequences."""
        rows, length = (given[0] * given[1], given[2]), given[not self.by_position]

        def view(operands: Sequence[Any], out: Any) -> tuple[Any, ...]:
            x, *others = operands
            return [Memory(x.data_ptr(), rows), *others, length], out, length

        return view


@dataclass(frozen=True)
class Images:
    """[N, C, H, W] → [N, M, H', W'] with a window that slides over the images.

    dims      the number of sizes among depth, height and width that the kernel takes: the last so many
    channels  the channels of the result; None for as many as the images have
    """

    window: Window
    dims: int
    channels: int | None
    dtype: torch.dtype

    def tokens(self, given: Shape) -> int:
        """Returns the number of images."""
        return given[0]

    def outputs(self, given: Shape) -> list[tuple[Shape, torch.dtype]]:
        """Returns the sizes and type of the resulting images. Raises RuntimeError if the window does not fit."""
        channels = given[1] if self.channels is None else self.channels
        return [((given[0], channels, *slid_over(self.window, given)), self.dtype)]

    def view(self, given: Shape) -> View:
        """Returns the view of images as [N, channels, pixels], with their sizes after all operands. Vectors with a number for
        each channel do not change."""
        ((shape, _),) = self.outputs(given)
        read, written = ((*each[:2], prod(each[2:])) for each in (given, shape))
        sizes = sizes_of(given)[3 - self.dims :]

        def view(operands: Sequence[Any], out: Any) -> tuple[Any, ...]:
            x, *others = operands
            seen = [Memory(each.data_ptr(), written) if len(each.shape) > 2 else each for each in others]
            return [Memory(x.data_ptr(), read), *seen, *sizes], Memory(out.data_ptr(), written)

        return view


def sizes_of(given: Shape) -> Sizes:
    """Returns depth, height and width of images of this shape. Missing ones are 1."""
    depth, height, width = *[1] * (5 - len(given)), *given[2:]
    return depth, height, width


def slid_over(window: Window, given: Shape) -> Shape:
    """Returns the sizes of the result for images of this shape. Raises RuntimeError if the window does not fit."""
    found = window.output(*sizes_of(given))
    if not window.pointwise and min(found) < 1:
        sizes, kernel = ("x".join(map(str, each[5 - len(given) :])) for each in (sizes_of(given), window.kernel))
        raise RuntimeError(
            f"a convolution with a kernel of {kernel} (dilated by {window.dilation}) gives no pixel of images of {sizes}"
        )
    return found[5 - len(given) :]
