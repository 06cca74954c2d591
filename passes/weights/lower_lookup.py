"""lower-lookup: lowers a `kernel.spmm` of the schedule "lookup" to loops that look x up in registers, for a few tokens.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "lookup", tile = [4], ...} : ... tensor<..., "windows(...)">
after    scf.parallel (%task) = ...                    // chunks of the weight's rows
           for each 4 tokens: func.call @region_rows4  // or _rows3, _rows2, _rows1 for the last tokens
         func.func private @region_rows4(...)
           copy the tokens of x into the workspace, widened to the type of the sums and padded with zeros
           for each group of 16 rows:
             scf.for each run ... iter_args(1 vector a token)   // of 3 steps, then of 2, in one window of x
               low, high = x[token][origin..origin + 16], x[token][origin + 16..origin + 32]
               3 times: vector.fma(values[step..], permute(low, high, places[step..]), sums)
             the sums of the 16 rows go through the epilogue into y

The loops need no gathers from memory and no reductions over lanes. A place without a nonzero looks up 0, so that an infinity or
a NaN in x only reaches rows that use it. Runs on functions whose storage is exposed (expose-storage).

Fastest for a few tokens: 4.0 times as fast as the next one, "broadcast", at "768x3072 70% 1 token" in
benchmarks/results/amd-epyc-znver4/prediction.json.
"""

from dataclasses import dataclass
from functools import partial

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, memref, scf, vector

from gossamer.dialects.elements import FLOATS, WEIGHTS
from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing, Windows
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.inner_loop import added_up
from gossamer.passes.loops.product import Operands, products
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, vector_of, widened, zeros
from gossamer.passes.weights.few_tokens import FewTokens, TokenRows

_TOKENS = {16: 4, 8: 2}  # tokens that share the loads of a step, by lanes: as many as fit into the registers
_FEW = 8  # most tokens for which it may be the fastest
_STEP, _TOKEN, _GROUP = 1.3, 1.6, 100.0  # cycles, see _cycles
_SKEWED = 0.4  # relative surplus of a skewed row's nonzeros in the blocks where it has most
_PERMUTE = {  # instructions that look up lanes of two registers, or of one
    ("f32", 16): "llvm.x86.avx512.vpermi2var.ps.512",
    ("f64", 8): "llvm.x86.avx512.vpermi2var.pd.512",
    ("f32", 8): "llvm.x86.avx2.permps",
}


