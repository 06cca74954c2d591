"""A convolution of a graph with a static weight, as a product with a matrix.

convolution(%x [N, C, H, W], view(%w), ...)    =    for each output pixel, w [M, C taps] times the input pixels in its window
"""

from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import fx

from gossamer.backend.convolution.transposed import Alternative
from gossamer.backend.graph.nodes import hint, hints
from gossamer.backend.regions.contractions import Contraction
from gossamer.dialects.window import Sizes, Window

_UNKNOWN = 14  # rows and columns that are assumed for images of unknown size


@dataclass(frozen=True)
class Convolution(Contraction):
    """y[n, m, pixel] = sum_ck x[n, c, pixel of tap k] w[m, c taps + k], for c in the group of m. Features are dimension 1.

    window     the window that slides over the images, with its padding
    depthwise  whether each channel is summed alone: y[n, m, pixel] = sum_k x[n, m, pixel of tap k] w[m, k]
    padded     whether a node of the graph pads x, so that the window has these zeros, too
    instead    the node of torch's that it replaces, if that is no plain convolution
    kernel_us  microseconds of a call of its kernel, if measured, or estimated from measurements of others
    measured   whether `kernel_us` was measured
    """

    window: Window = field(default_factory=Window)
    depthwise: bool = False
    padded: bool = False
    instead: Alternative | None = None
    kernel_us: float | None = None
    measured: bool = False

    @property
    def source(self) -> fx.Node:
        """The images, before zeros are padded, in the graph as rewritten so far."""
        given: Any = self.node.args[0]
        source: fx.Node = given.args[0] if self.padded else given
        return source

    @property
    def dense_node(self) -> fx.Node:
        """The node that torch computes if the convolution stays dense."""
        return self.instead.torchs if self.instead is not None and not self.instead.backward else self.node

    @property
    def axis(self) -> int:
        """The dimension of channels."""
        return 1

    @property
    def tokens(self) -> int | None:
        """Output pixels of all images. Dynamic sizes count with their hints; None if one has no hint."""
        shape = self.node.meta["val"].shape
        sizes = hints([shape[0], *shape[2:]])
        return None if sizes is None else prod(sizes)

    @property
    def op(self) -> str:
        """Its name in reports."""
        if self.instead is not None:
            return self.instead.op.replace("back", "depthwise back" if self.depthwise else "back")
        kernel = "x".join(map(str, self.window.kernel[5 - self.x.meta["val"].dim() :]))
        return f"conv {kernel}" + (" depthwise" if self.depthwise else "") + (" backward" if self.backward else "")

    @property
    def density(self) -> float:
        """Share of nonzeros in the filters of torch's node."""
        return min(1.0, self.weight.density / self.share)

    @property
    def share(self) -> float:
        """Size of the filters of torch's node over that of the weight. Other taps of the weight are padding, always zero."""
        return 1.0 if self.instead is None else self.instead.taps / (self.window.taps * prod(self.instead.stride))

    @property
    def channels(self) -> int:
        """Channels of the images that it reads."""
        return self.m if self.depthwise else self.k // self.window.taps * self.window.groups

    @property
    def images(self) -> int:
        """Number of images; 1 if unknown."""
        return max(1, hint(self.x.meta["val"].shape[0]) or 1)

    @property
    def results(self) -> Sizes:
        """Depth, height and width of the result. Hints or a guess stand in for unknown sizes."""
        shape = self.node.meta["val"].shape[2:]
        return sizes_along([_UNKNOWN if (n := hint(size)) is None else n for size in shape], 1)

    @property
    def pixels(self) -> int:
        """Pixels of the results of all images."""
        return max(1, self.images * prod(self.results))


def sizes_along(numbers: Any, missing: int) -> Sizes:
    """Returns numbers for depth, height and width. `numbers` may lack the first ones, which become `missing`."""
    depth, height, width = [missing] * (3 - len(numbers)) + list(numbers)
    return depth, height, width
