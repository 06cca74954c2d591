"""A convolution of a graph with a static weight.

convolution(%x [N, C, H, W], view(%w), ...)    =    for each output pixel, w [M, C taps] times what the window shows there
"""

from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import fx

from gossamer.backend.convolution.transposed import Alternative
from gossamer.backend.graph.nodes import hint, hints
from gossamer.backend.regions.contractions import Contraction
from gossamer.dialects.window import Sizes, Window

_UNKNOWN = 14  # rows and columns of images whose size is not known while they are compiled


@dataclass(frozen=True)
class Convolution(Contraction):
    """y[n, m, pixel] = sum_ck x[n, c, what tap k reads] w[m, c taps + k], c in the group of m; features are along dimension 1.

    window     what slides over the images
    depthwise  whether each channel is summed for itself: y[n, m, pixel] = sum_k x[n, m, what tap k reads] w[m, k]
    padded     whether the graph puts the zeros around x that the window has
    instead    what of torch's it stands for, if that is no convolution
    kernel_us  microseconds that a call of its kernel takes, if that is known better than by prediction
    measured   whether that was measured, not concluded from others
    """

    window: Window = field(default_factory=Window)
    depthwise: bool = False
    padded: bool = False
    instead: Alternative | None = None
    kernel_us: float | None = None
    measured: bool = False

    @property
    def source(self) -> fx.Node:
        """What `x` is by now, in a graph that has been rewritten."""
        given: Any = self.node.args[0]
        source: fx.Node = given.args[0] if self.padded else given
        return source

    @property
    def dense_node(self) -> fx.Node:
        """What torch computes in its place."""
        return self.instead.torchs if self.instead is not None and not self.instead.backward else self.node

    @property
    def axis(self) -> int:
        """That of channels."""
        return 1

    @property
    def tokens(self) -> int | None:
        """Output pixels of all images; for dynamic sizes by their hints, None where there are none."""
        shape = self.node.meta["val"].shape
        sizes = hints([shape[0], *shape[2:]])
        return None if sizes is None else prod(sizes)

    @property
    def op(self) -> str:
        """What a user calls it."""
        if self.instead is not None:
            return self.instead.op.replace("back", "depthwise back" if self.depthwise else "back")
        kernel = "x".join(map(str, self.window.kernel[5 - self.x.meta["val"].dim() :]))
        return f"conv {kernel}" + (" depthwise" if self.depthwise else "") + (" backward" if self.backward else "")

    @property
    def density(self) -> float:
        """Share of the kernel's elements that are not zero, as torch has it."""
        return min(1.0, self.weight.density / self.share)

    @property
    def share(self) -> float:
        """What the kernel that torch has is of the weight: the rest are taps that there are not."""
        return 1.0 if self.instead is None else self.instead.taps / (self.window.taps * prod(self.instead.stride))

    @property
    def channels(self) -> int:
        """Those of the images that it reads."""
        return self.m if self.depthwise else self.k // self.window.taps * self.window.groups

    @property
    def images(self) -> int:
        """Their number; one where it is not known."""
        return max(1, hint(self.x.meta["val"].shape[0]) or 1)

    @property
    def results(self) -> Sizes:
        """Depth, height and width of the result, or about that where they are not known."""
        shape = self.node.meta["val"].shape[2:]
        return sizes_along([_UNKNOWN if (n := hint(size)) is None else n for size in shape], 1)

    @property
    def pixels(self) -> int:
        """Those of the results of all images."""
        return max(1, self.images * prod(self.results))


def sizes_along(numbers: Any, missing: int) -> Sizes:
    """Those along depth, height and width, of which the first may be missing."""
    depth, height, width = [missing] * (3 - len(numbers)) + list(numbers)
    return depth, height, width
