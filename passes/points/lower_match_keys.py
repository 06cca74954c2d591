"""lower-match-keys: lowers a `kernel.match_keys` to a walk through two copies of the same sorted keys, for each shift.

before   %into, %out, %counts = "kernel.match_keys"(%keys, %shifts)
after    scf.parallel (%s) = ...                                    // three shifts, with independent walks
           while p < n and o < n, for all of them, and then for each
             into[s, found], out[s, found] = p, o                   // always; unless they match, the next ones overwrite them
             found += keys[p] == keys[o] + shift
             p += keys[p] <= keys[o] + shift, o += keys[p] >= keys[o] + shift
           counts[s] = found

No branch depends on the keys, because it is random which of the two places advances. A step waits for the previous one, so
several walks at once take about as long as one. Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass, replace
from functools import reduce

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf

from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import index, parallel
from gossamer.passes.points.pair_tile import below

_TOGETHER = 3
"""Number of walks at once: as many as have their state in registers."""


@dataclass(frozen=True)
class _Walk:
    """A walk. It writes to `row`. `state` has its places in the two copies, and the number of pairs found."""

    row: ir.Value
    shift: ir.Value
    state: tuple[ir.Value, ...]


@dataclass(frozen=True)
class LowerMatchKeys:
    """Lower every kernel.match_keys."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.match_keys"):
            with op.location:
                _lower(op)


def _lower(op: ir.Operation) -> None:
    storage = storage_of(op)
    into, out, counts = storage.outputs
    keys, shifts = (buffer_of(each) for each in op.operands)
    with ir.InsertionPoint(op):
        number, many = (memref.dim(each, index(0)) for each in (keys, shifts))
        with parallel(arith.ceildivui(many, index(_TOGETHER))) as group:
            first, last = arith.muli(group, index(_TOGETHER)), arith.subi(many, index(1))
            rows = [arith.minui(arith.addi(first, index(n)), last) for n in range(_TOGETHER)]  # past the end: the last one
            walks = [_Walk(row, memref.load(shifts, [row]), (index(0),) * 3) for row in rows]
            for each in _walked(walks, keys, number, (into, out)):
                (whole,) = _walked([each], keys, number, (into, out))
                _store(whole.state[2], counts, [whole.row])
    storage.erase()


def _walked(walks: list[_Walk], keys: ir.Value, number: ir.Value, made: tuple[ir.Value, ir.Value]) -> list[_Walk]:
    """Emits steps of all walks until one of them is at its end. Returns the walks."""
    start = [value for each in walks for value in each.state]
    kinds = [ir.IndexType.get()] * len(start)
    search = scf.WhileOp(kinds, start)
    location = search.operation.location
    with ir.InsertionPoint(ir.Block.create_at_start(search.before, kinds, [location] * len(kinds))) as point:
        both = list(point.block.arguments)
        inside = [below(both[at + side], number) for at in range(0, len(both), 3) for side in (0, 1)]
        scf.ConditionOp(reduce(arith.andi, inside), both)
    with ir.InsertionPoint(ir.Block.create_at_start(search.after, kinds, [location] * len(kinds))) as point:
        given = list(point.block.arguments)
        scf.YieldOp([value for n, each in enumerate(walks) for value in _step(each, given[3 * n : 3 * n + 3], keys, made)])
    found = list(search.results)
    return [replace(each, state=tuple(found[3 * n : 3 * n + 3])) for n, each in enumerate(walks)]


def _step(walk: _Walk, state: list[ir.Value], keys: ir.Value, made: tuple[ir.Value, ir.Value]) -> list[ir.Value]:
    p, o, found = state
    for value, memory in zip((p, o), made, strict=True):
        _store(value, memory, [walk.row, found])
    key, wanted = memref.load(keys, [p]), arith.addi(memref.load(keys, [o]), walk.shift)
    steps = [
        arith.index_castui(ir.IndexType.get(), arith.cmpi(kind, key, wanted))
        for kind in (arith.CmpIPredicate.sle, arith.CmpIPredicate.sge, arith.CmpIPredicate.eq)
    ]
    return [arith.addi(a, b) for a, b in zip((p, o, found), steps, strict=True)]


def _store(value: ir.Value, memory: ir.Value, at: list[ir.Value]) -> None:
    memref.store(arith.index_castui(ir.MemRefType(memory.type).element_type, value), memory, at)
