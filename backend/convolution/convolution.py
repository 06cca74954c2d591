"""A convolution of a graph with a static weight, and what it costs sparse beside dense.

convolution(%x [N, C, H, W], view(%w), ...)    =    for each output pixel, w [M, C taps] times what the window shows there
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx

from gossamer.backend.convolution.transposed import Alternative
from gossamer.backend.devices.calibrated import this_machine
from gossamer.backend.devices.device import device_of
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.expressions import computed_from
from gossamer.backend.graph.masked_matrix import arrangement_of
from gossamer.backend.graph.nodes import hint, in_training
from gossamer.backend.graph.weight_expressions import Weight, run, weight_behind
from gossamer.backend.measuring.convolution_times import torch_us
from gossamer.backend.regions.contractions import Contraction
from gossamer.backend.regions.cost import matrix_of, predicted
from gossamer.dialects.window import Sizes, Window
from gossamer.passes.framework.family import Matrix
from gossamer.runtime.elements import FLOATS

aten = torch.ops.aten

_NONZERO = (1.3, 0.7)  # cycles of a nonzero, and for each vector of pixels
_ACROSS = 1.07  # the latter of vectors as long as a cache line, of which those of taps lie in two
_ALIGNED, _RESUMED = (1.5, 0.5), 3.0  # the same where none does; and for each vector of sums that a block takes up and leaves
_COLUMNS = 3  # of taps that have phases of their own, at most
_ROW, _STORE, _PACK, _GATHER = 24.0, 8.0, 3.0, 16.0
_NEAR, _FAR_LOAD = 0.9, 0.4  # of the nearest cache what x may fill, and how many cycles more a vector takes from the next one
_PLANE, _TAP, _DENSE_TAP = 60.0, 0.7, 1.5
_SMALLER = 1.15  # how much longer a multiplication takes in a dense convolution with fewer channels
_UNKNOWN = 14  # rows and columns of images whose size is not known while they are compiled


@dataclass(frozen=True)
class Convolution(Contraction):
    """y[n, m, pixel] = sum_ck x[n, c, what tap k reads] w[m, c taps + k], c in the group of m; features are along dimension 1.

    window     what slides over the images
    depthwise  whether each channel is summed for itself: y[n, m, pixel] = sum_k x[n, m, what tap k reads] w[m, k]
    padded     whether the graph puts the zeros around x that the window has
    instead    what of torch's it stands for, if that is no convolution
    occupied   how many filters, and how many of their channels, are not zeros altogether; None where that is not asked
    compact    whether the others are left out, and what is left is dense
    kernel_us  microseconds that a call of its kernel takes, if that is known better than by prediction
    measured   whether that was measured, not concluded from others
    """

    window: Window = field(default_factory=Window)
    depthwise: bool = False
    padded: bool = False
    instead: Alternative | None = None
    occupied: tuple[int, int] | None = None
    compact: bool = False
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
        hints = [hint(shape[d]) for d in range(len(shape)) if d != 1]
        return None if None in hints else prod(hints)  # type: ignore[arg-type]

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
        return _sizes([_UNKNOWN if (n := hint(size)) is None else n for size in shape], 1)

    @property
    def pixels(self) -> int:
        """Those of the results of all images."""
        return max(1, self.images * prod(self.results))


def planned(convolution: Convolution) -> Window:
    """The window with its blocks of channels and its tile for this machine."""
    c, matrix = convolution, matrix_of(convolution)
    return min((_in_rows(c, matrix), *_in_columns(c, matrix)), key=lambda window: _cycles(matrix, window, c.results))


def _in_rows(c: Convolution, matrix: Matrix) -> Window:
    """With images as they are, one row after the other."""
    vectors = _vectors(_needed(c, matrix.lanes), matrix.bits, c.window.pointwise)
    window = replace(c.window, vectors=vectors)
    channels, each = c.channels // window.groups, _channel_bytes(window, matrix)
    if not window.pointwise:
        blocks = -(-channels // max(1, matrix.l1d // (2 * each)))
    else:
        blocks, near = (-(-channels // max(1, int(share * matrix.l1d / each))) for share in (2, _NEAR))
        if c.weight.density * channels * vectors * _FAR_LOAD > (near - blocks) * (_ROW + 2 * vectors):
            blocks = near
    return _in_blocks(window, channels, blocks)


def _in_columns(c: Convolution, matrix: Matrix) -> Iterator[Window]:
    """With images once for each column of taps, all that are read of a block in the nearest cache."""
    _, high, wide = c.results
    channels, most = c.channels // c.window.groups, _most_vectors(matrix.bits)
    known = c.window.images != (0, 0, 0) and not c.window.pointwise
    if not known or matrix.bits < 512 or c.window.stride[2] > 2 or c.window.kernel[2] > _COLUMNS:
        return
    across = -(-wide // matrix.lanes)  # whole rows: lines that two tiles share would be read and written twice
    across = -(-across // -(-across // most))
    for rows in range(1, min(high, most // across) + 1):
        window = replace(c.window, vectors=rows * across, across=across)
        near = int(_NEAR * matrix.l1d / _channel_bytes(window, matrix))
        if near:
            yield _in_blocks(window, channels, -(-channels // near))


def _in_blocks(window: Window, channels: int, blocks: int) -> Window:
    least = 1 if window.taps > 1 else 2  # columns of a block of the weight
    return replace(window, channels=max(least, -(-channels // blocks)))


def _channel_bytes(window: Window, matrix: Matrix) -> int:
    """Those that a tile reads of a channel."""
    return window.kernel[0] * len(window.phases) * window.width(matrix.lanes) * matrix.bits // 8 // matrix.lanes


def _needed(convolution: Convolution, lanes: int) -> int:
    """Vectors that an image would fill; of one whose size is open, along what a tile is longer."""
    window, (_, high, wide) = convolution.window, convolution.results
    if window.pointwise:
        return -(-prod(convolution.results) // lanes)
    if window.strip is None:
        return -(-window.span // lanes)
    return high if window.kernel[1] > 1 else -(-wide // lanes)


def _vectors(needed: int, bits: int, pointwise: bool) -> int:
    """How many in registers for images of so many: all of them, or else as many as take least time with what is left over.

    Many vectors of a k x k window would have a block of few channels.
    """
    most = _most_vectors(bits) if pointwise else 8 if bits == 512 else 4
    if needed <= most:
        return needed if needed < 3 or pointwise else max(4, needed)
    if pointwise:
        return min(range(4, min(most, 8) + 1), key=lambda v: (-(-needed // v) * v, -v))
    once, each = _nonzero(bits, pointwise, False)
    return min(range(4, most + 1), key=lambda v: -(-needed // v) * (once + each * v))


def _most_vectors(bits: int) -> int:
    """Those of sums that registers hold beside what they are made of."""
    return ((32 if bits == 512 else 16) - 6) // 2


def _nonzero(bits: int, pointwise: bool, aligned: bool) -> tuple[float, float]:
    """Cycles that it takes, and for each vector of pixels."""
    if aligned:
        return _ALIGNED
    once, each = _NONZERO
    return once, each if pointwise or bits < 512 else _ACROSS


def gain_of(convolution: Convolution, density: float | None = None) -> float:
    """How many times as fast as dense it is predicted to be, with a weight of this density (its own by default)."""
    return dense_us(convolution) / ours_us(convolution, density)


def ours_us(convolution: Convolution, density: float | None = None) -> float:
    """Microseconds that our kernel takes, with a weight of this density (its own by default)."""
    c, pixels = convolution, convolution.pixels
    if c.compact:
        return _compact_us(c)
    matrix = replace(matrix_of(c), density=c.weight.density if density is None else density)
    kernel_us, us = kernel_us_of(c, density), 0.0
    if c.instead is not None and prod(c.instead.stride) > 1:  # what comes out is interleaved
        us += device_of(c.weight.device).transpose_us(c.m * pixels * c.weight.dtype.itemsize)
    if c.x.meta["val"].stride()[1] == 1 != c.x.meta["val"].shape[1]:  # channels last: it is copied, and what reads the result
        us += device_of(c.weight.device).transpose_us((c.channels + c.m) * pixels * c.weight.dtype.itemsize)
    if not c.depthwise:
        us += _renewal_us(c, matrix.density if arrangement_of(c.weight.evaluate) is not None else 1.0) * torch.get_num_threads()
    return kernel_us + us / torch.get_num_threads()


def kernel_us_of(convolution: Convolution, density: float | None = None) -> float:
    """Microseconds that a call of its kernel takes, measured or predicted, for a weight of this density (else its own)."""
    c = convolution
    if c.kernel_us is not None and density is None:
        return c.kernel_us
    matrix = replace(matrix_of(c), density=c.weight.density if density is None else density)
    cycles = _depthwise_cycles(matrix, c.window, *c.results[1:]) if c.depthwise else _cycles(matrix, c.window, c.results)
    us = c.images * cycles / this_machine().speeds[matrix.element].cycles_a_us("rowpairs", c.pixels)
    return us / torch.get_num_threads() + this_machine().call_us


def _renewal_us(convolution: Convolution, share: float) -> float:
    """The same of taking over so many of a weight's values, which in training are new at every step."""
    c = convolution
    return device_of(c.weight.device).renewal_us(int(c.m * c.k * share)) if in_training(c.node.graph) else 0.0


