"""lower-planes: lowers a `kernel.spmm` of the schedule "planes" to loops that look up the bytes of x, for a single token.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "planes", tile = [1], ...}
             : (..., tensor<..., "windows(reduction=1, lanes=64)">) -> ...
after    scf.parallel (%task) = ...                    // chunks of the weight's rows
           for each token: func.call @region_rows1
         func.func private @region_rows1(...)
           copy x into the workspace as planes: the lowest bytes of all columns, the next ones, ...
           for each group of 64 rows:
             scf.for each run ... iter_args(4 vectors)  // of 3 steps, then of 2, in one window of 128 columns
               low, high = plane[origin..origin + 64], plane[origin + 64..origin + 128]   // for each of the 4 planes
               3 times: permute(low, high, places[step..])   // for each plane: the bytes of 64 values of x
                        join them to 4 vectors; vector.fma with values[step..] and the sums
             the sums of the 64 rows go through the epilogue into y

Compared with lower-lookup, a window has four times as many columns, but a vector of x takes three instructions instead of one.
Wider windows even out the rows better: at a density of 5 % there is half as much padding, which has to be read too. A place
without a nonzero looks up 0, so that an infinity or a NaN in x only reaches rows that use it. Runs on functions whose storage
is exposed (expose-storage).

Fastest for a single token on CPUs that look up bytes: 1.29 times as fast as "lookup" at "768x3072 80% 1 token" in
benchmarks/results/intel-xeon-graniterapids/prediction.json.
"""

from dataclasses import dataclass
from functools import partial

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing, Windows
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.encodings import storage_of_type
from gossamer.passes.loops.product import Operands, products
from gossamer.passes.loops.vectors import index, load_index, loop, mask_of, vector_of, widened, zeros
from gossamer.passes.weights.few_tokens import TokenRows
from gossamer.passes.weights.lower_lookup import InWindows, bytes_of, steps_of

_ROWS = 64  # rows of a group: one for each byte of a vector
_BYTES = 4  # bytes of a sum
_STEP, _GROUP, _PLANES = 10.5, 100.0, 0.3  # cycles, see _cycles
_PERMUTE = "llvm.x86.avx512.vpermi2var.qi.512"


