"""lower-spmv: every `kernel.spmv` becomes loops that gather x along each row, for one or a few tokens.

before   %y = "kernel.spmv"(%x, %w) ({epilogue}) {lanes = 16, reduction = 1, tokens = 4} : ... tensor<3072x768xf32, #CSR>
after    scf.parallel (%task) = ...                    // chunks of the weight's rows
           for each 4 tokens: func.call @region_rows4  // or _rows2, _rows1 for what is left of the tokens
         func.func private @region_rows4(...)
           for each group of 16 rows, each row:
             scf.for %p step 16 iter_args(1 vector a token)
               vector.fma(values[p..], vector.gather x[token][coordinates[p..]], sums)
             the sums' total                           // 16 rows' totals make a vector of results
           through the epilogue into y

x is read as it lies in memory, nothing is packed. Runs on functions whose storage is exposed (expose-storage). The end of a
row is masked; tokens past the last one repeat it and are not stored.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, func, memref, scf, vector

from gossamer.passes.epilogue import Buffers, Epilogue
from gossamer.passes.openmp import thread_number
from gossamer.passes.queries import walk
from gossamer.passes.storage import buffer_of, sparse_buffers_of, storage_of
from gossamer.passes.vectors import (
    byte_width,
    call_narrowest,
    index,
    load_index,
    loop,
    mask_of,
    reserve_workspace,
    vector_of,
    widened,
    zeros,
)


@dataclass(frozen=True)
class LowerSpmv:
    """Lower `kernel.spmv` to scf and vector."""

    name: ClassVar[str] = "lower-spmv"

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.spmv"):
            spmv = _Spmv(op.opview)
            reserve_workspace(module, spmv.workspace)
            _lower(spmv)


class _Spmv:
    """A kernel.spmv with its sizes: M rows of the weight, in groups of as many as a vector has lanes."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.storage = storage_of(op.operation)
        self.lanes, self.tokens = ir.IntegerAttr(op.lanes).value, ir.IntegerAttr(op.tokens).value
        reduction = ir.IntegerAttr(op.reduction).value
        self.M = ir.RankedTensorType(op.w.type).shape[1 - reduction]
        self.groups = -(-self.M // self.lanes)
        block = op.epilogue.blocks[0]
        self.sum_type = block.arguments[0].type
        self.epilogue = Epilogue(block)
        self.reads = [o.operation for o in block.operations if o.operation.name == "kernel.read"]
        self.buffers = [buffer_of(op.x), *sparse_buffers_of(op.w), *(buffer_of(r.operands[0]) for r in self.reads)]
        self.workspace = self.tokens * self.lanes * byte_width(self.sum_type)


def _lower(spmv: _Spmv) -> None:
    function, storage = spmv.op.operation.parent.opview, spmv.storage
    widths = [n for n in (4, 2, 1) if n <= spmv.tokens]
    with spmv.op.location:
        with ir.InsertionPoint(function):
            variants = {n: _rows_function(spmv, f"{function.name.value}_rows{n}", n) for n in widths}
        with ir.InsertionPoint(spmv.op):
            one, groups, step = index(1), index(spmv.groups), index(spmv.tokens)
            chunks = arith.minui(groups, storage.threads)
            parallel = scf.ParallelOp([], [index(0)], [chunks], [one], [])
            body = ir.Block.create_at_start(parallel.region, [ir.IndexType.get()], [spmv.op.location])
            with ir.InsertionPoint(body):
                chunk = body.arguments[0]
                low = arith.divui(arith.muli(chunk, groups), chunks)
                high = arith.divui(arith.muli(arith.addi(chunk, one), groups), chunks)
                offset = arith.muli(thread_number(), index(spmv.workspace))
                tokens = memref.dim(storage.output, index(0))
                with loop(index(0), tokens, step) as tiles:
                    first = tiles.induction_variable
                    arguments = [*spmv.buffers, storage.output, storage.workspace, offset, first, low, high]
                    call_narrowest(arith.subi(tokens, first), variants, arguments)
                scf.ReduceOp([], 0)
    storage.erase()


def _rows_function(spmv: _Spmv, name: str, tokens: int) -> func.FuncOp:
    """A function that computes `tokens` tokens from `first` on, for the row groups [low, high)."""
    values = [*spmv.buffers, spmv.storage.output, spmv.storage.workspace]
    types = [v.type for v in values] + [ir.IndexType.get()] * 4
    function = func.FuncOp(name, (types, []), visibility="private")
    with ir.InsertionPoint(function.add_entry_block()):
        _Rows(spmv, tokens, list(function.entry_block.arguments)).emit()
        func.ReturnOp([])
    return function


class _Rows:
    """Emits the body of a rows function."""

    def __init__(self, spmv: _Spmv, tokens: int, arguments: list[ir.Value]) -> None:
        *buffers, out, self.workspace, self.offset, self.first, self.low, self.high = arguments
        self.x, self.positions, self.coordinates, self.values, *reads = buffers
        self.memory = Buffers(dict(zip((r.results[0] for r in spmv.reads), reads, strict=True)), out)
        self.spmv, self.lanes, self.count = spmv, spmv.lanes, tokens
        self.vec = vector_of(self.lanes, spmv.sum_type)
        last = arith.subi(self.memory.tokens, index(1))
        self.tokens = [arith.addi(self.first, index(t)) for t in range(tokens)]
        self.safe_tokens = [arith.minui(t, last) for t in self.tokens]

    def emit(self) -> None:
        lanes, totals_type = index(self.lanes), ir.MemRefType.get([self.count, self.lanes], self.spmv.sum_type)
        totals = memref.view(totals_type, self.workspace, self.offset, [])
        with loop(self.low, self.high, index(1)) as groups:
            row = arith.muli(groups.induction_variable, lanes)
            row_end = arith.minui(arith.addi(row, lanes), index(self.spmv.M))
            with loop(row, row_end, index(1)) as rows:
                m = rows.induction_variable
                for t, sums in enumerate(self._row(m)):
                    fast = ir.Attribute.parse("#arith.fastmath<reassoc>")
                    total = vector.reduction(self.spmv.sum_type, _add(), sums, fastmath=fast)
                    memref.store(total, totals, [index(t), arith.subi(m, row)])
            for t, token in enumerate(self.tokens):
                finish = partial(self.spmv.epilogue.whole, vector.load(self.vec, totals, [index(t), index(0)]))
                self.memory.store_token(token, row, self.lanes, finish)

    def _row(self, m: ir.Value) -> list[ir.Value]:
        """One vector of partial sums a token."""
        lanes = index(self.lanes)
        begin = load_index(self.positions, m)
        end = load_index(self.positions, arith.addi(m, index(1)))
        count = arith.subi(end, begin)
        whole = arith.addi(begin, arith.subi(count, arith.remui(count, lanes)))
        every = mask_of(self.lanes, lanes)
        with loop(begin, whole, lanes, [zeros(self.vec)] * self.count) as nonzeros:
            scf.YieldOp(self._multiply_add(nonzeros.induction_variable, every, list(nonzeros.inner_iter_args)))
        rest = mask_of(self.lanes, arith.subi(end, whole))
        return self._multiply_add(whole, rest, list(nonzeros.results))

    def _multiply_add(self, p: ir.Value, mask: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums + values[p..] * x[token, coordinates[p..]] in the lanes of the mask."""
        stored = vector_of(self.lanes, ir.MemRefType(self.values.type).element_type)
        read = vector_of(self.lanes, ir.MemRefType(self.x.type).element_type)
        narrow = vector_of(self.lanes, ir.MemRefType(self.coordinates.type).element_type)
        wide = vector_of(self.lanes, ir.IntegerType.get_signless(32))
        none = arith.constant(narrow, ir.DenseElementsAttr.get_splat(narrow, ir.IntegerAttr.get(narrow.element_type, 0)))
        columns = vector.maskedload(narrow, self.coordinates, [p], mask, none)
        columns = columns if narrow == wide else arith.extui(wide, columns)
        weights = widened(vector.maskedload(stored, self.values, [p], mask, zeros(stored)), self.vec)
        return [
            vector.fma(weights, widened(self._gather(read, token, columns, mask), self.vec), total)
            for token, total in zip(self.safe_tokens, sums, strict=True)
        ]

    def _gather(self, type_: ir.VectorType, token: ir.Value, columns: ir.Value, mask: ir.Value) -> ir.Value:
        return vector.gather(type_, self.x, [token, index(0)], columns, mask, zeros(type_))


def _add() -> ir.Attribute:
    return ir.Attribute.parse("#vector.kind<add>")
