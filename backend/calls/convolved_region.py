"""What runs where a convolution with a sparse weight was, with the elementwise work that follows it.

    gossamer::region([x [N, C, H, W], *leaves of the weight, *extras], key) -> [N, M, H', W']

Extras that are a number for each channel come as [M], images as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from gossamer.backend.calls.packed_weights import Packings
from gossamer.backend.devices.kernel import Kernel, allocate, contiguous_strides
from gossamer.backend.graph.weight_expressions import run
from gossamer.dialects.window import Window

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class ConvolvedRegion:
    """A convolution that can run, sparse or dense; the fields are those of `CompiledRegion`.

    body     computes the region from (x, weight as a matrix, *extras), densely
    window   what slides over the images
    """

    kernel: Kernel
    packings: Packings
    body: Callable[..., torch.Tensor]
    window: Window
    leaves: int
    densest: float
    verify: bool
    m: int
    dtype: torch.dtype

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The only one."""
        return (self.kernel,)

    def shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Sizes of the result for this first operand."""
        images = x.shape[2:] if self.window.pointwise else self.window.output(*self.window.images)[4 - x.dim() :]
        return x.shape[0], self.m, *images

    def __call__(self, operands: list[torch.Tensor]) -> torch.Tensor:
        x, given = operands[0], 1 + self.leaves
        look_up = self.packings.verified if self.verify else self.packings.current
        shape = self.shape(x)
        packed = look_up(operands[1:given], self.densest)
        if packed is None:
            return self.dense(operands)
        out = allocate(shape, contiguous_strides(shape), self.dtype)
        if out.numel():
            arrays = [pixels(x), packed, *(pixels(extra) for extra in operands[given:])]
            self.kernel(arrays, out.flatten(2))
        return out

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
    pairs = (window.kernel, window.stride, window.dilation)
    kernel, stride, dilation = ([1] * 3 if dims == 5 else list(pair[4 - dims :]) for pair in pairs)
    around = [n for sides in zip(window.before[::-1], window.after[::-1], strict=True) for n in sides][: 2 * dims - 4]
    with graph.inserting_before(product):
        channels = graph.call_function(aten.sym_size.int, (x, 1))
        rows = graph.call_function(aten.sym_size.int, (w, 0))
        filters = graph.call_function(aten.reshape.default, (w, [rows, channels, *kernel]))
        padded = graph.call_function(aten.constant_pad_nd.default, (x, around)) if any(around) else x
        given = (padded, filters, None, stride, [0] * (dims - 2), dilation, False, [0] * (dims - 2), 1)
        dense = graph.call_function(aten.convolution.default, given)
    product.replace_all_uses_with(dense)
    graph.eliminate_dead_code()
    return fx.GraphModule({}, graph, "Convolution")


def pixels(images: torch.Tensor) -> torch.Tensor:
    """[N, C, pixels] of images; what is a number or one for each channel as it is."""
    contiguous = images if images.is_contiguous() else images.contiguous()
    return contiguous.flatten(2) if contiguous.dim() > 2 else contiguous
