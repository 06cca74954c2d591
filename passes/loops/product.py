"""The base of the lowerings of kernel.spmm: the operands of a product, and the frame around its inner loops.

scf.parallel (%task) = ...                       Product.parallel, Product.by_tiles
  func.call @region_tile64(operands, ...)        Product.call: the narrowest function for the remaining tokens
func.func private @region_tile64(operands, %offset, %first, %low, %high)      Product.function
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch_mlir import ir
from torch_mlir.dialects import arith, func, memref, scf

from gossamer.dialects.errors import CompileError
from gossamer.dialects.packing import Packing
from gossamer.passes.loops.buffers import Storage, WeightArrays, buffer_of, sparse_buffers_of, storage_of
from gossamer.passes.loops.encodings import storage_of_type
from gossamer.passes.loops.epilogue import Buffers, Epilogue
from gossamer.passes.loops.openmp import thread_number
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import call_narrowest, index, load_index, loop, parallel

Stored = TypeVar("Stored", bound=Packing)

_MEETING = 1 << 13  # cycles below which one thread is faster than two, which have to synchronise
_MANY = 4  # tiles for each thread from which it no longer matters that some threads have one more than others


@dataclass(frozen=True)
class Operands(WeightArrays):
    """The arguments of a function of a product.

    weight   the arrays of the weight
    memory   the memory of results and of the epilogue's reads
    offset   this thread's offset into the workspace
    first    its first token
    low, high  its groups of rows, [low, high)
    numbers  the numbers among the region's arguments
    """

    x: ir.Value
    weight: tuple[ir.Value, ...]
    memory: Buffers
    workspace: ir.Value
    offset: ir.Value
    first: ir.Value
    low: ir.Value
    high: ir.Value
    numbers: tuple[ir.Value, ...] = ()


def products(module: ir.Module, schedule: str) -> list[Any]:
    """Returns the kernel.spmm ops of one schedule."""
    found = [op.opview for op in walk(module, "kernel.spmm")]
    return [op for op in found if ir.StringAttr(op.schedule).value == schedule]


def shape_of(op: Any) -> tuple[int, int]:
    """Returns rows and columns of the weight of a kernel.spmm: results of a token, and elements summed over."""
    sizes, reduction = ir.RankedTensorType(op.w.type).shape, ir.IntegerAttr(op.reduction).value
    return sizes[1 - reduction], sizes[reduction]


def lanes_of(op: Any) -> int:
    """Returns the number of sums in a vector of a kernel.spmm."""
    return int(ir.IntegerAttr(op.lanes).value)


def stored_of(op: Any, kind: type[Stored]) -> Stored:
    """Returns the packing of the weight of a kernel.spmm. CompileError if it is of another kind."""
    stored = storage_of_type(ir.RankedTensorType(op.w.type))
    if not isinstance(stored, kind):
        raise CompileError(f"a weight stored as {stored} is not stored as {kind.kind}")
    return stored


def _before(op: Any) -> int:
    """Returns the number of functions before the one with this product."""
    function = op.operation.parent
    names = [each.operation.attributes["sym_name"] for each in function.parent.regions[0].blocks[0].operations]
    return names.index(function.attributes["sym_name"])


class Product:
    """y[t, m] = epilogue(sum_k x[t, k] w[m, k]) with M rows and K columns of w. The rows are in groups of `unit`, by default
    one vector."""

    def __init__(self, op: Any, unit: int | None = None) -> None:
        self.op = op
        self._others = _before(op)
        self.storage: Storage = storage_of(op.operation)
        self.lanes = lanes_of(op)
        self.M, self.K = shape_of(op)
        self.unit = unit or self.lanes
        self.groups = -(-self.M // self.unit)
        block = op.epilogue.blocks[0]
        self.sum_type = block.arguments[0].type
        self.epilogue = Epilogue(block)
        self.reads = [o.operation for o in block.operations if o.operation.name == "kernel.read"]
        stored = sparse_buffers_of(op.w)
        self.components = len(stored)
        self.buffers = [buffer_of(op.x), *stored, *(buffer_of(r.operands[0]) for r in self.reads)]
        self.numbers = list[ir.Value]()

    def function(self, suffix: str, emit: Callable[[Operands], None]) -> func.FuncOp:
        """Makes a private function, placed before the one with the op. `emit` builds its body."""
        parent = self.op.operation.parent.opview
        own = f"{parent.name.value}_{suffix}"
        name = own if self._others == 0 else f"{own}_{self._others}"
        values = [*self.numbers, *self.buffers, *self.storage.outputs, self.storage.workspace]
        types = [v.type for v in values] + [ir.IndexType.get()] * 4
        with ir.InsertionPoint(parent):
            function = func.FuncOp(name, (types, []), visibility="private")
        with ir.InsertionPoint(function.add_entry_block()):
            *given, workspace, offset, first, low, high = function.entry_block.arguments
            given, outs = given[: -len(self.storage.outputs)], given[-len(self.storage.outputs) :]
            numbers, buffers = tuple(given[: len(self.numbers)]), given[len(self.numbers) :]
            x, weight, reads = buffers[0], tuple(buffers[1 : 1 + self.components]), buffers[1 + self.components :]
            memory = Buffers(dict(zip((r.results[0] for r in self.reads), reads, strict=True)), *outs)
            emit(Operands(x, weight, memory, workspace, offset, first, low, high, numbers))
            func.ReturnOp([])
        return function

    def by_tiles(self, variants: dict[int, func.FuncOp], workspace: int) -> None:
        """Replaces the op by calls of functions for tiles of tokens. `variants` has them by their tokens, the widest first.

        If there are too few tiles to keep all threads equally busy, the rows are shared out too. If the product takes less time
        than waking a team of threads, the calling thread computes it.
        """
        with ir.InsertionPoint(self.op):
            tile, threads, one = index(next(iter(variants))), self.storage.threads, index(1)
            n_tiles = arith.ceildivui(self.all_tokens(), tile)
            small = scf.IfOp(self.small(), has_else=True)
            with ir.InsertionPoint(small.then_block):
                with loop(index(0), n_tiles, one) as tiles:
                    first = arith.muli(tiles.induction_variable, tile)
                    self.call(variants, index(0), first, index(0), index(self.groups))
                scf.YieldOp([])
            with ir.InsertionPoint(small.else_block):
                uneven = arith.cmpi(arith.CmpIPredicate.ne, arith.remui(n_tiles, threads), index(0))
                few = arith.cmpi(arith.CmpIPredicate.ult, n_tiles, arith.muli(threads, index(_MANY)))
                chunks = arith.minui(index(self.groups), arith.select(arith.andi(uneven, few), threads, one))

                def body(task: ir.Value, offset: ir.Value) -> None:
                    first = arith.muli(arith.divui(task, chunks), tile)
                    self.call(variants, offset, first, *self.row_range(arith.remui(task, chunks), chunks))

                self.parallel(arith.muli(n_tiles, chunks), workspace, body)
                scf.YieldOp([])
        self.storage.erase()

    def by_rows(self, variants: dict[int, func.FuncOp], tokens: int, workspace: int) -> None:
        """Replaces the op by calls of functions for parts of the rows. Each takes all tokens, `tokens` at a time."""
        with ir.InsertionPoint(self.op):
            chunks = arith.minui(index(self.groups), self.workers())

            def body(chunk: ir.Value, offset: ir.Value) -> None:
                low, high = self.row_range(chunk, chunks)
                count = memref.dim(self.storage.output, index(0))
                with loop(index(0), count, index(tokens)) as tiles:
                    self.call(variants, offset, tiles.induction_variable, low, high)

            self.parallel(chunks, workspace, body)
        self.storage.erase()

    def all_tokens(self) -> ir.Value:
        """Returns the number of tokens."""
        return memref.dim(self.storage.output, index(0))

    def small(self) -> ir.Value:
        """Whether one thread computes the product before two threads could synchronise."""
        cycles = self.cycles(memref.dim(self.buffers[self.components], index(0)), self.all_tokens())
        return arith.cmpi(arith.CmpIPredicate.ult, cycles, index(_MEETING))

    def cycles(self, values: ir.Value, tokens: ir.Value) -> ir.Value:
        """Returns the approximate cycles of the multiply-adds: two for each value of the weight and vector of tokens."""
        return arith.muli(arith.muli(values, index(2)), arith.ceildivui(tokens, index(self.lanes)))

    def workers(self) -> ir.Value:
        """Returns the number of threads that share the product."""
        return arith.select(self.small(), index(1), self.storage.threads)

    def parallel(self, tasks: ir.Value, workspace: int, body: Callable[[ir.Value, ir.Value], None]) -> None:
        """Emits body(task, the thread's offset into the workspace) for all tasks. A thread has `workspace` bytes."""
        with parallel(tasks) as task:
            body(task, arith.muli(thread_number(), index(workspace)))

    def row_range(self, chunk: ir.Value, chunks: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns the groups of rows [low, high) of one of `chunks` parts of equal work."""
        return self._boundary(chunk, chunks), self._boundary(arith.addi(chunk, index(1)), chunks)

    def work_before(self, row: ir.Value) -> ir.Value:
        """Returns the cost of the rows before this one, in any unit. Each row costs more than 0; by default, all the same."""
        return row

    def stored_before(self, row: ir.Value, blocks: int, each: int) -> ir.Value:
        """Returns the entries of the rows before this one in all blocks of a weight with positions.

        Each row of a block counts `each` more entries.
        """
        positions = self.buffers[1]
        with loop(index(0), index(blocks), index(1), [arith.muli(row, index(blocks * each))]) as steps:
            start = arith.muli(steps.induction_variable, index(self.M))
            entries = arith.subi(load_index(positions, arith.addi(start, row)), load_index(positions, start))
            scf.YieldOp([arith.addi(steps.inner_iter_args[0], entries)])
        return steps.results[0]

    def _boundary(self, chunk: ir.Value, chunks: ir.Value) -> ir.Value:
        """Returns the first group of rows with `chunk` / `chunks` of the work before it, or the end, by bisection."""
        rows, one = index(self.M), index(1)
        wanted = arith.ceildivui(arith.muli(chunk, self.work_before(rows)), chunks)
        steps = self.groups.bit_length()
        with loop(index(0), index(steps), one, [index(0), index(self.groups)]) as search:
            low, high = search.inner_iter_args
            middle = arith.divui(arith.addi(low, high), index(2))
            before = self.work_before(arith.minui(arith.muli(middle, index(self.unit)), rows))
            # Once low equals high, so does middle, and both must stay.
            less = arith.andi(
                arith.cmpi(arith.CmpIPredicate.ult, before, wanted), arith.cmpi(arith.CmpIPredicate.ult, low, high)
            )
            scf.YieldOp([arith.select(less, arith.addi(middle, one), low), arith.select(less, high, middle)])
        return search.results[0]

    def call(self, variants: dict[int, func.FuncOp], offset: ir.Value, first: ir.Value, low: ir.Value, high: ir.Value) -> None:
        """Calls the narrowest of the functions, keyed by their tokens, that takes all tokens from `first` on."""
        arguments = [*self.numbers, *self.buffers, *self.storage.outputs, self.storage.workspace, offset, first, low, high]
        left = arith.subi(self.all_tokens(), first)
        call_narrowest(left, variants, arguments)
