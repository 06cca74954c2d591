"""Code that the GPU lowerings of kernel.spmm share: the gpu.module around their kernels, and the operands of a thread.

func.func @region(%x: memref<?x768xf32>, ..., %out, %workspace, %threads) { "kernel.spmm" ... }
    becomes
gpu.module @kernels {
  gpu.func @region_t128(%x: memref<?x768xf32>, ..., %out) kernel attributes {kernel.launch = {...}}   // GpuProduct.kernel
  gpu.func @region_t32(...)
}
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref

from gossamer.dialects.errors import CompileError
from gossamer.dialects.kernel import integers
from gossamer.dialects.launch import Launch
from gossamer.passes.loops.buffers import buffer_of, sparse_buffers_of, storage_of
from gossamer.passes.loops.epilogue import Epilogue, reader
from gossamer.passes.loops.gpu_threads import Place, add_kernel, load, store
from gossamer.passes.loops.vectors import index


class GpuProduct:
    """y[t, m] = epilogue(sum_k x[t, k] w[m, k]) with M rows and K columns of w, in a function whose storage is exposed."""

    def __init__(self, op: Any, tile: list[int] | None = None) -> None:
        """Raises CompileError if `tile` is given and the op has another one."""
        if tile is not None and integers(op.tile) != tile:
            raise CompileError(f"tile {integers(op.tile)} is not {tile}")
        self.op = op
        self.storage = storage_of(op.operation)
        reduction = ir.IntegerAttr(op.reduction).value
        weight = ir.RankedTensorType(op.w.type)
        self.M, self.K = weight.shape[1 - reduction], weight.shape[reduction]
        self.element = weight.element_type
        block = op.epilogue.blocks[0]
        self.sum_type = block.arguments[0].type
        self.epilogue = Epilogue(block)
        self.reads = [o.operation for o in block.operations if o.operation.name == "kernel.read"]

    def kernel(self, suffix: str, launch: Launch, emit: Callable[["Operands"], None], resident: int | None = None) -> None:
        """Adds a kernel to the gpu.module, with the body that `emit` builds. `resident` is passed to `add_kernel`."""

        def body(arguments: dict[ir.Value, ir.Value]) -> None:
            weight = tuple(arguments[b] for b in sparse_buffers_of(self.op.w))
            reads = {r.results[0]: arguments[buffer_of(r.operands[0])] for r in self.reads}
            emit(Operands(arguments[buffer_of(self.op.x)], weight, reads, arguments[self.storage.output], launch))

        add_kernel(self.op.operation.parent.opview, suffix, launch, body, resident)

    def kernels(self, launches: Mapping[int, Launch], emit: Callable[["Operands"], None], resident: int | None = None) -> None:
        """Replaces the function that held the op by one kernel for each number of tokens of a tile."""
        for tokens, launch in launches.items():
            self.kernel(f"t{tokens}", launch, emit, resident)
        self.erase()

    def erase(self) -> None:
        """Removes the function that held the op, once its kernels exist."""
        self.op.operation.parent.erase()


class Operands(Place):
    """The memrefs that a kernel works on, and this thread's place. `tokens` is their number, `last` the last one."""

    def __init__(
        self, x: ir.Value, weight: tuple[ir.Value, ...], reads: dict[ir.Value, ir.Value], out: ir.Value, launch: Launch
    ) -> None:
        super().__init__(launch)
        self.x, self.weight, self.reads, self.out = x, weight, reads, out
        self.tokens = memref.dim(out, index(0))
        self.last = arith.subi(self.tokens, index(1))

    def store(self, epilogue: Epilogue, sums: ir.Value, token: ir.Value, row: ir.Value) -> None:
        """Stores epilogue(a vector of sums) to out[token, row..]. The whole vector must lie inside of out, and be aligned."""
        store(epilogue.whole(sums, reader(self.reads, [token, row], load)), self.out, [token, row])
