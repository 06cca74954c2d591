"""Finds the memrefs behind the tensors of a scheduled op, in a function whose storage is exposed (expose-storage)."""

from dataclasses import dataclass

from torch_mlir import ir

from gossamer.dialects.errors import CompileError
from gossamer.passes.loops.queries import defining, sole_user

_WHY = "it is computed and used inside of the region, or expose-storage has not run"


@dataclass(frozen=True)
class Storage:
    """The memory of an op: its `outputs`, and a `workspace`. `threads` is the number of threads that it may use."""

    op: ir.Operation
    outputs: tuple[ir.Value, ...]
    workspace: ir.Value
    threads: ir.Value

    @property
    def output(self) -> ir.Value:
        """The memory of its only or first result."""
        return self.outputs[0]

    def erase(self) -> None:
        """Removes the op and the writes of its results, after loops have replaced them."""
        for result in self.op.results:
            write = sole_user(result)
            assert write is not None
            write.erase()
        self.op.erase()


def storage_of(op: ir.Operation) -> Storage:
    """Returns the storage of `op`. CompileError if expose-storage has not run, or if a result has other uses."""
    writes = [sole_user(result) for result in op.results]
    if any(write is None or write.name != "bufferization.materialize_in_destination" for write in writes):
        raise CompileError(f"{op.name} at {op.location}: its result has no buffer, for {_WHY}")
    *_, workspace, threads = op.parent.regions[0].blocks[0].arguments
    return Storage(op, tuple(write.operands[1] for write in writes if write is not None), workspace, threads)


def buffer_of(tensor: ir.Value) -> ir.Value:
    """Returns the memref of a dense tensor."""
    op = defining(tensor)
    if op is None or op.name != "bufferization.to_tensor":
        raise CompileError(f"{tensor} has no buffer, for {_WHY}")
    return op.operands[0]


def sparse_buffers_of(tensor: ir.Value) -> list[ir.Value]:
    """Returns the memrefs of a sparse tensor: positions and coordinates by level, or arrays of its packing. Values are last."""
    op = defining(tensor)
    if op is None or op.name not in ("sparse_tensor.assemble", "builtin.unrealized_conversion_cast"):
        raise CompileError(f"{tensor} has no buffers, for {_WHY}")
    return [buffer_of(v) for v in op.operands]


class WeightArrays:
    """Names for the arrays in `weight`."""

    weight: tuple[ir.Value, ...]

    @property
    def positions(self) -> ir.Value:
        """The places where the entries of each row begin, for a weight with positions."""
        return self.weight[0]

    @property
    def coordinates(self) -> ir.Value:
        """The columns of the entries, for a weight with positions and coordinates."""
        return self.weight[1]

    @property
    def values(self) -> ir.Value:
        """The values of the weight."""
        return self.weight[-1]
