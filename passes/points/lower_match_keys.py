"""lower-match-keys: a `kernel.match_keys` becomes, for each shift, a walk through two copies of the same sorted keys.

before   %into, %out, %counts = "kernel.match_keys"(%keys, %shifts)
after    scf.parallel (%s) = ...                                    // a shift each
           while p < n and o < n
             into[s, found], out[s, found] = p, o                   // whether they match or not: the next ones overwrite them
             found += keys[p] == keys[o] + shift
             p += keys[p] <= keys[o] + shift, o += keys[p] >= keys[o] + shift
           counts[s] = found

Without a branch that depends on the keys: which of the two goes on is random. Runs on functions whose storage is exposed
(expose-storage).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf

from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import index, parallel
from gossamer.passes.points.pair_tile import below


@dataclass(frozen=True)
class LowerMatchKeys:
    """Lower all of them."""

    name: ClassVar[str] = "lower-match-keys"

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.match_keys"):
            with op.location:
                _lower(op)


def _lower(op: ir.Operation) -> None:
    storage = storage_of(op)
    into, out, counts = storage.outputs
    keys, shifts = (buffer_of(each) for each in op.operands)
    with ir.InsertionPoint(op):
        number = memref.dim(keys, index(0))
        with parallel(memref.dim(shifts, index(0))) as s:
            found = _walk(keys, number, memref.load(shifts, [s]), (into, out), s)
            _store(found, counts, [s])
    storage.erase()


def _walk(keys: ir.Value, number: ir.Value, shift: ir.Value, made: tuple[ir.Value, ir.Value], s: ir.Value) -> ir.Value:
    kinds = [ir.IndexType.get()] * 3
    search = scf.WhileOp(kinds, [index(0)] * 3)
    location = search.operation.location
    with ir.InsertionPoint(ir.Block.create_at_start(search.before, kinds, [location] * 3)) as point:
        both = list(point.block.arguments)
        scf.ConditionOp(arith.andi(below(both[0], number), below(both[1], number)), both)
    with ir.InsertionPoint(ir.Block.create_at_start(search.after, kinds, [location] * 3)) as point:
        p, o, found = point.block.arguments
        for value, memory in zip((p, o), made, strict=True):
            _store(value, memory, [s, found])
        key, wanted = memref.load(keys, [p]), arith.addi(memref.load(keys, [o]), shift)
        steps = [
            arith.index_castui(ir.IndexType.get(), arith.cmpi(kind, key, wanted))
            for kind in (arith.CmpIPredicate.sle, arith.CmpIPredicate.sge, arith.CmpIPredicate.eq)
        ]
        scf.YieldOp([arith.addi(a, b) for a, b in zip((p, o, found), steps, strict=True)])
    return search.results[2]


def _store(value: ir.Value, memory: ir.Value, at: list[ir.Value]) -> None:
    memref.store(arith.index_castui(ir.MemRefType(memory.type).element_type, value), memory, at)
