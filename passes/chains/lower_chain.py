"""lower-chain: lowers a function of several kernel ops to loops in which a tile of tokens goes through all of them.

before   %h = "kernel.spmm"(%x, %up) ({... gelu ...}) {schedule = "broadcast", ...}
         %y = "kernel.spmm"(%h, %down) ({... + kernel.read(%x) ...}) {schedule = "broadcast", ...}
after    if tiles >= threads
           scf.parallel (%tile) = ...              // for each phase: all its stages, tile by tile
             call @region_pack(...)                // x, feature-major, into this thread's scratch memory
             call @region_product(...)             // or _tile48, _tile32, _tile16 for the last tokens
             call @region_product1(...)
             call @region_unpack(...)
         else                                      // stage by stage; threads share out rows and heads
           scf.parallel ...  scf.parallel ...

plan_chain.py finds the stages and the places of their values; stages.py and its neighbours emit their bodies. Each product has
the inner loops of its own family (`Family.chain`). Stages that differ only in their operands share a function, so that equal
layers of a network compile once. A function with a single kernel op is left to the schedule's own lowering, unless its epilogue
has a dense product. Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, func, memref, scf

from gossamer.dialects.errors import CompileError
from gossamer.dialects.kernel import integers
from gossamer.passes.chains.attention_pairs import AttentionInPairs
from gossamer.passes.chains.attention_stage import Attention, Sequence
from gossamer.passes.chains.attention_tiles import FEATURES, AttentionInTiles
from gossamer.passes.chains.expanded_product import emit_expanded_product
from gossamer.passes.chains.frame import Frame
from gossamer.passes.chains.normalize_stage import emit_norm
from gossamer.passes.chains.plan_chain import (
    Chain,
    Result,
    Rounded,
    Stage,
    Tiled,
    attended,
    columns,
    factor,
    inner_products,
    others_read,
    plan_chain,
    results,
    tile_operands,
)
from gossamer.passes.chains.products import chain_product
from gossamer.passes.chains.rotate_stage import emit_rotation
from gossamer.passes.chains.rows_stage import emit_rows
from gossamer.passes.chains.stages import (
    Unpack,
    emit_pack,
    emit_pack_rounded,
    emit_product,
    emit_round,
    emit_unpack,
    view,
)
from gossamer.passes.chains.tiling import Tile, Tiling, expansion, together_of
from gossamer.passes.loops.buffers import buffer_of, sparse_buffers_of
from gossamer.passes.loops.openmp import thread_number
from gossamer.passes.loops.queries import defining, public_functions
from gossamer.passes.loops.row_shares import ends_of
from gossamer.passes.loops.vectors import byte_width, call_narrowest, index, parallel, reserve_workspace, vector_of

TILE_WORKSPACE = "kernel.tile_workspace"
"""Module attribute [tokens, shared, scratch]: the workspace has `shared` more bytes for each tile of `tokens` tokens, and
`scratch` more bytes for each thread and each tile of a sequence."""

_WRITE = "bufferization.materialize_in_destination"
_KERNEL_OPS = ("kernel.spmm", "kernel.map", "kernel.sum", "kernel.max", "kernel.normalize", "kernel.rotate", "kernel.attend")


@dataclass(frozen=True)
class LowerChain:
    """Lower chains of kernel ops to scf and vector. `bf16` says whether the target multiplies pairs of bf16, `tiles` whether it
    multiplies tiles of bf16 (AMX)."""

    bf16: bool = False
    tiles: bool = False

    def run(self, module: ir.Module) -> None:
        for function in public_functions(module):
            ops = [op for op in function.entry_block.operations if op.operation.name in _KERNEL_OPS]
            if len(ops) > 1 or any(inner_products(op) for op in ops):
                _Lowering(module, function, ops, self.bf16, self.tiles).lower()


class _Lowering:
    def __init__(self, module: ir.Module, function: func.FuncOp, ops: list[Any], bf16: bool, tiles: bool) -> None:
        self.module, self.function, self.ops, self.multiplies_tiles = module, function, ops, tiles
        self.writes = [o.operation for o in function.entry_block.operations if o.operation.name == _WRITE]
        returned = [_result(write) for write in self.writes]
        if not {each.value for each in returned} <= {op.operation.results[0] for op in ops}:
            raise CompileError(f"@{function.name.value} returns what none of its kernel ops computes")
        self.out = returned[0].out
        products = [op for op in ops if op.operation.name == "kernel.spmm"]
        self.lanes = ir.IntegerAttr(products[0].lanes).value
        # A single product has the tile of its own schedule, and stores its result while it multiplies.
        self.tokens = min(chain_product(op).tokens for op in products)
        if len(products) == 1:
            self.tokens = min(self.tokens, integers(products[0].tile)[0])
        self.chain: Chain = plan_chain(function.operation, ops, returned, self.lanes, self.tokens, bf16)
        self.together = together_of(self.chain)
        *_, self.workspace, self.threads = function.entry_block.arguments
        self.attention = next((op for op in ops if op.operation.name == "kernel.attend"), None)
        masks = [
            op for op in ops if op.operation.name == "kernel.attend" and len(op.mask) and not ir.BoolAttr(op.key_mask).value
        ]
        row = self.tokens * byte_width(self.chain.sum_type)
        self.scratch = (self.tokens * row * (2 if masks else 1) + 64) if self.attention is not None else 0
        self.functions: dict[str, dict[int, func.FuncOp]] = {}
        self.places: dict[str, list[ir.Location]] = {}
        self.names: dict[str, int] = {}

    def lower(self) -> None:
        chain = self.chain
        reserve_workspace(self.module, self.together * chain.private_bytes)
        i64 = ir.IntegerType.get_signless(64)
        numbers = [self.tokens, chain.shared_bytes, self.scratch]
        self.module.operation.attributes[TILE_WORKSPACE] = ir.ArrayAttr.get([ir.IntegerAttr.get(i64, n) for n in numbers])
        with ir.InsertionPoint(self.writes[0]), self.writes[0].location:
            self._geometry()
            plenty = scf.IfOp(arith.cmpi(arith.CmpIPredicate.uge, self.tiling.tiles, self.threads), has_else=True)
            with ir.InsertionPoint(plenty.then_block):
                for phase in range(chain.phases):
                    self._by_tiles([stage for stage in chain.stages if stage.phase == phase])
                scf.YieldOp([])
            with ir.InsertionPoint(plenty.else_block):
                for stage in chain.stages:
                    self._by_parts(stage)
                scf.YieldOp([])
        for write in self.writes:
            write.erase()
        block = self.function.entry_block
        for op in [op for op in block.operations if op.operation.name in (*_KERNEL_OPS, "kernel.regroup")][::-1]:
            op.operation.erase()

    def _geometry(self) -> None:
        """Computes the tiles, and the begin of each part of the workspace: that of the tiles, then that of the threads."""
        total = memref.dim(self.out, index(0))
        length = self.attention.length if self.attention is not None else total
        self.tiling = Tiling(self.tokens, self.together, total, length, self.threads)
        self.private = arith.muli(self.tiling.tiles, index(self.chain.shared_bytes))
        slots = arith.muli(self.threads, index(self.together * self.chain.private_bytes))
        self.scratch_base = arith.addi(self.private, slots)

    def _by_tiles(self, stages: list[Stage]) -> None:
        """Emits one phase: each thread takes tiles and does all stages on them."""
        with self.tiling.tasks() as (first, count):
            thread = thread_number()
            slot = arith.muli(thread, index(self.together)) if self.together > 1 else thread
            leading = self.tiling.tile(first, slot)
            for stage in stages:
                ends = index(0), index(stage.splits)
                if self.together == 1 or expansion(stage) is not None:
                    self._call(stage, leading, *ends, count)
                    continue
                with self.tiling.each(first, count, slot) as tile:
                    self._call(stage, tile, *ends)

    def _by_parts(self, stage: Stage) -> None:
        """Emits one stage for more threads than tiles: several threads share each tile."""
        tiles = self.tiling.tiles
        if stage.splits == 1:
            with parallel(tiles) as task:
                self._call(stage, self.tiling.tile(task, task), index(0), index(1))
            return
        parts = arith.minui(arith.divui(self.threads, tiles), index(stage.splits))
        with parallel(arith.muli(tiles, parts)) as task:
            number, part = arith.divui(task, parts), arith.remui(task, parts)
            low, high = ends_of(index(stage.splits), part, parts)
            self._call(stage, self.tiling.tile(number, number), low, high)

    def _call(self, stage: Stage, tile: Tile, low: ir.Value, high: ir.Value, count: ir.Value | None = None) -> None:
        """Calls the stage's function for the width of the tile. A product that expands weights takes `count` tiles at once."""
        memory, indices = self._memory(stage), [self._offset(v, tile) for v in self._tiled(stage)]
        sequences = self.tiling.sequences
        first = arith.addi(arith.muli(tile.within, sequences), tile.sequence) if stage.strided else tile.first
        indices += [first, tile.valid, low, high, *([sequences] if stage.strided else [])]
        if expansion(stage) is not None:
            slot = arith.muli(thread_number(), index(self.together))
            indices += [arith.addi(self._private(slot), index(self.chain.expanded)), index(1) if count is None else count]
        if stage.kind == "attend":
            scratch = arith.muli(self.tiling.per_sequence, index(self.scratch))
            mine = arith.addi(self.scratch_base, arith.muli(thread_number(), scratch))
            start, *others = self.tiling.of_sequence(tile)
            at = [self._offset(v, replace(tile, number=start)) for v in attended(stage)[1:]]
            indices += [self.tiling.length, tile.within, tile.sequence, *at, mine, *others]
        arguments = [self.workspace, *(b for group in memory.values() for b in group), *indices]
        call_narrowest(tile.valid, self._variants(stage, [v.type for v in arguments]), arguments)

    def _offset(self, value: Tiled, tile: Tile) -> ir.Value:
        """Returns the place in the workspace where the tile's part of a value begins, in bytes."""
        place, chain = self.chain.places[value], self.chain
        if place.shared:
            return arith.addi(arith.muli(tile.number, index(chain.shared_bytes)), index(place.offset))
        return arith.addi(self._private(tile.slot), index(place.offset))

    def _private(self, slot: ir.Value) -> ir.Value:
        """Returns the begin of the private memory of a thread or tile."""
        return arith.addi(self.private, arith.muli(slot, index(self.chain.private_bytes)))

    def _tiled(self, stage: Stage) -> list[Tiled]:
        """Returns the values of the tile that a stage reads or computes."""
        return list(dict.fromkeys([*tile_operands(stage), *results(stage)]))

    def _memory(self, stage: Stage) -> dict[ir.Value, list[ir.Value]]:
        """Returns the memrefs outside of the tile that a stage reads or writes."""
        if stage.kind == "round":
            return {}
        if stage.kind == "unpack":
            return {stage.out: [stage.out]} if stage.out is not None else {}
        if stage.kind == "pack":
            assert stage.value is not None
            regroup = defining(stage.value)
            return {stage.value: [buffer_of(regroup.operands[0] if stage.strided and regroup else stage.value)]}
        found: dict[ir.Value, list[ir.Value]] = {} if stage.out is None else {stage.out: [stage.out]}
        for op in stage.ops:
            if stage.kind == "product":
                found[op.w] = sparse_buffers_of(op.w)
            if stage.kind == "attend":
                found.update({m: [buffer_of(m)] for m in op.mask})
            if stage.kind == "normalize":
                found[op.weight] = [buffer_of(op.weight)]
            if stage.kind in ("attend", "normalize", "rotate"):
                continue
            found.update({value: [buffer_of(value)] for value in others_read(op)})
        return found

    def _variants(self, stage: Stage, types: list[ir.Type]) -> dict[int, func.FuncOp]:
        """Returns the stage's functions by their tokens, widest first."""
        key = self._key(stage, types)
        places = self.places.setdefault(key, [])
        places.append(stage.ops[0].location if stage.ops else ir.Location.unknown())
        if key not in self.functions:
            number = self.names[stage.kind] = self.names.get(stage.kind, -1) + 1
            widest = self.tokens // self.lanes
            name = f"{self.function.name.value}_{stage.kind}{number or ''}"
            self.functions[key] = {
                v * self.lanes: self._function(f"{name}_tile{v * self.lanes}", stage, types, v) for v in range(widest, 0, -1)
            }
        for function in self.functions[key].values():
            function.operation.location = ir.Location.fused(places)
        return self.functions[key]

    def _key(self, stage: Stage, types: list[ir.Type]) -> str:
        """Returns a text of everything that a stage's functions depend on. Equal keys mean equal code."""
        tiled = self._tiled(stage)
        order: dict[Any, str] = {value: f"tile{number}" for number, value in enumerate(tiled)}
        order |= {value: f"outside{number}" for number, value in enumerate(self._memory(stage))}
        text = []
        for op in stage.ops:
            attributes = {n: str(op.operation.attributes[n]) for n in op.operation.attributes}
            stored = str(op.w.type) if stage.product is not None else ""
            text.append(f"{op.operation.name} {attributes} {stored} {[order.get(v, '') for v in op.operation.operands]}")
            for region in op.operation.regions:
                text += _body_text(region.blocks[0], order)
        places = [(columns(v), p.rows, str(p.element), p.beside) for v, p in ((v, self.chain.places[v]) for v in tiled)]
        return "\n".join([stage.kind, str(stage.gives), str(stage.out is None), str(types), str(places), *text])

    def _function(self, name: str, stage: Stage, types: list[ir.Type], vectors: int) -> func.FuncOp:
        with ir.InsertionPoint(self.function.operation):
            function = func.FuncOp(name, (types, []), visibility="private")
        with ir.InsertionPoint(function.add_entry_block()), stage.ops[0].location if stage.ops else ir.Location.unknown():
            self._fill(function, stage, vectors)
            func.ReturnOp([])
        return function

    def _fill(self, function: func.FuncOp, stage: Stage, vectors: int) -> None:
        """Emits the body of a stage's function, for a tile of `vectors` vectors of tokens."""
        workspace, *arguments = function.entry_block.arguments
        outside: dict[ir.Value, tuple[ir.Value, ...]] = {}
        for value, memory in self._memory(stage).items():
            outside[value], arguments = tuple(arguments[: len(memory)]), arguments[len(memory) :]
        tiled, width = self._tiled(stage), vectors * self.lanes
        offsets, (first, valid, low, high, *rest) = arguments[: len(tiled)], arguments[len(tiled) :]
        places = [(v, self.chain.places[v], offset) for v, offset in zip(tiled, offsets, strict=True)]

        def frame_of(tile: ir.Value | None = None) -> Frame:
            """Returns the frame of one of several tiles. Its values are as far from those of the first as the tiles' memory."""
            buffers = {}
            for v, place, offset in places:
                apart = index(self.chain.shared_bytes if place.shared else self.chain.private_bytes)
                at = offset if tile is None else arith.addi(offset, arith.muli(tile, apart))
                buffers[v] = view(workspace, place, width, at)
            return Frame(vector_of(self.lanes, self.chain.sum_type), vectors, buffers, outside, low, high)

        frame = frame_of()
        buffers = frame.buffers
        match stage.kind:
            case "pack" if stage.gives is not None:
                emit_pack_rounded(Rounded(stage.value, stage.gives), frame, first, valid)
            case "pack":
                emit_pack(stage.value, frame, first, valid, rest[0] if stage.strided else None)
            case "unpack":
                size, step = index(columns(stage.value)), rest[0] if stage.strided else None
                emit_unpack(stage.value, frame, outside[stage.out][0], first, valid, step, index(0), size)
            case "round":
                assert stage.gives is not None
                emit_round(Rounded(stage.value, stage.gives), frame)
            case "product" if (expanded := expansion(stage)) is not None:
                assert stage.product is not None
                start, tiles = rest
                memory = memref.view(ir.MemRefType.get([expanded.nbytes], _byte()), workspace, start, [])
                emit_expanded_product(stage.ops[0], stage.product, factor(stage), stage.gives, frame, frame_of, tiles, memory)
            case "product":
                assert stage.product is not None
                unpack = None if stage.out is None else self._unpack(stage, frame, outside[stage.out][0], first, valid)
                emit_product(stage.ops[0], stage.product, buffers[factor(stage)], stage.gives, frame, unpack)
            case "rows":
                emit_rows(stage.ops, frame)
            case "normalize":
                emit_norm(stage.ops[0], frame)
            case "rotate":
                emit_rotation(stage.ops[0], frame)
            case "attend":
                self._fill_attention(stage, frame, workspace, first, valid, rest)

    @staticmethod
    def _unpack(stage: Stage, frame: Frame, out: ir.Value, first: ir.Value, valid: ir.Value) -> Unpack:
        """Returns the function that stores the features of a product into the result."""
        return partial(emit_unpack, results(stage)[0], frame, out, first, valid, None)

    def _fill_attention(
        self, stage: Stage, frame: Frame, workspace: ir.Value, first: ir.Value, valid: ir.Value, rest: list[ir.Value]
    ) -> None:
        (op,) = stage.ops
        length, within, number, keys, values, scratch, *others = rest
        element = self.chain.sum_type
        size, dynamic = index(byte_width(element)), ir.ShapedType.get_dynamic_size()
        # Pairs of bf16 are read as words of 32 bits.
        everything = ir.MemRefType.get([dynamic], ir.IntegerType.get_signless(32) if stage.dots else element)
        bytes_ = memref.dim(workspace, index(0))
        memory = memref.view(everything, workspace, index(0), [arith.divui(bytes_, size)])
        width = frame.vectors * self.lanes
        rows = arith.muli(arith.ceildivui(length, index(self.tokens)), index(self.tokens))
        table = ir.MemRefType.get([dynamic, width], element)
        scores = memref.view(table, workspace, scratch, [rows])
        mask = None
        if len(op.mask) and not ir.BoolAttr(op.key_mask).value:
            after = arith.addi(scratch, arith.muli(rows, index(width * byte_width(element))))
            mask = memref.view(table, workspace, after, [rows])
        tile = index(self.chain.shared_bytes // byte_width(element))
        sequence = Sequence(
            length, within, number, memory, arith.divui(keys, size), arith.divui(values, size), tile, self.tokens, tuple(others)
        )
        queries = frame.buffers[attended(stage)[0]]
        if not stage.dots:
            Attention(op, frame, queries, sequence, scores, scores, mask).emit(first, valid)
            return
        lines = ir.MemRefType.get([dynamic, 2 * width], ir.BF16Type.get())
        given = op, frame, queries, sequence, scores, memref.view(lines, workspace, scratch, [rows]), mask
        if self.multiplies_tiles and ir.IntegerAttr(op.head_size).value % FEATURES == 0:
            halves = ir.MemRefType.get([dynamic], ir.BF16Type.get())
            whole = memref.view(halves, workspace, index(0), [arith.divui(bytes_, index(2))])
            AttentionInTiles(*given, halves=whole).emit(first, valid)
        else:
            AttentionInPairs(*given).emit(first, valid)


def _byte() -> ir.Type:
    return ir.IntegerType.get_signless(8)


def _result(write: ir.Operation) -> Result:
    """Returns the value of a write, its memory, and whether a kernel.regroup comes before it."""
    value, out = write.operands[0], write.operands[1]
    regroup = defining(value)
    strided = regroup is not None and regroup.name == "kernel.regroup"
    return Result(regroup.operands[0] if regroup is not None and strided else value, out, strided)


def _body_text(block: ir.Block, order: dict[ir.Value, str]) -> list[str]:
    """Returns the ops of a body as text that does not depend on the names of values."""
    names = dict(order)
    names.update({argument: f"argument{n}" for n, argument in enumerate(block.arguments)})
    lines = []
    for number, inner in enumerate(block.operations):
        op = inner.operation
        attributes = {n: str(op.attributes[n]) for n in op.attributes}
        operands = [names.get(v) or _constant(v) for v in op.operands]
        lines.append(f"{op.name} {attributes} {operands} {[str(r.type) for r in op.results]}")
        names.update(dict.fromkeys(op.results, f"value{number}"))
    return lines


def _constant(value: ir.Value) -> str:
    """Returns the text of a constant from outside of the body."""
    op = defining(value)
    if op is None or op.name != "arith.constant":
        raise CompileError(f"the body of a kernel op captures {value}")
    return str(op.attributes["value"])
