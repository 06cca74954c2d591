"""Reductions of values on vectors, for lower-segments and lower-reduce-edges."""

from torch_mlir import ir
from torch_mlir.dialects import arith, vector

from gossamer.passes.loops.vectors import byte_width, vector_of

OPS = ("kernel.segment_reduce", "kernel.segment_map")


def of_entries(op: ir.Operation) -> bool:
    """Whether an op gives one value for each entry."""
    return op.name == "kernel.segment_map" and ir.StringAttr(op.attributes["each"]).value == "entry"


def number(element: ir.Type, value: float) -> ir.Attribute:
    """Returns a constant of a float or integer type."""
    return ir.FloatAttr.get(element, value) if isinstance(element, ir.FloatType) else ir.IntegerAttr.get(element, int(value))


class Reduction:
    """The reduction of an op with a `kind`. It keeps NaNs, and may add in any order."""

    def __init__(self, op: ir.Operation, lanes: int) -> None:
        self.kind = ir.StringAttr(op.attributes["kind"]).value
        self.element = ir.RankedTensorType(op.results[0].type).element_type
        self.floating = isinstance(self.element, ir.FloatType)
        self.type = vector_of(lanes, self.element)

    def start(self) -> ir.Value:
        """Returns a vector of the neutral element."""
        bound = float("inf") if self.floating else (1 << (byte_width(self.element) * 8 - 1))
        lowest, highest = -bound, bound if self.floating else bound - 1
        neutral = {"add": 0, "mul": 1, "max": lowest, "min": highest}[self.kind]
        return arith.constant(self.type, ir.DenseElementsAttr.get_splat(self.type, number(self.element, neutral)))

    def combine(self, left: ir.Value, right: ir.Value) -> ir.Value:
        """Combines two vectors lane by lane."""
        floats = {"add": arith.addf, "mul": arith.mulf, "max": arith.maximumf, "min": arith.minimumf}
        integers = {"add": arith.addi, "mul": arith.muli, "max": arith.maxsi, "min": arith.minsi}
        return (floats if self.floating else integers)[self.kind](left, right)

    def across(self, values: ir.Value) -> ir.Value:
        """Combines the lanes of a vector into one value."""
        suffix = {"max": "imumf" if self.floating else "si", "min": "imumf" if self.floating else "si"}.get(self.kind, "")
        kind = ir.Attribute.parse(f"#vector.kind<{self.kind}{suffix}>")
        order = ir.Attribute.parse("#arith.fastmath<reassoc>") if self.floating and not suffix else None
        return vector.reduction(self.element, kind, values, fastmath=order)
