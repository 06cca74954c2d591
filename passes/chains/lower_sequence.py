"""lower-sequence: runs the stages of a chain for a few tokens one after the other, each with all tokens, token-major.

before   %h = "kernel.spmm"(%x, %up) ({... gelu ...}) {schedule = "lookup", ...}
         %s = "kernel.sum"() ({... kernel.read(%h) ...}) {size = 3072}
         %y = "kernel.spmm"(%h, %down) ({... * kernel.read(%s) ...}) {schedule = "planes", ...}
after    %h = "kernel.spmm"(%x, %up) ({...}) {schedule = "lookup", ...} into memory of the workspace
         scf.for (%token) ... vector.load ... vector.reduction <add>          // sums and maps of rows, features in lanes
         %y = "kernel.spmm"(%h', %down) ({... kernel.read(%s') ...}) {...}     // reads %h and %s from that memory

Each product is then lowered by the pass of its own schedule, one for a few tokens. Runs on functions whose storage is exposed
(expose-storage), for at most MOST_TOKENS tokens.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, bufferization, func, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.passes.chains.lower_chain import TILE_WORKSPACE
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.epilogue import Buffers, Read, on_lanes, reader
from gossamer.passes.loops.queries import public_functions
from gossamer.passes.loops.vectors import byte_width, index, loop, mask_of, splat_of, vector_of, zeros

MOST_TOKENS = 8

_ROWS = ("kernel.map", "kernel.sum", "kernel.max")
_LINE = 64


@dataclass(frozen=True)
class LowerSequence:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for function in public_functions(module):
            ops = [op.operation for op in function.entry_block.operations if op.operation.name in ("kernel.spmm", *_ROWS)]
            others = {op.operation.name for op in function.entry_block.operations if op.operation.name.startswith("kernel.")}
            if not others <= {"kernel.spmm", *_ROWS}:
                raise CompileError(f"no sequence has {', '.join(sorted(others - {'kernel.spmm', *_ROWS}))}")
            _store(module, function, ops)
            for op in ops:
                if op.name in _ROWS:
                    with op.location:
                        _Rows(op.opview, self.bits // 32).lower()


def _store(module: ir.Module, function: func.FuncOp, ops: list[ir.Operation]) -> None:
    """Stores each value that a later op reads in memory: that of a result, or the end of the workspace."""
    *_, workspace, _ = function.entry_block.arguments
    results = [op.results[0] for op in ops]
    writes = {result: write for result in results if (write := _write_of(result)) is not None}
    sizes = {result: _bytes(result) for result in results if result not in writes}
    space = sum(sizes.values()) + _LINE
    i64 = ir.IntegerType.get_signless(64)
    module.operation.attributes[TILE_WORKSPACE] = ir.ArrayAttr.get(
        [ir.IntegerAttr.get(i64, n) for n in (MOST_TOKENS, space, 0)]
    )
    with ir.InsertionPoint(ops[0]), function.location:
        count = memref.dim(next(iter(writes.values())).operands[1], index(0))
        end = arith.subi(memref.dim(workspace, index(0)), index(space))
        offset = arith.muli(arith.ceildivui(end, index(_LINE)), index(_LINE))
    for op, result in zip(ops, results, strict=True):
        with ir.InsertionPoint(op), op.location:
            if result in sizes:
                tensor = ir.RankedTensorType(result.type)
                buffer = memref.view(ir.MemRefType.get(tensor.shape, tensor.element_type), workspace, offset, [count])
                offset = arith.addi(offset, index(sizes[result]))
            else:
                buffer = writes[result].operands[1]
        with ir.InsertionPoint.after(op), op.location:
            if result in sizes:
                write = bufferization.MaterializeInDestinationOp(None, result, buffer, restrict=True, writable=True).operation
            else:
                write = writes[result]
                write.move_after(op)
        with ir.InsertionPoint.after(write), op.location:
            stored = bufferization.to_tensor(result.type, buffer, restrict=True)
        result.replace_all_uses_except(stored, write)


def _write_of(result: ir.Value) -> ir.Operation | None:
    writes = [use.owner.operation for use in result.uses]
    return next((write for write in writes if write.name == "bufferization.materialize_in_destination"), None)


def _bytes(result: ir.Value) -> int:
    """Returns the bytes of a value of MOST_TOKENS tokens, in whole cache lines."""
    tensor = ir.RankedTensorType(result.type)
    return -(-MOST_TOKENS * tensor.shape[1] * byte_width(tensor.element_type) // _LINE) * _LINE


class _Rows:
    """A map, a sum or a maximum of rows."""

    def __init__(self, op: Any, lanes: int) -> None:
        self.op, self.lanes, self.storage = op, lanes, storage_of(op.operation)
        *self.body, terminator = [o.operation for o in op.body.blocks[0].operations]
        self.value = terminator.operands[0]
        reads = [o for o in self.body if o.name == "kernel.read"]
        self.reads = {o.results[0]: buffer_of(o.operands[0]) for o in reads}

    def lower(self) -> None:
        """Replaces the op by loops."""
        with ir.InsertionPoint(self.op):
            memory, tokens = Buffers(self.reads, self.storage.output), memref.dim(self.storage.output, index(0))
            with loop(index(0), tokens, index(1)) as rows:
                token = rows.induction_variable
                if self.op.operation.name == "kernel.map":
                    with loop(index(0), memory.features, index(self.lanes)) as columns:
                        memory.store_token(token, columns.induction_variable, self.lanes, self._values)
                else:
                    self._reduce(token)
        self.storage.erase()

    def _values(self, read: Read) -> list[ir.Value]:
        return [on_lanes(self.body, {}, self.value, self.lanes, read)]

    def _reduce(self, token: ir.Value) -> None:
        adds, vec = self.op.operation.name == "kernel.sum", vector_of(self.lanes, self.value.type)
        start = zeros(vec) if adds else splat_of(vec, -math.inf)
        size = index(ir.IntegerAttr(self.op.size).value)
        with loop(index(0), size, index(self.lanes), [start]) as columns:
            at = columns.induction_variable
            mask = mask_of(self.lanes, arith.subi(size, at))

            def load(type_: ir.VectorType, buffer: ir.Value, where: list[ir.Value]) -> ir.Value:
                return vector.maskedload(type_, buffer, where, mask, zeros(type_))

            (value,) = self._values(reader(self.reads, [token, at], load))
            value = arith.select(mask, value, start)
            scf.YieldOp([(arith.addf if adds else arith.maximumf)(columns.inner_iter_args[0], value)])
        kind = ir.Attribute.parse("#vector.kind<add>" if adds else "#vector.kind<maximumf>")
        fast = ir.Attribute.parse("#arith.fastmath<reassoc>")
        total = vector.reduction(self.value.type, kind, columns.results[0], fastmath=fast if adds else None)
        memref.store(total, self.storage.output, [token, index(0)])
