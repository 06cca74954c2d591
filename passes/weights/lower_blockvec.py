"""lower-blockvec: lowers a `kernel.spmm` of the schedule "blockvec" to loops over blocks that are stored as vectors.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "blockvec", tile = [8], ...}
             : (..., tensor<3072x768xf32, "blockvec(reduction=1, rows=4, columns=4, depth=1)">) -> ...
after    scf.parallel (%task) = ...                    // token tiles x chunks of the weight's rows
           func.call @region_vectors8(...)             // or _vectors4, _vectors2, _vectors1 for the last tokens
         func.func private @region_vectors8(...)
           pack: x into the workspace as [K / 4][8 tokens][4], so that the x of a block is contiguous
           for each 16 rows, each 4 of them:
             scf.for %p iter_args(a vector a token)    // 4 rows x 4 partial sums
               vector.fma(values[p], x[coordinates[p]][token] repeated for each row, sums)
           the partial sums of 16 rows are added up    // 16 totals make a vector of results
           through the epilogue into y

Each value of the weight is loaded once for all tokens, and the results need no transpose. A single token, and blocks of 16
columns or more, read x without packing it. Runs on functions whose storage is exposed (expose-storage). Nothing is read or
written past the end of a tensor: the last loads of x are masked, tokens past the last one repeat it and are not stored.

Fastest for blocks and few tokens: 4.4 times as fast as "broadcast" at "768x3072 1x16 90% 1 token" in
benchmarks/results/intel-xeon-graniterapids/prediction.json.
"""

from dataclasses import dataclass
from functools import partial
from math import gcd, inf
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import BlockVectors, Packing
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.encodings import storage_of_type
from gossamer.passes.loops.product import Operands, products
from gossamer.passes.loops.vectors import (
    byte_width,
    index,
    interleaved,
    load_index,
    loop,
    mask_of,
    reserve_workspace,
    vector_of,
    widened,
    zeros,
)
from gossamer.passes.weights.few_tokens import WeightInLanes
from gossamer.passes.weights.token_tile import tile_bytes

_TOKENS = 8  # tokens that share the loads of the weight
_DEEPEST = 16  # most vectors of a block, which share one coordinate
_CHAINS = 8  # independent sums that keep two multiply-adds a cycle busy, each of which takes four cycles
_MULTIPLY, _BYTES, _VECTOR, _GROUP, _ADDED, _STORED, _PACKED = 0.58, 0.64, 1.3, 0.65, 2.1, 3.5, 0.27  # cycles, see _cycles


def _storage(matrix: Matrix) -> BlockVectors | None:
    """Returns the storage. A vector has as many rows as the block allows; its columns follow from its lanes."""
    if matrix.block is None:
        return None
    rows = gcd(matrix.block[0], matrix.lanes)
    columns = matrix.lanes // rows
    if matrix.block[1] % columns or -(-matrix.columns // columns) > 1 << 16:
        return None
    whole = 1 if matrix.columns % columns else gcd(matrix.block[1], matrix.columns) // columns
    depth = max(n for n in range(1, _DEEPEST + 1) if whole % n == 0)
    return BlockVectors(matrix.reduction, rows, columns, depth)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens]."""
    return (_TOKENS,) if isinstance(stored, BlockVectors) and stored.rows * stored.columns == matrix.lanes else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of all tiles. With vectors of p rows x q columns, a tile of n tokens takes the sum of

    - n (0.58 + 0.64 q / L) for each of the nnz / fill / L vectors: its multiply-adds, and the bytes of x that they read,
    - 1.3 to load each of these vectors,
    - 0.65 for each of M / p groups, to start and end its loop,
    - 2.1 (q - 1) + 3.5 for each of the n M / L vectors of results,
    - 0.27 n K to pack x, unless n is 1.
    """
    stored = _storage(matrix)
    if stored is None:
        return inf
    rows, lanes = matrix.rows, matrix.lanes
    vectors = matrix.nonzeros / matrix.fill / lanes
    full, left = divmod(tokens, _TOKENS)
    tiles = [_TOKENS] * full + ([min(n for n in (1, 2, 4, 8) if left <= n)] if left else [])
    total = 0.0
    for n in tiles:
        total += vectors * (n * (_MULTIPLY + _BYTES * stored.columns / lanes) + _VECTOR) + _GROUP * rows / stored.rows
        total += n * rows / lanes * (_ADDED * (stored.columns - 1) + _STORED) + (_PACKED * n * matrix.columns if n > 1 else 0)
    return total


BLOCKVEC = Family("blockvec", _storage, _tile, _cycles)


