"""Builders that all GPU lowerings share: kernels, the place of a thread in the work, and accesses to memory.

A kernel is launched on a one-dimensional grid: `blocks` thread blocks for each `tokens` tokens, each with `threads` threads and
`shared` bytes of shared memory. At every call, the number of tokens (rows of the result) decides which of a region's kernels
runs (`dialects/launch.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch_mlir import ir
from torch_mlir.dialects import arith, func, gpu, memref, nvvm, scf, vector

from gossamer.dialects.launch import Launch
from gossamer.passes.loops.vectors import added, byte_width, index, load_index, vector_of

MODULE = "kernels"
LAUNCH = "kernel.launch"  # attribute of a gpu.func: the fields of its `Launch`
WARP = 32
MOST_SHARED = 96 << 10  # most bytes of shared memory that a block may have on every architecture since Ampere
_RESIDENT = "nvvm.minctasm"
_VECTOR_BYTES = 16  # the widest load and store of a thread


def launch_attribute(launch: Launch) -> ir.DictAttr:
    """Returns a launch as an attribute of a gpu.func."""
    i64 = ir.IntegerType.get_signless(64)
    return ir.DictAttr.get({name: ir.IntegerAttr.get(i64, value) for name, value in launch.as_json().items()})


def read_launch(attribute: ir.Attribute) -> Launch:
    """Returns the launch in an attribute that `launch_attribute` made."""
    return Launch.from_json({entry.name: ir.IntegerAttr(entry.attr).value for entry in ir.DictAttr(attribute)})


def add_kernel(
    function: func.FuncOp,
    suffix: str,
    launch: Launch,
    emit: Callable[[dict[ir.Value, ir.Value]], None],
    resident: int | None = None,
) -> None:
    """Adds a kernel to the gpu.module beside a function whose storage is exposed. `emit` builds its body.

    The kernel takes the function's memrefs without the workspace. `emit` gets the kernel's argument for each of them.
    `resident` is the number of blocks whose registers must fit into a multiprocessor together.
    """
    *arguments, _workspace, _threads = function.entry_block.arguments
    memrefs = [a for a in arguments if isinstance(a.type, ir.MemRefType)]
    with ir.InsertionPoint(_module(function).bodyRegion.blocks[0]):
        signature = ir.FunctionType.get([m.type for m in memrefs], [])
        name = f"{function.name.value}_{suffix}"
        kernel = gpu.GPUFuncOp(signature, name, kernel=True, known_block_size=[launch.threads, 1, 1])
        kernel.attributes[LAUNCH] = launch_attribute(launch)
        if resident is not None:
            kernel.attributes[_RESIDENT] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), resident)
    with ir.InsertionPoint(kernel.add_entry_block()):
        emit(dict(zip(memrefs, kernel.entry_block.arguments, strict=True)))
        gpu.ReturnOp([])


def _module(function: func.FuncOp) -> gpu.GPUModuleOp:
    for op in function.operation.parent.regions[0].blocks[0].operations:
        if isinstance(op, gpu.GPUModuleOp):
            return op
    with ir.InsertionPoint(function):
        made = gpu.GPUModuleOp(MODULE)
        made.bodyRegion.blocks.append()
        return made


class Place:
    """The place of this thread in the work.

    thread      its number in the block; `warp` and `lane` follow from it
    tile        number of the block's tile of tokens, whose first token is `first` = tile x launch.tokens
    chunk       number of the block's part, of launch.blocks parts, of the work on the tile
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.tile, self.chunk = divmod_by(gpu.block_id(_x()), launch.blocks)
        self.first = arith.muli(self.tile, index(launch.tokens))
        self.thread = gpu.thread_id(_x())
        self.warp, self.lane = divmod_by(self.thread, WARP)


def divmod_by(value: ir.Value, divisor: int) -> tuple[ir.Value, ir.Value]:
    """Returns quotient and remainder of an index by a constant."""
    return arith.divui(value, index(divisor)), arith.remui(value, index(divisor))


def below(value: ir.Value, limit: ir.Value) -> ir.Value:
    """Whether value < limit, both unsigned."""
    return arith.cmpi(arith.CmpIPredicate.ult, value, limit)


def divides(width: int, size: ir.Value) -> ir.Value:
    """Whether `size` is a multiple of a constant."""
    return arith.cmpi(arith.CmpIPredicate.eq, arith.remui(size, index(width)), index(0))


@contextmanager
def when(condition: ir.Value) -> Iterator[None]:
    """Makes an scf.if without results, with the insertion point inside, and ends it."""
    op = scf.IfOp(condition)
    with ir.InsertionPoint(op.then_block):
        yield
        scf.YieldOp([])