def _compact_us(convolution: Convolution) -> float:
    """The same of torch's own, of what is left: what it reads and gives is copied, and reordered."""
    c, copied_us = convolution, device_of(convolution.weight.device).transpose_us
    assert c.occupied is not None
    filters, channels = c.occupied
    share = filters * channels * c.window.taps / (c.m * c.k)
    bytes_ = (channels + c.m) * c.pixels * c.weight.dtype.itemsize
    copied = copied_us(bytes_) / torch.get_num_threads() + _renewal_us(c, 1.0)
    return dense_us(c) * share * _SMALLER + copied + 2 * this_machine().call_us


def dense_us(convolution: Convolution) -> float:
    """Microseconds that it takes dense, channels innermost: measured, or predicted where that may not be."""
    c = convolution
    if (measured := _measured_us(c.dense_node)) is not None:
        return measured * c.share if c.dense_node is c.node else measured
    if not c.depthwise:
        return predicted(c, c.pixels, 1.0).dense_us * c.share
    matrix, tokens = matrix_of(c), c.pixels
    cycles = matrix.rows / matrix.lanes * tokens * (_STORE + _DENSE_TAP * c.window.taps)
    return cycles / this_machine().speeds[matrix.element].cycles_a_us("rowpairs", tokens) / torch.get_num_threads()


