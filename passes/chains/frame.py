"""The memory of a tile, as the bodies of stages see it."""

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
    """What the body of a stage works with: vectors of `vec`, `vectors` of them a row of the tile, from token `start` on; where
    the tile's values and the memory from outside are; the range [low, high) of its parts."""

    vec: ir.VectorType
    vectors: int
    buffers: dict[Tiled, ir.Value]
    outside: dict[ir.Value, tuple[ir.Value, ...]]
    low: ir.Value
    high: ir.Value
    start: ir.Value | None = None

    @property
    def lanes(self) -> int:
        """Tokens in a vector."""
        return self.vec.shape[0]

    def at(self, v: int) -> ir.Value:
        """Where vector v of a row begins."""
        within = index(v * self.lanes)
        return within if self.start is None else arith.addi(self.start, within)

    def load(self, value: ir.Value, row: ir.Value, v: int) -> ir.Value:
        """Vector v of a row of a value of the tile."""
        return vector.load(self.vec, self.buffers[value], [row, self.at(v)])

    def store(self, vector_: ir.Value, value: ir.Value, row: ir.Value, v: int) -> None:
        """The inverse of `load`, for a vector of any float type."""
        vector.store(widened(vector_, self.vec), self.buffers[value], [row, self.at(v)])

    def reader(self, row: ir.Value, v: int, known: Mapping[ir.Value, ir.Value]) -> Read:
        """kernel.read where the lanes are tokens, of feature `row`. What is `known` is computed already."""

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
