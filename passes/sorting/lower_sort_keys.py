"""lower-sort-keys: lowers a `kernel.sort_keys` to a counting sort.

before   %positions, %order = "kernel.sort_keys"(%keys)
after    positions[key + 1] += 1 for each key                       // the number of equal keys
         positions[k + 1] = the keys below k                        // where the keys k begin
         order[positions[key + 1]++] = number of the key, for each  // then it is where they end

There are two passes over the keys. The second one writes to random places; as many writes are pending as the processor allows.
Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf

from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import index, load_index, loop


@dataclass(frozen=True)
class LowerSortKeys:
    """Lower the sort of a function."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.sort_keys"):
            with op.location:
                _lower(op)


def _lower(op: ir.Operation) -> None:
    storage = storage_of(op)
    positions, order = storage.outputs
    with ir.InsertionPoint(op):
        keys = buffer_of(op.operands[0])
        count, buckets = memref.dim(keys, index(0)), arith.subi(memref.dim(positions, index(0)), index(1))
        with loop(index(0), arith.addi(buckets, index(1)), index(1)) as each:
            _store(index(0), positions, each.induction_variable)
        with loop(index(0), count, index(1)) as each:
            _take(positions, load_index(keys, each.induction_variable))
        with loop(index(0), buckets, index(1), [index(0)]) as each:
            behind, begin = arith.addi(each.induction_variable, index(1)), each.inner_iter_args[0]
            end = arith.addi(begin, load_index(positions, behind))
            _store(begin, positions, behind)
            scf.YieldOp([end])
        with loop(index(0), count, index(1)) as each:
            number = each.induction_variable
            _store(number, order, _take(positions, load_index(keys, number)))
    storage.erase()


def _take(positions: ir.Value, key: ir.Value) -> ir.Value:
    """Returns the next place of a key, and increments it."""
    behind = arith.addi(key, index(1))
    place = load_index(positions, behind)
    _store(arith.addi(place, index(1)), positions, behind)
    return place


def _store(value: ir.Value, buffer: ir.Value, at: ir.Value) -> None:
    memref.store(arith.index_castui(ir.MemRefType(buffer.type).element_type, value), buffer, [at])
