"""Builds contract IR of the operations on segments, for any sizes. segments.py describes the operations."""

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
    """Returns the IR of "sum", "prod", "amax" or "amin" of each segment, [segments]."""

    def build(on: "Segments", x: ir.Value) -> ir.Value:
        total = on.reduce(_KINDS[kind], lambda: on.entry(x))
        return total if on.exact else on.map("segment", lambda: on.narrowed(on.segment(total)))

    return on_segments(positions, [dtype], build)


def softmax(positions: torch.dtype, dtype: torch.dtype, log: bool) -> str:
    """Returns the IR of exp(x - max) / sum, or x - (max + log(sum)), [entries]."""

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
    """Returns the IR of y * (grad - sum(grad * y)), or grad - exp(y) * sum(grad), [entries], for the output y."""

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
    """Builds ops on segments. Their bodies use `entry`, `segment` and `narrowed`."""

    def __init__(self, positions: ir.Value, element: ir.Type) -> None:
        self.positions, self.scalars = positions, Scalars(element)
        self.exact = self.scalars.wide == element
        self.narrowed = self.scalars.narrowed

    def reduce(self, kind: str, body: Callable[[], ir.Value]) -> ir.Value:
        """Builds an op that computes a value of the wide type for each segment."""
        op = SegmentReduceOp(self.positions, ir.StringAttr.get(kind), result=_vector(self.scalars.wide))
        return self._filled(op, body)

    def map(self, each: str, body: Callable[[], ir.Value], wide: bool = False) -> ir.Value:
        """Builds an op that computes a value for each entry or segment."""
        element = self.scalars.wide if wide else self.scalars.element
        return self._filled(SegmentMapOp(self.positions, ir.StringAttr.get(each), result=_vector(element)), body)

    def entry(self, tensor: ir.Value) -> ir.Value:
        """Reads the element of an [entries] tensor, in the wide type."""
        return self._read(tensor, 1)

    def segment(self, tensor: ir.Value) -> ir.Value:
        """Reads the element of a [segments] tensor, in the wide type."""
        return self._read(tensor, 0)

    def number(self, value: float) -> ir.Value:
        """Returns a constant of the wide type."""
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
    """Returns a module with one function of positions and [entries] tensors. `build` makes its result."""
    with building():
        element = element_of(dtypes[0])
        types = [_vector(ir.IntegerType.get_signless(positions.itemsize * 8)), *(_vector(element) for _ in dtypes)]
        return function_of(types, lambda first, *values: [build(Segments(first, element), *values)])


def _vector(element: ir.Type) -> ir.RankedTensorType:
    return ir.RankedTensorType.get([ir.ShapedType.get_dynamic_size()], element)