def _storage(matrix: Matrix) -> Windows | None:
    """Returns windows of two registers of x; None if no instruction looks such lanes up."""
    sums = FLOATS[matrix.element].sums
    return Windows(matrix.reduction, matrix.lanes) if (sums, matrix.lanes) in _PERMUTE else None


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens]."""
    return (_TOKENS[matrix.lanes],) if stored == _storage(matrix) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of all tiles. A tile of t tokens takes the sum of

    - 1.3 for the loads of each step,
    - 1.6 t for its permutations and multiply-adds, or 3.2 t if a permutation reads only one register,
    - 100 for each group of rows,
    - K t / L for the copy of x.
    """
    lanes, steps = matrix.lanes, _steps(matrix)
    groups, blocks = -(-matrix.rows // lanes), -(-matrix.columns // lanes)
    a_token = _TOKEN if matrix.bits == 512 else 2 * _TOKEN
    widest = _TOKENS[lanes]
    full, left = divmod(tokens, widest)
    tiles = [widest] * full + ([left] if left else [])
    return sum(steps * (_STEP + a_token * t) + _GROUP * groups + blocks * t for t in tiles)


def _steps(matrix: Matrix) -> float:
    return steps_of(matrix, matrix.lanes, 0 if matrix.evenly(matrix.lanes, matrix.lanes) else 1)


def steps_of(matrix: Matrix, lanes: int, uneven: int) -> float:
    """Returns the steps of all groups of `lanes` rows.

    A block of L columns has c = L density nonzeros of a row, times the skew of the longest row of a group. Since nonzeros may
    move to neighbouring windows (runtime/packers/windows.py), a block takes c + `uneven` steps.
    """
    longest = matrix.longest_of(lanes)
    share = matrix.density * longest * (1 + _SKEWED * min(1.0, longest - 1))
    return -(-matrix.rows // lanes) * -(-matrix.columns // lanes) * (min(share, 1.0) * lanes + uneven)


def bytes_of(matrix: Matrix, lanes: int, steps: float) -> float:
    """Returns the bytes of the values and their places, with padding."""
    return steps * lanes * (WEIGHTS[matrix.element].bytes + 1)


LOOKUP = Family("lookup", _storage, _tile, _cycles, most=_FEW, read=lambda m: bytes_of(m, m.lanes, _steps(m)))


@dataclass(frozen=True)
class LowerLookup:
    """Lower products that look x up in registers to scf and vector."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, LOOKUP.name):
            lanes, sums = ir.IntegerAttr(op.lanes).value, op.epilogue.blocks[0].arguments[0].type
            if (str(sums), lanes) not in _PERMUTE:
                raise CompileError(f"no instruction looks up {lanes} lanes of {sums}")
            size = ir.RankedTensorType(op.x.type).shape[1]
            lookup = InWindows(op, (-(-size // lanes) + 1) * lanes)  # a window may begin with the last block
            widths = list(range(lookup.tokens, 0, -1))
            lookup.lower(module, widths, partial(_emit_rows, lookup))


class InWindows(FewTokens):
    """A product of a weight in `Windows`. Its groups of rows take different numbers of steps."""

    def work_before(self, row: ir.Value) -> ir.Value:
        """Counts steps. To start and end a group costs about as much as 32 of them."""
        bounds, values = self.buffers[1], self.buffers[self.components]
        group, last = arith.ceildivui(row, index(self.unit)), index(self.groups - 1)
        all_steps = arith.divui(memref.dim(values, index(0)), index(self.unit))
        before = load_index(bounds, arith.muli(arith.minui(group, last), index(4)))
        steps = arith.select(arith.cmpi(arith.CmpIPredicate.ugt, group, last), all_steps, before)
        return arith.addi(steps, arith.muli(group, index(32)))


def _emit_rows(lookup: FewTokens, count: int, operands: Operands) -> None:
    _Rows(lookup, count, operands).emit()


class _Rows(TokenRows):
    """Emits the body of a function that computes `count` tokens."""

    def __init__(self, lookup: FewTokens, count: int, operands: Operands) -> None:
        super().__init__(lookup, count, operands)
        self.bounds, self.origins, self.places, self.values = operands.weight
        # With one or two tokens, several sets of sums take turns, to hide the latency of a multiply-add.
        self.ways = {1: 3, 2: 2}.get(count, 1)

    def emit(self) -> None:
        x = self.copy_of_x()
        with loop(self.operands.low, self.operands.high, index(1)) as groups:
            group = groups.induction_variable
            step, first, middle, end = (
                load_index(self.bounds, arith.addi(arith.muli(group, index(4)), index(i))) for i in range(4)
            )
            carried = [arith.muli(step, index(self.lanes)), *[zeros(self.vec)] * (self.count * self.ways)]
            for steps, low, high in zip(Windows.RUNS, (first, middle), (middle, end), strict=True):
                with loop(low, high, index(1), carried) as runs:
                    at, *sums = runs.inner_iter_args
                    scf.YieldOp(self._run(x, steps, runs.induction_variable, at, sums))
                carried = list(runs.results)
            _, *sums = carried
            self.store(arith.muli(group, index(self.lanes)), added_up(sums, self.count))

    def _run(self, x: ir.Value, steps: int, run: ir.Value, at: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the place after the `steps` steps of a run, and the sums plus their products."""
        origin = arith.muli(load_index(self.origins, run), index(self.lanes))
        after = arith.addi(origin, index(self.lanes))
        windows = [
            (vector.load(self.vec, x, [index(t), origin]), vector.load(self.vec, x, [index(t), after]))
            for t in range(self.count)
        ]
        stored = vector_of(self.lanes, ir.MemRefType(self.values.type).element_type)
        for step in range(steps):
            here = arith.addi(at, index(step * self.lanes))
            weights = widened(vector.load(stored, self.values, [here]), self.vec)
            used, places = self._places(here)
            first = step % self.ways * self.count
            for t, (low, high) in enumerate(windows):
                found = arith.select(used, self._permute(low, high, places), zeros(self.vec))
                sums[first + t] = vector.fma(weights, found, sums[first + t])
        return [arith.addi(at, index(steps * self.lanes)), *sums]

    def _places(self, here: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns which lanes have a nonzero, and the places of their columns in the window."""
        i8, wide = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(8 * byte_width(self.product.sum_type))
        narrow = vector_of(self.lanes, i8)
        places = vector.load(narrow, self.places, [here])
        none = arith.constant(narrow, ir.DenseElementsAttr.get_splat(narrow, ir.IntegerAttr.get(i8, 0)))
        used = arith.cmpi(arith.CmpIPredicate.slt, places, none)
        return used, arith.extui(vector_of(self.lanes, wide), places)

    def _permute(self, low: ir.Value, high: ir.Value, places: ir.Value) -> ir.Value:
        """Returns a vector whose lane i is lane places[i] (modulo their number) of `low` followed by `high`."""
        name = _PERMUTE[str(self.product.sum_type), self.lanes]
        if "2var" in name:
            return llvm.call_intrinsic(self.vec, name, [low, places, high], [], [])
        halves = [llvm.call_intrinsic(self.vec, name, [half, places], [], []) for half in (low, high)]
        one = arith.constant(places.type, ir.DenseElementsAttr.get_splat(places.type, _integer(places, self.lanes)))
        zero = arith.constant(places.type, ir.DenseElementsAttr.get_splat(places.type, _integer(places, 0)))
        in_low = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(places, one), zero)
        return arith.select(in_low, *halves)


def _integer(like: ir.Value, value: int) -> ir.IntegerAttr:
    return ir.IntegerAttr.get(ir.VectorType(like.type).element_type, value)
