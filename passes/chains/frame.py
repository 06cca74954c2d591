"""Gives the bodies of stages access to the memory of a tile."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.passes.chains.plan_chain import Tiled
from gossamer.passes.loops.epilogue import Read, reads_tokens
from gossamer.passes.loops.queries import dims
from gossamer.passes.loops.vectors import index, narrowed, widened


@dataclass(frozen=True)
class Frame:
    """The data of a stage's body.

    vec, vectors  type of the vectors, and their number in a row of the tile
    buffers       the memory of each value of the tile
    outside       the memrefs of each operand from outside of the tile
    low, high     the parts [low, high) of the stage
    start         the first token; None for 0
    """

    vec: ir.VectorType
    vectors: int
    buffers: dict[Tiled, ir.Value]
    outside: dict[ir.Value, tuple[ir.Value, ...]]
    low: ir.Value
    high: ir.Value
    start: ir.Value | None = None

    @property
    def lanes(self) -> int:
        """Number of tokens in a vector."""
        return self.vec.shape[0]

    def at(self, v: int) -> ir.Value:
        """Returns the place where vector v of a row begins."""
        within = index(v * self.lanes)
        return within if self.start is None else arith.addi(self.start, within)

    def load(self, value: ir.Value, row: ir.Value, v: int) -> ir.Value:
        """Loads vector v of a row of a value of the tile."""
        return vector.load(self.vec, self.buffers[value], [row, self.at(v)])

    def store(self, vector_: ir.Value, value: ir.Value, row: ir.Value, v: int) -> None:
        """Stores vector v of a row of a value of the tile, from any float type."""
        vector.store(widened(vector_, self.vec), self.buffers[value], [row, self.at(v)])

    def reader(self, row: ir.Value, v: int, known: Mapping[ir.Value, ir.Value]) -> Read:
        """Returns the kernel.read for lanes that are tokens, of feature `row`. `known` has values that are computed already."""

        def read(op: ir.Operation, type_: ir.VectorType) -> ir.Value:
            if op.results[0] in known:
                return known[op.results[0]]
            source, positions = op.operands[0], dims(ir.AffineMapAttr(op.attributes["map"]).value)
            if reads_tokens(op):
                return narrowed(self.load(source, index(0) if positions[1] is None else row, v), type_)
            (buffer,) = self.outside[source]
            at = [index(0) if d is None else row for d in positions]
            return vector.broadcast(type_, memref.load(buffer, at))

        return read