def _storage(matrix: Matrix) -> Windows | None:
    """Returns windows of two registers of bytes; None if no instruction looks them up."""
    able = matrix.bits == 512 and matrix.element != "f64" and "avx512vbmi" in matrix.features
    return Windows(matrix.reduction, _ROWS) if able else None


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens]."""
    return (1,) if stored == _storage(matrix) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles. A token takes 10.5 for each step, 100 for each group of rows, and 0.3 K for the planes."""
    groups = -(-matrix.rows // _ROWS)
    return tokens * (_STEP * _steps(matrix) + _GROUP * groups + _PLANES * matrix.columns)


def _steps(matrix: Matrix) -> float:
    return steps_of(matrix, _ROWS, 2)


PLANES = Family("planes", _storage, _tile, _cycles, most=1, read=lambda m: bytes_of(m, _ROWS, _steps(m)))


@dataclass(frozen=True)
class LowerPlanes:
    """Lower products that look up the bytes of x to scf and vector."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, PLANES.name):
            stored, size = storage_of_type(ir.RankedTensorType(op.w.type)), ir.RankedTensorType(op.x.type).shape[1]
            planes = InWindows(op, (-(-size // _ROWS) + 1) * _ROWS, _ROWS)  # a window may begin with the last block
            if not isinstance(stored, Windows) or (stored.lanes, planes.lanes, str(planes.sum_type)) != (_ROWS, 16, "f32"):
                raise CompileError(f"no instruction looks up {planes.sum_type} for a weight stored as {stored} byte by byte")
            if planes.tokens != 1:
                raise CompileError(f"tile [{planes.tokens}] is not one token")
            planes.lower(module, [1], partial(_emit_row, planes))


def _emit_row(planes: InWindows, count: int, operands: Operands) -> None:
    _Row(planes, count, operands).emit()


class _Row(TokenRows):
    """Emits the body of a function that computes one token."""

    def __init__(self, planes: InWindows, count: int, operands: Operands) -> None:
        super().__init__(planes, count, operands)
        self.bounds, self.origins, self.places, self.values = operands.weight
        self.vectors = _ROWS // self.lanes
        self.byte = ir.IntegerType.get_signless(8)
        self.bytes = vector_of(_ROWS, self.byte)
        self.none = arith.constant(self.bytes, ir.DenseElementsAttr.get_splat(self.bytes, ir.IntegerAttr.get(self.byte, 0)))
        narrow = str(ir.MemRefType(operands.x.type).element_type) == "bf16"
        self.used_planes = range(2, _BYTES) if narrow else range(_BYTES)  # the lower half of a bf16 as f32 is 0

    def emit(self) -> None:
        planes = self._planes()
        with loop(self.operands.low, self.operands.high, index(1)) as groups:
            group = groups.induction_variable
            step, first, middle, end = (
                load_index(self.bounds, arith.addi(arith.muli(group, index(4)), index(i))) for i in range(4)
            )
            carried = [arith.muli(step, index(_ROWS)), *[zeros(self.vec)] * self.vectors]
            for steps, low, high in zip(Windows.RUNS, (first, middle), (middle, end), strict=True):
                with loop(low, high, index(1), carried) as runs:
                    at, *sums = runs.inner_iter_args
                    scf.YieldOp(self._run(planes, steps, runs.induction_variable, at, sums))
                carried = list(runs.results)
            row = arith.muli(group, index(_ROWS))
            for v, total in enumerate(carried[1:]):
                self.store(arith.addi(row, index(v * self.lanes)), [total])

    def _planes(self) -> ir.Value:
        """Writes the bytes of x[first] into the workspace as [4][padded_K]. Returns them."""
        product, x, first = self.product, self.operands.x, self.operands.first
        planes = memref.view(
            ir.MemRefType.get([_BYTES, product.padded_K], self.byte), self.operands.workspace, self.operands.offset, []
        )
        narrow = vector_of(self.lanes, ir.MemRefType(x.type).element_type)
        with loop(index(0), index(product.K), index(_ROWS)) as ks:
            k, vectors = ks.induction_variable, []
            for v in range(self.vectors):
                here = arith.addi(k, index(v * self.lanes))
                left = arith.maxsi(arith.subi(index(product.K), here), index(0))
                loaded = vector.maskedload(narrow, x, [first, here], mask_of(self.lanes, left), zeros(narrow))
                vectors.append(vector.bitcast(self.bytes, widened(loaded, self.vec)))
            for plane in self.used_planes:
                vector.store(_plane(vectors, plane), planes, [index(plane), k])
        for plane in self.used_planes:
            vector.store(self.none, planes, [index(plane), index(product.padded_K - _ROWS)])
        return planes

    def _run(self, planes: ir.Value, steps: int, run: ir.Value, at: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the place after the `steps` steps of a run, and the sums plus their products."""
        origin = arith.muli(load_index(self.origins, run), index(_ROWS))
        ends = (origin, arith.addi(origin, index(_ROWS)))
        windows = {p: [vector.load(self.bytes, planes, [index(p), end]) for end in ends] for p in self.used_planes}
        stored = vector_of(self.lanes, ir.MemRefType(self.values.type).element_type)
        for step in range(steps):
            here = arith.addi(at, index(step * _ROWS))
            places = vector.load(self.bytes, self.places, [here])
            used = arith.cmpi(arith.CmpIPredicate.slt, places, self.none)
            looked_up = [self.none] * _BYTES
            for p, (low, high) in windows.items():
                found = llvm.call_intrinsic(self.bytes, _PERMUTE, [low, places, high], [], [])
                looked_up[p] = arith.select(used, found, self.none)
            for v, x in enumerate(self._floats(looked_up)):
                weights = vector.load(stored, self.values, [arith.addi(here, index(v * self.lanes))])
                sums[v] = vector.fma(widened(weights, self.vec), x, sums[v])
        return [arith.addi(at, index(steps * _ROWS)), *sums]

    def _floats(self, planes: list[ir.Value]) -> list[ir.Value]:
        """Returns the floats with these bytes. The one whose bytes are at place 16 i + 4 v + c is in lane 4 i + c of vector v
        (see Windows)."""
        half = vector_of(_ROWS // 2, ir.IntegerType.get_signless(16))
        low, high = ([vector.bitcast(half, pairs) for pairs in _mixed(*planes[p : p + 2])] for p in (0, 2))
        return [vector.bitcast(self.vec, each) for a, b in zip(low, high, strict=True) for each in _mixed(a, b)]


def _plane(vectors: list[ir.Value], plane: int) -> ir.Value:
    """Returns byte `plane` of each float in these four vectors."""
    picked = list(range(plane, 2 * _ROWS, _BYTES))
    low, high = (vector.shuffle(*pair, picked) for pair in (vectors[:2], vectors[2:]))
    return vector.shuffle(low, high, list(range(_ROWS)))


def _mixed(a: ir.Value, b: ir.Value) -> list[ir.Value]:
    """Interleaves two vectors as x86 instructions do: within each 128 bits, first the lower halves, then the upper ones."""
    size = ir.VectorType(a.type).shape[0]
    part = size // 4
    return [
        vector.shuffle(a, b, [n * size + i * part + half + e for i in range(4) for e in range(part // 2) for n in (0, 1)])
        for half in (0, part // 2)
    ]
