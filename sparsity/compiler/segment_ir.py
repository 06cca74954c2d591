"""Contract IR of the operations on segments, built for any sizes: see segments.py for what they compute."""

from collections.abc import Callable, Sequence

import torch
from torch_mlir import ir
from torch_mlir.dialects import arith, math

from gossamer.dialects.kernel import ReadOp, end
from gossamer.dialects.open_ops import SegmentMapOp, SegmentReduceOp
from gossamer.passes.framework.context import building
from gossamer.passes.loops.scalars import Scalars
from gossamer.sparsity.compiler.op_ir import element_of, function_of

_KINDS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}


def reduce(positions: torch.dtype, dtype: torch.dtype, kind: str) -> str:
    """[segments]: "sum", "prod", "amax" or "amin" of each segment."""

    def build(on: "Segments", x: ir.Value) -> ir.Value:
        total = on.reduce(_KINDS[kind], lambda: on.entry(x))
        return total if on.exact else on.map("segment", lambda: on.narrowed(on.segment(total)))

    return on_segments(positions, [dtype], build)


def softmax(positions: torch.dtype, dtype: torch.dtype, log: bool) -> str:
    """[entries]: exp(x - max) / sum, or x - (max + log(sum))."""

    def build(on: "Segments", x: ir.Value) -> ir.Value:
        highest = on.reduce("max", lambda: on.entry(x))
        weights = on.map("entry", lambda: math.exp(arith.subf(on.entry(x), on.segment(highest))), wide=True)
        total = on.reduce("add", lambda: on.entry(weights))
        if log:
            shift = on.map("segment", lambda: arith.addf(on.segment(highest), math.log(on.segment(total))), wide=True)
            return on.map("entry", lambda: on.narrowed(arith.subf(on.entry(x), on.segment(shift))))
        share = on.map("segment", lambda: arith.divf(on.number(1), on.segment(total)), wide=True)
        return on.map("entry", lambda: on.narrowed(arith.mulf(on.entry(weights), on.segment(share))))

    return on_segments(positions, [dtype], build)


def softmax_backward(positions: torch.dtype, dtype: torch.dtype, log: bool) -> str:
    """[entries] of grad and output y: y * (grad - sum(grad * y)), or grad - exp(y) * sum(grad)."""

    def build(on: "Segments", grad: ir.Value, y: ir.Value) -> ir.Value:
        if log:
            total = on.reduce("add", lambda: on.entry(grad))
            return on.map(
                "entry",
                lambda: on.narrowed(arith.subf(on.entry(grad), arith.mulf(math.exp(on.entry(y)), on.segment(total)))),
            )
        total = on.reduce("add", lambda: arith.mulf(on.entry(grad), on.entry(y)))
        return on.map("entry", lambda: on.narrowed(arith.mulf(on.entry(y), arith.subf(on.entry(grad), on.segment(total)))))

    return on_segments(positions, [dtype, dtype], build)


class Segments:
    """Builds ops on segments; `entry`, `segment` and `narrowed` are for their bodies."""

    def __init__(self, positions: ir.Value, element: ir.Type) -> None:
        self.positions, self.scalars = positions, Scalars(element)
        self.exact = self.scalars.wide == element
        self.narrowed = self.scalars.narrowed

    def reduce(self, kind: str, body: Callable[[], ir.Value]) -> ir.Value:
        """A value a segment, of the wide type."""
        op = SegmentReduceOp(self.positions, ir.StringAttr.get(kind), result=_vector(self.scalars.wide))
        return self._filled(op, body)

    def map(self, each: str, body: Callable[[], ir.Value], wide: bool = False) -> ir.Value:
        """A value an entry or a segment."""
        element = self.scalars.wide if wide else self.scalars.element
        return self._filled(SegmentMapOp(self.positions, ir.StringAttr.get(each), result=_vector(element)), body)

    def entry(self, tensor: ir.Value) -> ir.Value:
        """The wide element of an [entries] tensor."""
        return self._read(tensor, 1)

    def segment(self, tensor: ir.Value) -> ir.Value:
        """The wide element of a [segments] tensor."""
        return self._read(tensor, 0)

    def number(self, value: float) -> ir.Value:
        """A wide constant."""
        return arith.constant(self.scalars.wide, float(value))

    def _read(self, tensor: ir.Value, dim: int) -> ir.Value:
        map_ = ir.AffineMapAttr.get(ir.AffineMap.get(2, 0, [ir.AffineDimExpr.get(dim)]))
        element = ir.RankedTensorType(tensor.type).element_type
        return self.scalars.widened(ReadOp(tensor, map_, result=element).result)

    def _filled(self, op: SegmentReduceOp | SegmentMapOp, body: Callable[[], ir.Value]) -> ir.Value:
        with ir.InsertionPoint(ir.Block.create_at_start(op.body, [], [])):
            end(body())
        return op.result


def on_segments(positions: torch.dtype, dtypes: Sequence[torch.dtype], build: Callable[..., ir.Value]) -> str:
    """A module with one function of positions and [entries] tensors, which returns what `build` computes from them."""
    with building():
        element = element_of(dtypes[0])
        types = [_vector(ir.IntegerType.get_signless(positions.itemsize * 8)), *(_vector(element) for _ in dtypes)]
        return function_of(types, lambda first, *values: [build(Segments(first, element), *values)])


def _vector(element: ir.Type) -> ir.RankedTensorType:
    return ir.RankedTensorType.get([ir.ShapedType.get_dynamic_size()], element)