def widest(size: int, element: ir.Type, most: int) -> int:
    """Returns the elements of the widest vector, up to 16 bytes and `most` elements, that divides rows of `size` elements."""
    width = min(_VECTOR_BYTES // byte_width(element), most)
    while size % width:
        width //= 2
    return width


def by_width(
    element: ir.Type, fits: Callable[[int], ir.Value], results: Sequence[ir.Type], build: Callable[[int], Sequence[ir.Value]]
) -> list[ir.Value]:
    """Calls `build` for all widths of vectors up to 16 bytes, and emits a choice of the widest that `fits` at run time.

    Single elements always fit. All threads of a block must choose the same width.
    """

    def narrower(width: int) -> Sequence[ir.Value]:
        if width == 1:
            return build(1)
        choice = scf.IfOp(fits(width), list(results), has_else=True)
        for block, values in ((choice.then_block, lambda: build(width)), (choice.else_block, lambda: narrower(width // 2))):
            with ir.InsertionPoint(block):
                scf.YieldOp(list(values()))
        return list(choice.results)

    return list(narrower(_VECTOR_BYTES // byte_width(element)))


def load(type_: ir.VectorType, buffer: ir.Value, at: Sequence[ir.Value]) -> ir.Value:
    """Loads a vector from an address that is aligned to its size."""
    return vector.load(type_, buffer, list(at), alignment=_bytes(type_))


def store(value: ir.Value, buffer: ir.Value, at: Sequence[ir.Value]) -> None:
    """Stores a vector to an address that is aligned to its size."""
    vector.store(value, buffer, list(at), alignment=_bytes(ir.VectorType(value.type)))


def shared(at: int, shape: list[int], element: ir.Type) -> ir.Value:
    """Returns a memref in the block's shared memory, from byte `at` on (a multiple of 16)."""
    space = ir.Attribute.parse("#gpu.address_space<workgroup>")
    dynamic = ir.ShapedType.get_dynamic_size()
    i8 = ir.IntegerType.get_signless(8)
    memory = gpu.dynamic_shared_memory(ir.MemRefType.get([dynamic], i8, memory_space=space))
    return memref.view(ir.MemRefType.get(shape, element, memory_space=space), memory, index(at), [])


def last_at_most(positions: ir.Value, limit: ir.Value) -> ir.Value:
    """Returns the last row whose position is at most `limit`. Positions ascend, and the first one is at most `limit`.

    The last position, which is the end of the last row, is not read. All lanes take equally many steps.
    """
    i = ir.IndexType.get()
    search = scf.WhileOp([i, i], [index(0), arith.subi(memref.dim(positions, index(0)), index(1))])
    before = ir.Block.create_at_start(search.before, [i, i], [search.location] * 2)
    with ir.InsertionPoint(before):
        row, left = before.arguments
        scf.ConditionOp(below(index(1), left), [row, left])
    after = ir.Block.create_at_start(search.after, [i, i], [search.location] * 2)
    with ir.InsertionPoint(after):
        row, left = after.arguments
        half = arith.shrui(left, index(1))
        middle = arith.addi(row, half)
        begun = arith.cmpi(arith.CmpIPredicate.ule, load_index(positions, middle), limit)
        scf.YieldOp([arith.select(begun, middle, row), arith.subi(left, half)])
    return search.results[0]


def sync_warp() -> None:
    """Waits for all threads of the warp. Then each sees what the others wrote to shared memory."""
    nvvm.bar_warp_sync(arith.constant(ir.IntegerType.get_signless(32), -1))


def total(value: ir.Value, lanes: int = WARP) -> ir.Value:
    """Returns the sum of a number over `lanes` neighbouring lanes (a power of two), in all of them. For words of a whole warp
    it is one instruction."""
    word = ir.IntegerType.get_signless(32)
    if value.type == word and lanes == WARP:
        return nvvm.redux_sync(value, ir.Attribute.parse("#nvvm<reduction_kind add>"), arith.constant(word, -1))
    return across(value, added, lanes)


def across(value: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value], lanes: int = WARP) -> ir.Value:
    """Combines the numbers of `lanes` neighbouring lanes (a power of two) in pairs. All of these lanes get the result."""
    distance = lanes // 2
    while distance:
        value = combine(value, _of_lane(value, distance))
        distance //= 2
    return value


def _of_lane(value: ir.Value, distance: int) -> ir.Value:
    """Returns the number (32 or 64 bits) that the lane with lane number xor `distance` has."""
    i32 = ir.IntegerType.get_signless(32)
    mode = ir.Attribute.parse("#gpu<shuffle_mode xor>")
    single, words = vector_of(1, value.type), vector_of(byte_width(value.type) // 4, i32)
    halves = vector.bitcast(words, vector.broadcast(single, value))
    constants = arith.constant(i32, distance), arith.constant(i32, WARP)
    others = [gpu.shuffle(vector.extract(halves, [], [i]), *constants, mode)[0] for i in range(words.shape[0])]
    return vector.extract(vector.bitcast(single, vector.from_elements(words, others)), [], [0])


def _bytes(type_: ir.VectorType) -> int:
    return byte_width(type_.element_type) * type_.shape[0]


def _x() -> ir.Attribute:
    return ir.Attribute.parse("#gpu<dim x>")
