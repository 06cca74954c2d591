"""Plans a chain: the stages of a function of several kernel ops, their order, and the places of their values in memory.

A tile of tokens goes through all stages while it is in cache. Its values are feature-major, [N][tokens], so that lanes are
tokens and nothing is transposed between products. lower_chain.py emits the code.

    stages   pack (a matrix from outside, into the tile) · round (to bf16, for products of pairs) · product · rows (maps, sums
             and maxima of rows; a map to int8 gives quads) · normalize (heads) · rotate (heads, by position) · attend
             · unpack (a single product does this itself if nothing else reads its result)
    regroup  is no stage: if rows are sorted by position, the tokens of a sequence are packed and unpacked with a stride
    phase    attention needs the keys and values of all tiles of its sequence, so it starts a new phase: all tiles finish one
             phase before the next begins
    places   a value that lives in one phase is in the scratch memory of its thread; a value that crosses phases is in the
             memory of its tile. Values that do not live at the same time share a place.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from torch_mlir import ir

from gossamer.dialects.errors import CompileError
from gossamer.dialects.kernel import integers
from gossamer.passes.chains.products import chain_product
from gossamer.passes.framework.chain_product import ChainProduct, Layout
from gossamer.passes.loops.epilogue import reads_tokens
from gossamer.passes.loops.queries import defining
from gossamer.passes.loops.vectors import byte_width

Kind = Literal["pack", "round", "product", "rows", "normalize", "rotate", "attend", "unpack"]

_PER_HEAD: dict[str, Kind] = {"kernel.attend": "attend", "kernel.normalize": "normalize", "kernel.rotate": "rotate"}

_LINE = 64
_PAIRS = 16  # pairs of bf16 in a vector


class Rounded(NamedTuple):
    """The copy of a value in bf16, which products of pairs read."""

    value: ir.Value
    layout: Layout


Tiled: TypeAlias = "ir.Value | Rounded"
"""A value with a place in the tile."""


@dataclass(eq=False)
class Place:
    """A tile's part of a tensor: `rows` x tokens of `element`, `beside` neighbouring rows side by side in a line. Stages `born`
    to `dies` need it. It begins at byte `offset` of the tile's memory if `shared`, else of the thread's."""

    rows: int
    element: ir.Type
    beside: int
    born: int = -1
    dies: int = -1
    shared: bool = False
    offset: int = -1

    def shape(self, tokens: int) -> list[int]:
        """Returns its shape in memory."""
        return [self.rows // self.beside, self.beside * tokens]

    def nbytes(self, tokens: int) -> int:
        """Returns its bytes."""
        return self.rows * tokens * byte_width(self.element)


@dataclass(eq=False)
class Stage:
    """One step of a chain on a tile.

    ops      the kernel ops that it computes; none for pack, round and unpack
    value    the tensor that it packs, rounds, or unpacks
    phase    stages of one phase run tile by tile
    splits   number of parts that threads may share out
    product  for a product: how it runs
    gives    layout of its result in bf16, for a rounding, or for a product or a pack whose result is only read in bf16
    strided  whether the rows that it packs or unpacks are sorted by position
    out      the memory of the region's result if it stores that
    dots     for attention: whether it multiplies pairs of bf16
    """

    kind: Kind
    ops: list[Any]
    value: ir.Value | None
    phase: int
    splits: int = 1
    product: ChainProduct | None = None
    gives: Layout | None = None
    strided: bool = False
    out: ir.Value | None = None
    dots: bool = False


@dataclass(frozen=True)
class Result:
    """A result of a chain: a value, the memory that it is written to, and whether its rows are sorted by position there."""

    value: ir.Value
    out: ir.Value
    strided: bool


@dataclass(eq=False)
class Chain:
    """The stages of a function in the order in which they run, and the places of its values."""

    function: ir.Operation
    lanes: int
    sum_type: ir.Type
    stages: list[Stage] = field(default_factory=list)
    places: dict[Tiled, Place] = field(default_factory=dict)
    shared_bytes: int = 0
    private_bytes: int = 0
    expanded: int = 0  # the place of expanded weights in the memory of a thread

    @property
    def phases(self) -> int:
        """Number of phases."""
        return 1 + max(stage.phase for stage in self.stages)


def plan_chain(
    function: ir.Operation, ops: list[Any], returned: list[Result], lanes: int, tokens: int, bf16: bool = False
) -> Chain:
    """Returns the chain of the kernel ops of a function, in tiles of `tokens`. CompileError if their sums differ in type.

    `bf16` says whether the target multiplies pairs of bf16.
    """
    chain = Chain(function, lanes, _sum_type(ops))
    phases = _phases(ops)
    staged: list[Stage] = []
    for op in ops:
        name, phase = op.operation.name, phases[op.operation.results[0]]
        if name in ("kernel.map", "kernel.sum", "kernel.max"):
            if staged and staged[-1].kind == "rows" and staged[-1].phase == phase:
                staged[-1].ops.append(op)
                continue
            staged.append(Stage("rows", [op], None, phase))
        elif name in _PER_HEAD:
            stage = Stage(_PER_HEAD[name], [op], None, phase, ir.IntegerAttr(op.heads).value)
            if name == "kernel.attend" and bf16 and lanes == _PAIRS and _in_pairs(op) and _narrow(ops):
                stage.dots = True
                wanted = dict.fromkeys(value for value in attended(stage) if isinstance(value, Rounded))
                given = [(each.value, each.gives) for each in staged if each.kind == "round"]
                staged += [
                    Stage("round", [], value, phases.get(value, phase - 1), gives=layout)
                    for value, layout in wanted
                    if (value, layout) not in given
                ]
            staged.append(stage)
        else:
            product = chain_product(op)
            rounding = ("round", op.x, product.reads)
            if product.reads and all((stage.kind, stage.value, stage.gives) != rounding for stage in staged):
                staged.append(Stage("round", [], op.x, phases.get(op.x, 0), gives=product.reads))
            share = product.share(lanes, bool(inner_products(op)))
            staged.append(Stage("product", [op], None, phase, -(-product.groups // share), product))
    staged = list(_with_unpacks(staged, returned))
    staged.sort(key=lambda stage: stage.phase)
    _add_packs(chain, staged)
    _round_at_once(chain)
    _unpack_at_once(chain)
    _place(chain, tokens)
    return chain


def _with_unpacks(staged: list[Stage], returned: list[Result]) -> Iterator[Stage]:
    """Yields the stages, each followed by those that unpack its results."""
    for stage in staged:
        yield stage
        computed = [op.operation.results[0] for op in stage.ops]
        for each in returned:
            if each.value in computed:
                yield Stage("unpack", [], each.value, stage.phase, strided=each.strided, out=each.out)


def attended(stage: Stage) -> tuple[Tiled, Tiled, Tiled]:
    """Returns the queries, keys and values of attention, as the tile stores them."""
    (op,) = stage.ops
    return (Rounded(op.q, "lines"), Rounded(op.k, "lines"), Rounded(op.v, "rows")) if stage.dots else (op.q, op.k, op.v)


def _in_pairs(op: Any) -> bool:
    """Whether the features of heads form whole pairs."""
    return all(n % 2 == 0 for n in (ir.IntegerAttr(op.head_size).value, *integers(op.offsets)))


def _narrow(ops: list[Any]) -> bool:
    """Whether all products of a chain are less exact than f32. Then attention may be, too."""
    weights = [ir.RankedTensorType(op.w.type).element_type for op in ops if op.operation.name == "kernel.spmm"]
    return all(str(element) in ("i8", "bf16") for element in weights)


def tile_operands(stage: Stage) -> list[Tiled]:
    """Returns the matrices and columns that a stage reads from the tile (keys and values: from all tiles of the sequence)."""
    if stage.kind == "pack":
        return []
    if stage.kind in ("round", "unpack"):
        assert stage.value is not None
        return [stage.value]
    found: dict[Tiled, None] = {}
    inside = {op.operation.results[0] for op in stage.ops}
    for op in stage.ops:
        if stage.kind == "attend":
            found.update(dict.fromkeys(attended(stage)))
            continue
        if stage.kind in _PER_HEAD.values():
            tiled = {"normalize": ("x",), "rotate": ("x", "cos", "sin")}[stage.kind]
            found.update(dict.fromkeys(getattr(op, name) for name in tiled))
            continue
        if stage.product is not None:
            found[factor(stage)] = None
        found.update(dict.fromkeys(value for value in tokens_read(op) if value not in inside))
    return list(found)


def factor(stage: Stage) -> Tiled:
    """Returns the x of a product, as the tile stores it."""
    (op,) = stage.ops
    return Rounded(op.x, stage.product.reads) if stage.product is not None and stage.product.reads else op.x


def results(stage: Stage) -> list[Tiled]:
    """Returns the values that a stage writes into the tile."""
    if stage.kind == "unpack":
        return []
    if stage.gives is not None:
        value = stage.value if stage.value is not None else stage.ops[0].operation.results[0]
        return [Rounded(value, stage.gives), *([value] if stage.product is not None and stage.product.panels > 1 else [])]
    if stage.kind == "pack":
        assert stage.value is not None
        return [stage.value]
    return [op.operation.results[0] for op in stage.ops]


def reads(op: Any) -> list[ir.Operation]:
    """Returns the kernel.read ops in the body of a kernel op."""
    block = op.operation.regions[0].blocks[0]
    return [o.operation for o in block.operations if o.operation.name == "kernel.read"]


def inner_products(op: Any) -> list[Any]:
    """Returns the kernel.inner ops in the body of a kernel op."""
    block = op.operation.regions[0].blocks[0]
    return [o for o in block.operations if o.operation.name == "kernel.inner"]


def tokens_read(op: Any) -> list[ir.Value]:
    """Returns the matrices and columns of tokens that the body of a kernel op reads."""
    return [*(r.operands[0] for r in reads(op) if reads_tokens(r)), *(inner.x for inner in inner_products(op))]


def others_read(op: Any) -> list[ir.Value]:
    """Returns the tensors that its body reads and that have no tokens."""
    return [*(r.operands[0] for r in reads(op) if not reads_tokens(r)), *(inner.w for inner in inner_products(op))]


def columns(tiled: Tiled) -> int:
    """Returns N of a matrix [T, N]."""
    tensor = tiled.value if isinstance(tiled, Rounded) else tiled
    return ir.RankedTensorType(tensor.type).shape[1]


def _held(value: Tiled, sum_type: ir.Type) -> tuple[ir.Type, int]:
    """Returns the element type of a value in the tile, and how many rows lie side by side."""
    if isinstance(value, Rounded):
        return ir.BF16Type.get(), 2 if value.layout == "lines" else 1
    element = ir.RankedTensorType(value.type).element_type
    return (element, 4) if is_quantized(element) else (sum_type, 1)


def is_quantized(element: ir.Type) -> bool:
    """Whether a tile stores elements of this type as bytes, in quads, which vpdpbusd multiplies."""
    return isinstance(element, ir.IntegerType) and ir.IntegerType(element).width == 8


def _sum_type(ops: list[Any]) -> ir.Type:
    """Returns the float type of the tile: that of sums, or f32 if these are integers."""
    sums = [op.epilogue.blocks[0].arguments[0].type for op in ops if op.operation.name == "kernel.spmm"]
    types = {ir.F32Type.get() if isinstance(each, ir.IntegerType) else each for each in sums}
    if len(types) != 1:
        raise CompileError(f"a chain sums in one type, this one in {', '.join(sorted(map(str, types))) or 'none'}")
    return types.pop()


def _phases(ops: list[Any]) -> dict[ir.Value, int]:
    """Returns the phase in which the result of each op is computed."""
    phases: dict[ir.Value, int] = {}
    for op in ops:
        attends = op.operation.name == "kernel.attend"
        sources = list(op.operation.operands)
        if op.operation.regions:
            sources += tokens_read(op)
        # Keys and values from outside are packed in a phase of their own, as if the chain had computed them.
        phases[op.operation.results[0]] = max([int(attends), *(phases[v] + attends for v in sources if v in phases)])
    return phases


def _add_packs(chain: Chain, staged: list[Stage]) -> None:
    """Adds a stage that packs a matrix from outside before the first stage that reads it, for attention a phase earlier."""
    computed = {v for stage in staged for v in results(stage)}
    keys = [v for stage in staged if stage.dots for v in (stage.ops[0].k, stage.ops[0].v)]
    packed: set[Tiled] = set()
    early: list[Stage] = []
    for stage in staged:
        for value in tile_operands(stage):
            if value in computed or value in packed or isinstance(value, Rounded):
                continue
            packed.add(value)
            strided = (source := defining(value)) is not None and source.name == "kernel.regroup"
            if stage.kind == "attend" or (stage.kind == "round" and stage.value in keys):
                early.append(Stage("pack", [], value, max(stage.phase - 1, 0), strided=strided))
            else:
                chain.stages.append(Stage("pack", [], value, stage.phase, strided=strided))
        chain.stages.append(stage)
    chain.stages = sorted([*early, *chain.stages], key=lambda stage: stage.phase)


def _round_at_once(chain: Chain) -> None:
    """Makes products and packs give bf16 themselves, if only a rounding stage reads their result.

    Between panels a product still has its sums in the tile. A line of pairs needs two neighbouring rows at once.
    """
    readers: dict[Tiled, list[Stage]] = {}
    for stage in chain.stages:
        for value in tile_operands(stage):
            readers.setdefault(value, []).append(stage)
    for stage in list(chain.stages):
        if stage.kind in ("pack", "product") and not stage.strided:
            (value,) = results(stage)
            single = stage.product is not None and (stage.product.height % 2 or stage.product.among > 1)
            cut = stage.product is not None and stage.product.expansion is not None
            kinds = [(reader.kind, reader.gives) for reader in readers[value]]
            if (kinds == [("round", "columns")] and not cut) or (kinds == [("round", "lines")] and not single):
                chain.stages.remove(readers[value][0])
                stage.gives = readers[value][0].gives


def _unpack_at_once(chain: Chain) -> None:
    """Makes the only product of a chain store the result itself, if no other stage reads it. Then some rows are stored while
    the next ones are multiplied. With several products, tiles are in the cache anyway."""
    if sum(stage.kind == "product" for stage in chain.stages) > 1:
        return
    for stage in [stage for stage in chain.stages if stage.kind == "unpack" and not stage.strided]:
        assert stage.value is not None
        readers = [each for each in chain.stages if stage.value in tile_operands(each)]
        made = next(each for each in chain.stages if stage.value in results(each))
        product = made.product
        if product is not None and readers == [stage] and not product.stores:
            chain.stages.remove(stage)
            made.out = stage.out
            made.splits = -(-product.groups // product.share(chain.lanes, True))


def _place(chain: Chain, tokens: int) -> None:
    """Gives every value a place. Values that do not live at the same time may share one."""
    born_in: dict[Tiled, int] = {}
    last = {stage.phase: number for number, stage in enumerate(chain.stages)}
    for number, stage in enumerate(chain.stages):
        for value in tile_operands(stage):
            place = chain.places[value]
            # Other tiles may still read keys and values after this one has finished its attention.
            place.dies = last[stage.phase] if stage.kind == "attend" else number
            place.shared = place.shared or born_in[value] != stage.phase
        for value in results(stage):
            unit = _LINE // 2 if isinstance(value, Rounded) else chain.lanes
            rows = -(-columns(value) // unit) * unit
            if stage.product is not None:
                rows = max(rows, stage.product.groups * stage.product.height)
            element, beside = _held(value, chain.sum_type)
            chain.places[value] = Place(rows, element, beside, number, number)
            born_in[value] = stage.phase
    for shared in (True, False):
        laid: list[Place] = []
        for place in chain.places.values():
            if place.shared is shared:
                size = place.nbytes(tokens)
                others = sorted(
                    (p.offset, p.offset + p.nbytes(tokens)) for p in laid if p.born <= place.dies and place.born <= p.dies
                )
                place.offset = 0
                for low, high in others:
                    if place.offset + size <= low:
                        break
                    place.offset = max(place.offset, high)
                laid.append(place)
        used = max((p.offset + p.nbytes(tokens) for p in laid), default=0)
        if shared:
            chain.shared_bytes = -(-used // _LINE) * _LINE
        else:
            chain.expanded = -(-used // _LINE) * _LINE
            expansions = [stage.product.expansion for stage in chain.stages if stage.product is not None]
            used = max((each.nbytes for each in expansions if each is not None), default=0)
            # one line more, so that the threads' memories do not fall on the same cache sets
            chain.private_bytes = chain.expanded + -(-used // _LINE) * _LINE + _LINE
