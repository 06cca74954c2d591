"""What runs where a convolution with a sparse weight was, with the elementwise work that follows it.

    gossamer::region([x [N, C, H, W], *leaves of the weight, *extras], key) -> [N, M, H', W']

Extras that are a number for each channel come as [M], images as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, ClassVar

import torch
from torch import fx

from gossamer.backend.calls.packed_weights import Packings
from gossamer.backend.devices.kernel import Kernel, allocate, contiguous_strides
from gossamer.backend.graph.weight_expressions import run
from gossamer.dialects.window import Sizes, Window
from gossamer.runtime.kernel import Memory

aten = torch.ops.aten


_MANY = 64  # shapes of images that a region remembers


class Shapes(dict[tuple[int, ...], tuple[tuple[int, ...], ...]]):
    """For the shape of images: the shape and strides of what a convolution makes of them, both as [N, channels, pixels], and
    the depth, height and width of the images.

    They are remembered, for it takes as long to work them out as to convolve small images.
    """

    def __init__(self, shape: Callable[[torch.Size], tuple[int, ...]]) -> None:
        super().__init__()
        self._shape = shape

    def __missing__(self, given: torch.Size) -> tuple[tuple[int, ...], ...]:
        if len(self) == _MANY:
            self.clear()
        shape = self._shape(given)
        rows = [(*each[:2], prod(each[2:])) for each in (given, shape)]
        found = self[given] = shape, contiguous_strides(shape), *rows, sizes_of(given)
        return found


def sizes_of(given: torch.Size) -> Sizes:
    """Depth, height and width of images of this shape; rows of pixels are images of height 1."""
    depth, height, width = *[1] * (5 - len(given)), *given[2:]
    return depth, height, width


def slid_over(window: Window, given: torch.Size) -> tuple[int, ...]:
    """Sizes of the result for images of this shape. RuntimeError where the window does not fit."""
    found = window.output(*sizes_of(given))
    if not window.pointwise and min(found) < 1:
        sizes, kernel = ("x".join(map(str, each[5 - len(given) :])) for each in (sizes_of(given), window.kernel))
        raise RuntimeError(
            f"a convolution with a kernel of {kernel} (dilated by {window.dilation}) gives no pixel of images of {sizes}"
        )
    return found[5 - len(given) :]


@dataclass(frozen=True, eq=False)
class OnImages:
    """What a kernel computes of images of any size with a window that slides over them.

    It takes the last `dims` of their depth, height and width.
    """

    dims: ClassVar[int] = 3
    kernel: Kernel
    window: Window
    dtype: torch.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "_shapes", Shapes(self._shape))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, each.name) for each in fields(self))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The only one."""
        return (self.kernel,)

    def shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Sizes of the result for this first operand."""
        return self._shape(x.shape)

    def _shape(self, given: torch.Size) -> tuple[int, ...]:
        raise NotImplementedError

    def sizes(self, given: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """What `Shapes` has for images of this shape."""
        return self._shapes[given]  # type: ignore[attr-defined]

    def taken(self, x: Memory, weight: Any, extras: Sequence[Any], out: Memory) -> tuple[list[Any], Memory]:
        """The operands and the output of the kernel for images that lie somewhere, one after the other."""
        _, _, read, written, sizes = self.sizes(x.shape)
        others = [Memory(e.data_ptr(), written) if len(e.shape) > 2 else e for e in extras]
        return [Memory(x.address, read), weight, *others, *sizes[3 - self.dims :]], Memory(out.address, written)

    def computed(self, x: torch.Tensor, weight: Any, extras: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result."""
        shape, strides, read, written, sizes = self._shapes[x.shape]  # type: ignore[attr-defined]
        out = allocate(shape, strides, self.dtype)
        if out.numel():
            others = [pixels(extra, written) for extra in extras]
            self.kernel([pixels(x, read), weight, *others, *sizes[3 - self.dims :]], out.view(written))
        return out


@dataclass(frozen=True, eq=False)
class Band:
    """A kernel that computes so many rows of the weight, that is channels of the result, and no more."""

    kernel: Kernel
    rows: int


@dataclass(frozen=True, eq=False)
class ConvolvedRegion(OnImages):
    """A convolution that can run, sparse or dense; the fields are those of `CompiledRegion`.

    body     computes the region from (x, weight as a matrix, *extras), densely
    window   what slides over the images
    band     computes some channels, where a depthwise convolution reads the result
    """

    packings: Packings
    body: Callable[..., torch.Tensor]
    leaves: int
    densest: float
    verify: bool
    m: int
    band: Band | None = None

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Those for all channels, and for some."""
        return (self.kernel,) if self.band is None else (self.kernel, self.band.kernel)

    def _shape(self, given: torch.Size) -> tuple[int, ...]:
        return given[0], self.m, *slid_over(self.window, given)

    def __call__(self, operands: list[torch.Tensor]) -> torch.Tensor:
        given = 1 + self.leaves
        look_up = self.packings.verified if self.verify else self.packings.current
        packed = look_up(operands[1:given], self.densest)
        return self.dense(operands) if packed is None else self.computed(operands[0], packed, operands[given:])

    def dense(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same in plain torch."""
        x, statics, extras = operands[0], operands[1 : 1 + self.leaves], operands[1 + self.leaves :]
        spread = [extra.view(-1, *[1] * (x.dim() - 2)) if extra.dim() == 1 else extra for extra in extras]
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            return self.body(x, run(self.packings.evaluate, statics), *spread).contiguous()


def on_images(body: fx.GraphModule, window: Window, dims: int) -> fx.GraphModule:
    """A body on matrices (see `matrix_functions`) as one on batches of images of so many dimensions: its product becomes the
    convolution."""
    graph = fx.Graph()
    result = graph.graph_copy(body.graph, copies := dict[fx.Node, fx.Node]())
    graph.output(result)
    product = copies[next(n for n in body.graph.nodes if n.target is aten.mm.default)]
    x, w = (copies[n] for n in body.graph.nodes if n.op == "placeholder" and n.name in ("x", "w"))
    kernel, stride, dilation = (list(sizes[5 - dims :]) for sizes in (window.kernel, window.stride, window.dilation))
    around = [n for sides in zip(window.before[::-1], window.after[::-1], strict=True) for n in sides][: 2 * dims - 4]
    with graph.inserting_before(product):
        rows = graph.call_function(aten.sym_size.int, (w, 0))
        filters = graph.call_function(aten.reshape.default, (w, [rows, -1, *kernel]))
        padded = graph.call_function(aten.constant_pad_nd.default, (x, around)) if any(around) else x
        given = (padded, filters, None, stride, [0] * (dims - 2), dilation, False, [0] * (dims - 2), window.groups)
        dense = graph.call_function(aten.convolution.default, given)
    product.replace_all_uses_with(dense)
    graph.eliminate_dead_code()
    return fx.GraphModule({}, graph, "Convolution")


def pixels(images: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Images as [N, C, pixels] of this shape; what is a number or one for each channel as it is."""
    contiguous = images if images.is_contiguous() else images.contiguous()
    return contiguous.view(shape) if contiguous.dim() > 2 else contiguous