def planar_us(node: fx.Node) -> float | None:
    """What a convolution takes dense with pixels innermost, in what it reads and writes; None where that is not measured."""
    return _measured_us(node, planar=True)


def innermost_us(node: fx.Node) -> float | None:
    """The same with channels innermost."""
    return _measured_us(node)


def measurable(node: fx.Node) -> tuple[Any, ...] | None:
    """What torch_us takes for a convolution: shapes of images and kernels, their type, and how. None if it is not measured."""
    x, w = (each.meta["val"] for each in node.all_input_nodes[:2])
    if not x.is_cpu or x.dtype not in FLOATS:
        return None
    sizes = [hint(n) for n in x.shape]
    if None in sizes:
        return None
    return [n or 1 for n in sizes], tuple(map(int, w.shape)), x.dtype, *node.args[3:]


def _measured_us(node: fx.Node, *, planar: bool = False) -> float | None:
    given = measurable(node)
    return None if given is None else torch_us(*given, planar=planar)


def _depthwise_cycles(matrix: Matrix, window: Window, height: int, width: int) -> float:
    """Per channel what is set up; per vector of pixels its taps, bound by multiply-adds or loads, and the epilogue."""
    across = -(-width // matrix.lanes)
    return matrix.rows * (_PLANE + across * height * (_STORE + _TAP * window.stride[2] * window.taps))


def _cycles(matrix: Matrix, window: Window, results: Sizes) -> float:
    """Per tile of v vectors: nnz c(v), bound by loads; for each row of a block its start and end; for each row of the weight v
    vectors through the epilogue; and what is packed of each channel. A tile has the rows and channels of one group."""
    v, lanes = window.vectors, matrix.lanes
    channels = matrix.columns // window.taps
    read = channels * window.kernel[0] * sum(window.vectors_of(phase, lanes) for phase in window.phases)
    pack = read * (_GATHER if window.gathers(lanes) else _PACK)
    block = _ROW + (_RESUMED * v if window.across else 0.0)
    rows = matrix.rows / window.groups * (block * -(-channels // window.channels) + _STORE * v)
    once, vector = _nonzero(matrix.bits, window.pointwise, window.across > 0)
    each = matrix.nonzeros / window.groups * (once + vector * v) + rows + pack
    return _tiles(window, lanes, results) * window.groups * each


def _tiles(window: Window, lanes: int, results: Sizes) -> int:
    """Those of an image or volume."""
    depth, high, wide = results
    if window.pointwise:
        return -(-prod(results) // (window.vectors * lanes))
    if window.strip is None:
        return depth * -(-window.span // (window.vectors * lanes))
    return depth * -(-high // window.strip[0]) * -(-wide // (window.strip[1] * lanes))


def find(
    graph: fx.Graph, values: Mapping[fx.Node, torch.Tensor], instead: Mapping[fx.Node, Alternative]
) -> list[tuple[fx.Node, Convolution | str]]:
    """The convolutions whose weight is computed from static tensors, or why no kernel computes one, in order; those that stand
    for something else of torch's are keys of `instead`."""
    known = dict(values)
    static = computed_from(graph, known)
    nodes = [n for n in graph.nodes if n.target is aten.convolution.default and n.args[1] in static and n.users]
    return [(node, _convolution(node, known, instead.get(node))) for node in nodes]


def _convolution(node: fx.Node, values: dict[fx.Node, torch.Tensor], instead: Alternative | None) -> Convolution | str:
    given: Any = node.args
    x, w, _, stride, padding, dilation, transposed, _, groups = given
    image, kernel = x.meta["val"], w.meta["val"].shape
    if transposed:
        return "the sizes of its kernel are not known while it is compiled"
    if image.dim() != len(kernel):
        return "no sparse kernel for a convolution of a single image without a batch"
    if not all(isinstance(n, int) for n in (*kernel, *stride, *padding, *dilation)):
        return "the sizes of its kernel are not known while it is compiled"
    before, after = list(padding), list(padding)
    around = _zeros_around(x, len(padding))
    if around is not None:
        x, before, after = x.args[0], *([a + b for a, b in zip(p, padding, strict=True)] for p in around)
    depthwise = groups != 1 and groups == kernel[0] == image.shape[1] and len(kernel) < 5 and stride[-1] < 3
    window = Window(_sizes(kernel[2:], 1), _sizes(stride, 1), _sizes(dilation, 1), _sizes(before, 0), _sizes(after, 0))
    sizes = x.meta["val"].shape[2:]
    if not depthwise:
        known = not window.pointwise and all(isinstance(n, int) for n in sizes)
        window = replace(window, images=_sizes(sizes, 1) if known else (0, 0, 0), groups=groups)
    m, k = kernel[0], kernel[1] * window.taps
    matrix = Emitter(node)(aten.reshape.default, w, [m, k])
    weight = weight_behind(matrix, values)
    node.graph.erase_node(matrix)
    if weight is None or weight.transposed or 0 in weight.shape:
        return "its weight cannot be seen as a matrix"
    found = Convolution(
        node, x, weight, "left", m, k, None, 1, 1, window=window, depthwise=depthwise, padded=around is not None,
        instead=instead,
    )  # fmt: skip
    if depthwise:
        return found
    simple = groups == 1 and (instead is None or prod(instead.stride) == 1) and weight.density < 1
    occupied = _occupied(weight, window, values) if simple else None
    return replace(found, window=planned(found), occupied=occupied)


def _occupied(weight: Weight, window: Window, values: Mapping[fx.Node, torch.Tensor]) -> tuple[int, int] | None:
    """How many filters and channels are not zeros altogether; None if none is."""
    given = run(weight.evaluate, [values[leaf] for leaf in weight.leaves])
    taken = (given != 0).view(weight.shape[0], -1, window.taps).any(-1)
    filters, channels = (int(taken.any(axis).sum()) for axis in (1, 0))
    return (filters, channels) if filters * channels < taken.numel() else None


def _zeros_around(x: fx.Node, dims: int) -> tuple[list[int], list[int]] | None:
    """How many an input has along each of its last dimensions, before and after them, if that is all that was done to it."""
    if x.target is not aten.constant_pad_nd.default:
        return None
    given: Any = x.args
    _, around, *value = given
    if any(value) or len(around) > 2 * dims or not all(isinstance(n, int) and n >= 0 for n in around):
        return None
    whole = [*around, *[0] * (2 * dims - len(around))]  # from the last dimension on
    return whole[-2::-2], whole[::-2]


def _sizes(numbers: Any, missing: int) -> Sizes:
    """Along depth, height and width."""
    depth, height, width = [missing] * (3 - len(numbers)) + list(numbers)
    return depth, height, width
