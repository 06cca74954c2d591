"""Shorthands for building loops and vectors at the current insertion point."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch_mlir import ir
from torch_mlir.dialects import arith, func, memref, scf, vector

from gossamer.passes.loops.queries import all_ops

WORKSPACE = "kernel.workspace"  # module attribute: bytes of workspace that each thread needs

ROLLED = "llvm.loop_annotation"  # attribute of a loop that must not be unrolled (see lower-to-llvm)


def index(value: int) -> ir.Value:
    """Returns the index constant `value`."""
    return arith.constant(ir.IndexType.get(), value)


def vector_of(lanes: int, element: ir.Type) -> ir.VectorType:
    """Returns the type vector<lanes x element>."""
    return ir.VectorType.get([lanes], element)


def mask_of(lanes: int, valid: ir.Value) -> ir.Value:
    """Returns a vector<lanes x i1> whose first `valid` lanes are set."""
    return vector.create_mask(vector_of(lanes, ir.IntegerType.get_signless(1)), [valid])


def zeros(type_: ir.VectorType) -> ir.Value:
    """Returns a vector of zeros."""
    element = type_.element_type
    if isinstance(element, ir.IntegerType):
        return arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, ir.IntegerAttr.get(element, 0)))
    return splat_of(type_, 0.0)


def splat_of(type_: ir.VectorType, value: float) -> ir.Value:
    """Returns a vector with the same float in all lanes."""
    return arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, ir.FloatAttr.get(type_.element_type, value)))


def byte_width(type_: ir.Type) -> int:
    """Returns the bytes of a float or integer element."""
    return (ir.IntegerType(type_).width if isinstance(type_, ir.IntegerType) else ir.FloatType(type_).width) // 8


def lowest_of(element: ir.Type) -> float:
    """Returns the lowest finite f32 or f64. It is below all scores, but unlike infinity, minus itself it gives 0."""
    return -3.4028234663852886e38 if byte_width(element) == 4 else -1.7976931348623157e308


def load_index(buffer: ir.Value, *at: ir.Value) -> ir.Value:
    """Loads buffer[at], an unsigned position or coordinate, as an index."""
    loaded = memref.load(buffer, list(at))
    return loaded if isinstance(loaded.type, ir.IndexType) else arith.index_castui(ir.IndexType.get(), loaded)


def widened(value: ir.Value, to: ir.Type) -> ir.Value:
    """Extends a float, a signed integer or a vector of them to the type `to`, unless it already has it."""
    if value.type == to:
        return value
    return arith.extsi(to, value) if is_integer(to) else arith.extf(to, value)


def multiplied(a: ir.Value, b: ir.Value, sums: ir.Value) -> ir.Value:
    """Returns sums + a b for vectors of floats or integers. Floats are rounded once."""
    return arith.addi(sums, arith.muli(a, b)) if is_integer(sums.type) else vector.fma(a, b, sums)


def added(a: ir.Value, b: ir.Value) -> ir.Value:
    """Returns a + b for floats, integers or vectors of them."""
    return arith.addi(a, b) if is_integer(a.type) else arith.addf(a, b)


def is_integer(type_: ir.Type) -> bool:
    """Whether this is an integer type, or a vector of integers."""
    element = ir.VectorType(type_).element_type if isinstance(type_, ir.VectorType) else type_
    return isinstance(element, ir.IntegerType)


def narrowed(value: ir.Value, to: ir.Type) -> ir.Value:
    """Rounds a float or a vector of floats to the type `to`, unless it already has it."""
    return value if value.type == to else arith.truncf(to, value)


def in_all_lanes(pair: ir.Value, lanes: int = 16) -> ir.Value:
    """Repeats a pair of bf16 `lanes` times, as one vector."""
    i32 = ir.IntegerType.get_signless(32)
    word = vector.extract(vector.bitcast(vector_of(1, i32), pair), [], [0])
    line = vector_of(2 * lanes, ir.VectorType(pair.type).element_type)
    return vector.bitcast(line, vector.broadcast(vector_of(lanes, i32), word))


@contextmanager
def loop(low: ir.Value, high: ir.Value, step: ir.Value, carried: Sequence[ir.Value] = ()) -> Iterator[scf.ForOp]:
    """Makes an scf.for with the insertion point in its body. Without carried values, it adds the yield."""
    op = scf.ForOp(low, high, step, list(carried))
    with ir.InsertionPoint(op.body):
        yield op
        if not carried:
            scf.YieldOp([])


@contextmanager
def rolled(low: ir.Value, high: ir.Value, carried: Sequence[ir.Value] = ()) -> Iterator[scf.ForOp]:
    """Makes a loop over entries, of which there are often few, so it is not unrolled."""
    with loop(low, high, index(1), carried) as op:
        op.operation.attributes[ROLLED] = ir.Attribute.parse("#llvm.loop_annotation<unroll = <disable = true>>")
        yield op


def keep_rolled(module: ir.Module) -> None:
    """Renames the annotations of rolled loops, which are branches by now, to the name that the translation to LLVM IR reads."""
    for op in all_ops(module.operation):
        if ROLLED in op.attributes:
            op.attributes["loop_annotation"] = op.attributes[ROLLED]


@contextmanager
def parallel(tasks: ir.Value) -> Iterator[ir.Value]:
    """Makes an scf.parallel over tasks from 0 on, with the insertion point in its body. Yields the number of a task."""
    op = scf.ParallelOp([], [index(0)], [tasks], [index(1)], [])
    block = ir.Block.create_at_start(op.region, [ir.IndexType.get()], [op.operation.location])
    with ir.InsertionPoint(block):
        yield block.arguments[0]
        scf.ReduceOp([], 0)


def transpose(rows: Sequence[ir.Value]) -> list[ir.Value]:
    """Transposes a square of n vectors of n elements (n a power of two) in log2(n) steps of two-source shuffles.

    Each step swaps the off-diagonal halves of all blocks of 2s x 2s (Eklundh, 1972).
    """
    values, n = list(rows), len(rows)
    span = n // 2
    while span:
        for i in range(n):
            if i & span:
                continue
            a, b = values[i], values[i + span]
            values[i] = vector.shuffle(a, b, [n + j - span if j & span else j for j in range(n)])
            values[i + span] = vector.shuffle(a, b, [n + j if j & span else j + span for j in range(n)])
        span //= 2
    return values


def sums_across(vectors: Sequence[ir.Value]) -> ir.Value:
    """Returns a vector of n sums: those of the lanes of each of n vectors (n a power of two, not more than lanes).

    Each step adds halves of the lanes of each sum. It joins two vectors into one as long as there are several.
    """
    found = list(vectors)
    lanes = ir.VectorType(found[0].type).shape[0]
    width = lanes  # lanes that belong to one sum
    while width > 1:
        low = [at + i for at in range(0, lanes, width) for i in range(width // 2)]
        high = [at + width // 2 for at in low]
        if len(found) > 1:
            both = [[*half, *(lanes + at for at in half)] for half in (low, high)]
            pairs = zip(found[::2], found[1::2], strict=True)
            found = [arith.addf(*(vector.shuffle(a, b, order) for order in both)) for a, b in pairs]
        else:
            narrower = [vector.shuffle(found[0], found[0], order) for order in (low, high)]
            found, lanes = [arith.addf(*narrower)], lanes // 2
        width //= 2
    return found[0]


def interleaved(a: ir.Value, b: ir.Value, size: int) -> tuple[ir.Value, ir.Value]:
    """Interleaves two vectors, `size` elements of a and of b in turn. Returns the two halves of the result."""
    lanes = ir.VectorType(a.type).shape[0]
    order = [half * lanes + at + i for at in range(0, lanes, size) for half in (0, 1) for i in range(size)]
    first, second = (vector.shuffle(a, b, half) for half in (order[:lanes], order[lanes:]))
    return first, second


def deinterleaved(a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Splits the elements of a followed by b into those with even and those with odd numbers."""
    lanes = ir.VectorType(a.type).shape[0]
    even, odd = (vector.shuffle(a, b, list(range(first, 2 * lanes, 2))) for first in (0, 1))
    return even, odd


def call_narrowest(left: ir.Value, variants: dict[int, func.FuncOp], arguments: Sequence[ir.Value]) -> None:
    """Calls the narrowest of the functions that takes all `left` tokens. Keys are the tokens of each, widest first."""
    widest, *rest = variants
    if not rest:
        func.CallOp(variants[widest], list(arguments))
        return
    needed = arith.cmpi(arith.CmpIPredicate.ugt, left, index(rest[0]))
    choice = scf.IfOp(needed, has_else=True)
    with ir.InsertionPoint(choice.then_block):
        func.CallOp(variants[widest], list(arguments))
        scf.YieldOp([])
    with ir.InsertionPoint(choice.else_block):
        call_narrowest(left, {tokens: variants[tokens] for tokens in rest}, arguments)
        scf.YieldOp([])


def reserve_workspace(module: ir.Module, size: int) -> None:
    """Notes on the module that each thread needs at least `size` bytes of workspace."""
    attributes = module.operation.attributes
    known = ir.IntegerAttr(attributes[WORKSPACE]).value if WORKSPACE in attributes else 0
    attributes[WORKSPACE] = ir.IntegerAttr.get(ir.IndexType.get(), max(known, size))