@dataclass(frozen=True)
class LowerBlockvec:
    """Lower products with blocks that lie in vectors to scf and vector."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, BLOCKVEC.name):
            blocks = _BlockVectors(op)
            reserve_workspace(module, blocks.workspace)
            _lower(blocks)


class _BlockVectors(WeightInLanes):
    """A product of `tokens` tokens at a time."""

    def __init__(self, op: Any) -> None:
        super().__init__(op)
        stored = storage_of_type(ir.RankedTensorType(op.w.type))
        if not isinstance(stored, BlockVectors) or stored.rows * stored.columns != self.lanes:
            raise CompileError(f"a weight stored as {stored} is not stored in vectors of {self.lanes} lanes")
        tile = integers(op.tile)
        if tile not in ([1], [2], [4], [8]):
            raise CompileError(f"tile {tile} is not one of 1, 2, 4 or 8 tokens")
        self.stored, (self.tokens,) = stored, tile
        self.pieces = -(-self.K // self.lanes)  # vectors that cover a row of x
        self.workspace = tile_bytes(self, self.lanes, self.tokens * (stored.columns + self.pieces))

    def packs(self, count: int) -> bool:
        """Whether `count` tokens are packed. One token is not; nor are few, if a block reads whole cache lines of x anyway."""
        return count == _TOKENS or (count > 1 and self.stored.columns * self.stored.depth < self.lanes)


def _lower(product: _BlockVectors) -> None:
    widths = [n for n in (8, 4, 2, 1) if n <= product.tokens]
    with product.op.location:
        variants = {n: product.function(f"vectors{n}", partial(_emit, product, n)) for n in widths}
        product.by_tiles(variants, product.workspace)


def _emit(product: _BlockVectors, count: int, operands: Operands) -> None:
    _Rows(product, count, operands).emit()


class _Rows:
    """Emits the body of a function that computes `count` tokens."""

    def __init__(self, product: _BlockVectors, count: int, operands: Operands) -> None:
        self.product, self.stored, self.lanes, self.count = product, product.stored, product.lanes, count
        self.operands, self.memory = operands, operands.memory
        self.vec = vector_of(self.lanes, product.sum_type)
        last = arith.subi(self.memory.tokens, index(1))
        self.tokens = [arith.addi(operands.first, index(t)) for t in range(count)]
        self.safe_tokens = [arith.minui(t, last) for t in self.tokens]
        self.packed = self._packed() if product.packs(count) else None

    def emit(self) -> None:
        stored, lanes = self.stored, index(self.lanes)
        per_unit, every = index(stored.columns), index(-(-self.product.M // stored.rows))
        partial_sums = self._partial_sums()
        with loop(self.operands.low, self.operands.high, index(1)) as units:
            unit = units.induction_variable
            row = arith.muli(unit, lanes)
            if stored.columns == 1:
                totals = self._group(unit)
            else:
                start = arith.muli(unit, per_unit)
                with loop(start, arith.minui(arith.addi(start, per_unit), every), index(1)) as groups:
                    group = groups.induction_variable
                    for t, sums in enumerate(self._group(group)):
                        vector.store(sums, partial_sums, [index(t), arith.subi(group, start), index(0)])
                totals = [self._totals(partial_sums, t) for t in range(self.count)]
            for token, total in zip(self.tokens, totals, strict=True):
                self.memory.store_token(token, row, self.lanes, partial(self.product.epilogue.every, total))

    def _partial_sums(self) -> ir.Value:
        """Returns memory for the partial sums of the groups that make a vector of rows, for each token."""
        type_ = ir.MemRefType.get([self.count, self.stored.columns, self.lanes], self.product.sum_type)
        return memref.view(type_, self.operands.workspace, self.operands.offset, [])

    def _packed(self) -> ir.Value:
        """Packs x[tokens, k] as [K / columns][tokens][columns], with zeros past the end of K. Returns the copy.

        In the list of the tokens' vectors, the place of an element is the bits of its token, then those of k. Each step
        interleaves the two halves of the list, `columns` elements at a time. This moves one bit of the token behind the upper
        bits of k.
        """
        product, lanes, columns = self.product, self.lanes, self.stored.columns
        type_ = ir.MemRefType.get([product.pieces * self.count * lanes], product.sum_type)
        used = index(product.tokens * columns * lanes * byte_width(product.sum_type))
        packed = memref.view(type_, self.operands.workspace, arith.addi(self.operands.offset, used), [])
        narrow = vector_of(lanes, ir.MemRefType(self.operands.x.type).element_type)
        with loop(index(0), index(product.K), index(lanes)) as ks:
            k = ks.induction_variable
            mask = mask_of(lanes, arith.subi(index(product.K), k))
            vectors = [
                widened(vector.maskedload(narrow, self.operands.x, [token, k], mask, zeros(narrow)), self.vec)
                for token in self.safe_tokens
            ]
            for _ in range(self.count.bit_length() - 1):
                half = len(vectors) // 2
                vectors = [
                    mixed for a, b in zip(vectors[:half], vectors[half:], strict=True) for mixed in interleaved(a, b, columns)
                ]
            start = arith.muli(k, index(self.count))
            for n, mixed in enumerate(vectors):
                vector.store(mixed, packed, [arith.addi(start, index(n * lanes))])
        return packed

    def _totals(self, partial_sums: ir.Value, t: int) -> ir.Value:
        """Returns a vector of results. Neighbouring lanes are added until each row has one lane."""
        vectors = [vector.load(self.vec, partial_sums, [index(t), index(g), index(0)]) for g in range(self.stored.columns)]
        even, odd = range(0, 2 * self.lanes, 2), range(1, 2 * self.lanes, 2)
        while len(vectors) > 1:
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [arith.addf(vector.shuffle(a, b, list(even)), vector.shuffle(a, b, list(odd))) for a, b in pairs]
        return vectors[0]

    def _group(self, group: ir.Value) -> list[ir.Value]:
        """Returns the sums of a group of rows, a vector for each token.

        A multiply-add takes four cycles. So with few tokens, several vectors of the weight, from one or several blocks, are in
        flight, each with its own sums.
        """
        begin = load_index(self.operands.positions, group)
        end = load_index(self.operands.positions, arith.addi(group, index(1)))
        ways = max(1, _CHAINS // self.count)
        together = max(1, ways // self.stored.depth)
        sums = [zeros(self.vec)] * (self.count * ways)
        if together > 1:
            whole = arith.subi(end, arith.remui(arith.subi(end, begin), index(together)))
            with loop(begin, whole, index(together), sums) as several:
                sums = list(several.inner_iter_args)
                for n in range(together):
                    sums = self._block(arith.addi(several.induction_variable, index(n)), sums, n * self.stored.depth)
                scf.YieldOp(sums)
            begin, sums = whole, list(several.results)
        with loop(begin, end, index(1), sums) as blocks:
            scf.YieldOp(self._block(blocks.induction_variable, list(blocks.inner_iter_args), 0))
        sums = list(blocks.results)
        while len(sums) > self.count:
            half = len(sums) // 2
            sums = [arith.addf(a, b) for a, b in zip(sums[:half], sums[half:], strict=True)]
        return sums

    def _block(self, p: ir.Value, sums: list[ir.Value], turn: int) -> list[ir.Value]:
        """Returns the sums plus the products of one block. Its vectors take turns with the sets of sums, from set `turn` on."""
        stored, sums = self.stored, list(sums)
        element = ir.MemRefType(self.operands.values.type).element_type
        first = load_index(self.operands.coordinates, p)
        start = arith.muli(p, index(self.lanes * stored.depth))
        for step in range(stored.depth):
            at = arith.addi(start, index(step * self.lanes))
            weight = widened(vector.load(vector_of(self.lanes, element), self.operands.values, [at]), self.vec)
            place, way = arith.addi(first, index(step)), (turn + step) * self.count % len(sums)
            for t in range(self.count):
                sums[way + t] = vector.fma(weight, self._x(t, place), sums[way + t])
        return sums

    def _x(self, t: int, place: ir.Value) -> ir.Value:
        """Returns the columns of x from place * columns on, for token t, repeated for each row of a vector of the weight."""
        columns = self.stored.columns
        if self.packed is None:
            x, at = self.operands.x, [self.safe_tokens[t], arith.muli(place, index(columns))]
        else:
            row = arith.addi(arith.muli(place, index(self.count)), index(t))
            x, at = self.packed, [arith.muli(row, index(columns))]
        narrow = vector_of(columns, ir.MemRefType(x.type).element_type)
        if columns == 1:
            return vector.broadcast(self.vec, widened(memref.load(x, at), self.product.sum_type))
        if self.packed is None and self.product.K % columns:
            mask = mask_of(columns, arith.subi(index(self.product.K), at[-1]))
            loaded = vector.maskedload(narrow, x, at, mask, zeros(narrow))
        else:
            loaded = vector.load(narrow, x, at)
        loaded = widened(loaded, vector_of(columns, self.product.sum_type))
        return loaded if columns == self.lanes else vector.shuffle(loaded, loaded, list(range(columns)) * self.stored.rows)
