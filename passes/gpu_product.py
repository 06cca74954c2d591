"""What the GPU lowerings of kernel.spmm share: the gpu.module around their kernels, and how threads find their work.

func.func @region(%x: memref<?x768xf32>, ..., %out, %workspace, %threads) { "kernel.spmm" ... }
    becomes
gpu.module @kernels {
  gpu.func @region_t128(%x: memref<?x768xf32>, ..., %out) kernel attributes {kernel.launch = {...}}   // GpuProduct.kernel
  gpu.func @region_t32(...)
}

A kernel is launched on one row of thread blocks: `blocks` for each `tokens` tokens, of `threads` threads and `shared` bytes
of shared memory each. Which of a region's kernels runs is decided at every call, by the number of tokens.
"""

from collections.abc import Callable
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, gpu, memref, nvvm, vector

from gossamer.dialects.launch import Launch
from gossamer.passes.epilogue import Epilogue
from gossamer.passes.queries import dims
from gossamer.passes.storage import buffer_of, sparse_buffers_of, storage_of
from gossamer.passes.vectors import index

MODULE = "kernels"
LAUNCH = "kernel.launch"  # attribute of a gpu.func: the fields of its `Launch`
WARP = 32
_VECTOR_BYTES = 16  # the widest load and store of a thread


def launch_attribute(launch: Launch) -> ir.DictAttr:
    """A launch as the gpu.func carries it."""
    i64 = ir.IntegerType.get_signless(64)
    return ir.DictAttr.get({name: ir.IntegerAttr.get(i64, value) for name, value in launch.as_json().items()})


def read_launch(attribute: ir.Attribute) -> Launch:
    """The inverse of `launch_attribute`."""
    return Launch.from_json({entry.name: ir.IntegerAttr(entry.attr).value for entry in ir.DictAttr(attribute)})


class GpuProduct:
    """y[t, m] = epilogue(sum_k x[t, k] w[m, k]) with M rows and K columns of w, in a function whose storage is exposed."""

    def __init__(self, op: Any) -> None:
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

    def kernel(self, suffix: str, launch: Launch, emit: Callable[["Operands"], None]) -> None:
        """Add a kernel to the gpu.module, with the body that `emit` builds."""
        function = self.op.operation.parent.opview
        memrefs = list(function.entry_block.arguments)[:-2]  # without workspace and threads
        with ir.InsertionPoint(self._module().bodyRegion.blocks[0]):
            signature = ir.FunctionType.get([m.type for m in memrefs], [])
            name = f"{function.name.value}_{suffix}"
            kernel = gpu.GPUFuncOp(signature, name, kernel=True, known_block_size=[launch.threads, 1, 1])
            kernel.attributes[LAUNCH] = launch_attribute(launch)
        with ir.InsertionPoint(kernel.add_entry_block()):
            arguments = dict(zip(memrefs, kernel.entry_block.arguments, strict=True))
            weight = tuple(arguments[b] for b in sparse_buffers_of(self.op.w))
            reads = {r.results[0]: arguments[buffer_of(r.operands[0])] for r in self.reads}
            emit(Operands(arguments[buffer_of(self.op.x)], weight, reads, arguments[self.storage.output], launch))
            gpu.ReturnOp([])

    def erase(self) -> None:
        """Remove the function that held the op, once kernels do the work."""
        self.op.operation.parent.erase()

    def _module(self) -> gpu.GPUModuleOp:
        module = self.op.operation.parent.parent
        for op in module.regions[0].blocks[0].operations:
            if isinstance(op, gpu.GPUModuleOp):
                return op
        with ir.InsertionPoint(self.op.operation.parent):
            made = gpu.GPUModuleOp(MODULE)
            made.bodyRegion.blocks.append()
            return made


class Operands:
    """What a kernel works on: memrefs, and this thread's place. `tile` and `chunk` are those of its block: tokens from
    tile x launch.tokens on, and the chunk-th of launch.blocks parts of the work on them."""

    def __init__(
        self, x: ir.Value, weight: tuple[ir.Value, ...], reads: dict[ir.Value, ir.Value], out: ir.Value, launch: Launch
    ) -> None:
        self.x, self.weight, self.reads, self.out, self.launch = x, weight, reads, out, launch
        self.tokens = memref.dim(out, index(0))
        block = gpu.block_id(_x())
        self.tile, self.chunk = divmod_by(block, launch.blocks)
        self.first = arith.muli(self.tile, index(launch.tokens))
        self.last = arith.subi(self.tokens, index(1))
        self.thread = gpu.thread_id(_x())
        self.warp, self.lane = divmod_by(self.thread, WARP)

    def store(self, epilogue: Epilogue, sums: ir.Value, token: ir.Value, row: ir.Value) -> None:
        """out[token, row..] = epilogue(a vector of sums); all of it lies inside of out, the vector is aligned."""

        def read(op: ir.Operation, type_: ir.VectorType) -> ir.Value:
            positions = dims(ir.AffineMapAttr(op.attributes["map"]).value)
            at = [index(0) if d is None else (token, row)[d] for d in positions]
            buffer = self.reads[op.results[0]]
            if 1 not in positions:
                return vector.broadcast(type_, memref.load(buffer, at))
            return load(type_, buffer, at)

        store(epilogue.whole(sums, read), self.out, [token, row])


def divmod_by(value: ir.Value, divisor: int) -> tuple[ir.Value, ir.Value]:
    """Quotient and remainder of an index by a constant."""
    return arith.divui(value, index(divisor)), arith.remui(value, index(divisor))


def widest(size: int, element: ir.Type, most: int) -> int:
    """Elements of the widest vector, up to `most`, that divides rows of `size` elements: 16 bytes, if that divides them."""
    width = min(_VECTOR_BYTES * 8 // ir.FloatType(element).width, most)
    while size % width:
        width //= 2
    return width


def load(type_: ir.VectorType, buffer: ir.Value, at: list[ir.Value]) -> ir.Value:
    """A vector from an address that is aligned to its size."""
    return vector.load(type_, buffer, at, alignment=_bytes(type_))


def store(value: ir.Value, buffer: ir.Value, at: list[ir.Value]) -> None:
    """A vector to an address that is aligned to its size."""
    vector.store(value, buffer, at, alignment=_bytes(ir.VectorType(value.type)))


def shared(at: int, shape: list[int], element: ir.Type) -> ir.Value:
    """A memref of the block's shared memory, from byte `at` on (a multiple of 16)."""
    space = ir.Attribute.parse("#gpu.address_space<workgroup>")
    dynamic = ir.ShapedType.get_dynamic_size()
    i8 = ir.IntegerType.get_signless(8)
    memory = gpu.dynamic_shared_memory(ir.MemRefType.get([dynamic], i8, memory_space=space))
    return memref.view(ir.MemRefType.get(shape, element, memory_space=space), memory, index(at), [])


def sync_warp() -> None:
    """Wait for all threads of the warp; what they wrote to shared memory is seen by all."""
    nvvm.bar_warp_sync(arith.constant(ir.IntegerType.get_signless(32), -1))


def _bytes(type_: ir.VectorType) -> int:
    element = type_.element_type
    width = ir.IntegerType(element).width if isinstance(element, ir.IntegerType) else ir.FloatType(element).width
    return width * type_.shape[0] // 8


def _x() -> ir.Attribute:
    return ir.Attribute.parse("#gpu<dim x>")
