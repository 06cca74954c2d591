"""Emits the epilogue of a kernel op on vectors: the scalar ops of its region become vector ops.

Kernels compute sums feature-major (lanes are tokens), and store results token-major (lanes are features). Ops that depend on
the sum, on scalars and on vectors of features run on the sums (`before`), while these are in registers. Ops that read a whole
[T, M] tensor or a vector of tokens run after the transpose (`after`). One value crosses between the two parts, in the memory of
the sums. If one is not enough or does not fit there, or if there are several results, all ops run after.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.dialects.errors import CompileError
from gossamer.passes.loops.queries import defining, dims
from gossamer.passes.loops.vectors import index, mask_of, vector_of, zeros

Read = Callable[[ir.Operation, ir.VectorType], ir.Value]
Load = Callable[[ir.VectorType, ir.Value, list[ir.Value]], ir.Value]


class Epilogue:
    """Splits the block of an epilogue. `before` and `after` emit its two parts at the insertion point."""

    def __init__(self, block: ir.Block) -> None:
        *body, terminator = [op.operation for op in block.operations]
        self.sum, self.results = block.arguments[0], list(terminator.operands)
        self._summed = _users({self.sum}, body)
        self.inner = [op for op in body if op.name == "kernel.inner"]
        late = _users({r for op in body if op in self.inner or _reads_tokens(op) for r in op.results}, body)
        self._before = [op for op in body if not any(r in late for r in op.results)]
        self._after = [op for op in body if any(r in late for r in op.results)]
        self.crossing = self.results[0]
        if self._after:
            crossing = {v for op in self._after for v in op.operands if v in self._summed and v not in late}
            self.crossing = crossing.pop() if len(crossing) == 1 else self.sum
        if self.trivial or len(self.results) > 1 or not _fits(self.crossing.type, self.sum.type):
            self._before, self._after, self.crossing = [], body, self.sum

    @property
    def trivial(self) -> bool:
        """Whether the part before the transpose is empty."""
        return self.crossing == self.sum

    @property
    def result(self) -> ir.Value:
        """The only result."""
        (result,) = self.results
        return result

    def before(self, sums: ir.Value, read: Read) -> ir.Value:
        """Emits the first part for a vector of sums of one feature. Returns the crossing value."""
        (crossing,) = self._emit(self._before, {self.sum: sums}, [self.crossing], read)
        return crossing

    def after(self, crossing: ir.Value, read: Read) -> list[ir.Value]:
        """Emits the second part for a vector of crossing values of one token. Returns the values of the results."""
        missing = [op for op in self._before if not any(r in self._summed for r in op.results)]
        return self._emit(missing + self._after, {self.crossing: crossing}, self.results, read)

    def every(self, sums: ir.Value, read: Read) -> list[ir.Value]:
        """Emits both parts for a vector of sums of one token. Returns the values of the results."""
        return self._emit(self._before + self._after, {self.sum: sums}, self.results, read)

    def whole(self, sums: ir.Value, read: Read) -> ir.Value:
        """Emits both parts for a vector of sums of one token. Returns the value of the only result."""
        (value,) = self.every(sums, read)
        return value

    def _emit(
        self, body: list[ir.Operation], mapping: dict[ir.Value, ir.Value], wanted: list[ir.Value], read: Read
    ) -> list[ir.Value]:
        lanes = ir.VectorType(next(iter(mapping.values())).type).shape[0]
        _emit_lanes(body, mapping, lanes, read)
        return [_lanes_of(value, mapping, lanes) for value in wanted]


def on_lanes(body: list[ir.Operation], mapping: dict[ir.Value, ir.Value], wanted: ir.Value, lanes: int, read: Read) -> ir.Value:
    """Emits the scalar ops of a body on vectors. Returns the value `wanted`. `mapping` has the vectors of known values."""
    _emit_lanes(body, mapping, lanes, read)
    return _lanes_of(wanted, mapping, lanes)


def _lanes_of(value: ir.Value, mapping: dict[ir.Value, ir.Value], lanes: int) -> ir.Value:
    return mapping[value] if value in mapping else splat(value, lanes)


def _emit_lanes(body: list[ir.Operation], mapping: dict[ir.Value, ir.Value], lanes: int, read: Read) -> None:
    for op in body:
        with op.location:
            _emit_op(op, mapping, lanes, read)


def _emit_op(op: ir.Operation, mapping: dict[ir.Value, ir.Value], lanes: int, read: Read) -> None:
    types = [vector_of(lanes, r.type) for r in op.results]
    if op.name in ("kernel.read", "kernel.inner"):
        mapping[op.results[0]] = read(op, types[0])
        return
    if op.name == "arith.constant":
        mapping[op.results[0]] = splat(op.results[0], lanes)
        return
    operands = [mapping[v] if v in mapping else mapping.setdefault(v, splat(v, lanes)) for v in op.operands]
    attributes = {name: op.attributes[name] for name in op.attributes}
    clone = ir.Operation.create(op.name, results=types, operands=operands, attributes=attributes)
    mapping.update(zip(op.results, clone.results, strict=True))


def check_elements(contract: Any) -> None:
    """Raises CompileError unless results and reads are floats, and each read has its dimensions in the result's order."""
    elements = [ir.RankedTensorType(result.type).element_type for result in contract.operation.results]
    for read in contract.epilogue.blocks[0].operations:
        if read.operation.name == "kernel.read":
            affine_map = ir.AffineMapAttr(read.map).value
            elements.append(read.result.type)
            if any(d is None and str(e) != "0" for d, e in zip(dims(affine_map), affine_map.results, strict=True)):
                raise CompileError(f"no schedule for an epilogue that reads by {affine_map}")
            positions = [d for d in dims(affine_map) if d is not None]
            if positions != sorted(set(positions)):
                raise CompileError(f"no schedule for an epilogue that reads by {affine_map}, which is not in order")
    for element in elements:
        if not isinstance(element, ir.FloatType):
            raise CompileError(f"no schedule for elements of type {element}")


def reader(buffers: dict[ir.Value, ir.Value], at: Sequence[ir.Value], load: Load) -> Read:
    """Returns the kernel.read for lanes along the second dimension of the result, from `at` on.

    `load` loads lanes of a buffer from some indices on. A read that is the same for all lanes is one load and a broadcast.
    """

    def read(op: ir.Operation, type_: ir.VectorType) -> ir.Value:
        buffer, positions = buffers[op.results[0]], _dims(op)
        where = [index(0) if d is None else at[d] for d in positions]
        if 1 not in positions:
            return vector.broadcast(type_, memref.load(buffer, where))
        return load(type_, buffer, where)

    return read


class Buffers:
    """The memory of the kernel.read ops of an epilogue and of the results. Reads and stores lanes of it."""

    def __init__(self, reads: dict[ir.Value, ir.Value], out: ir.Value, *others: ir.Value) -> None:
        self.reads, self.out, self._outs = reads, out, (out, *others)
        self.tokens = memref.dim(out, index(0))
        self.features = memref.dim(out, index(1))

    def by_feature(self, m: ir.Value) -> Read:
        """Returns the kernel.read for lanes that are tokens of feature m."""

        def read(op: ir.Operation, type_: ir.VectorType) -> ir.Value:
            at = [index(0) if d is None else m for d in _dims(op)]
            return vector.broadcast(type_, memref.load(self.reads[op.results[0]], at))

        return read

    def store_token(self, token: ir.Value, row: ir.Value, lanes: int, results: Callable[[Read], list[ir.Value]]) -> None:
        """Stores results(read) to out[token, row..] for each result. Lanes are the features from `row` on. A token past the end
        is not stored, and reads the memory of the last one."""
        mask = mask_of(lanes, arith.subi(self.features, row))
        none = arith.constant(mask.type, ir.DenseElementsAttr.get_splat(mask.type, ir.BoolAttr.get(False)))
        exists = arith.cmpi(arith.CmpIPredicate.ult, token, self.tokens)
        mask = arith.select(exists, mask, none)
        safe = arith.minui(token, arith.subi(self.tokens, index(1)))
        self._store([safe, row], mask, results)

    def store_whole(self, token: ir.Value, row: ir.Value, results: Callable[[Read], list[ir.Value]]) -> None:
        """Stores results(read) to out[token, row..] for each result. The token and all features of the lanes must exist."""
        self._store([token, row], None, results)

    def _store(self, at: list[ir.Value], mask: ir.Value | None, results: Callable[[Read], list[ir.Value]]) -> None:
        def load(type_: ir.VectorType, buffer: ir.Value, at: list[ir.Value]) -> ir.Value:
            if mask is None:
                return vector.load(type_, buffer, at)
            return vector.maskedload(type_, buffer, at, mask, zeros(type_))

        for out, values in zip(self._outs, results(reader(self.reads, at, load)), strict=True):
            if mask is None:
                vector.store(values, out, at)
            else:
                vector.maskedstore(out, at, mask, values)


def _dims(read: ir.Operation) -> list[int | None]:
    return dims(ir.AffineMapAttr(read.attributes["map"]).value)


def reads_tokens(read: ir.Operation) -> bool:
    """Whether a kernel.read depends on the token, the first dimension of the result."""
    return 0 in _dims(read)


def _reads_tokens(op: ir.Operation) -> bool:
    return op.name == "kernel.read" and reads_tokens(op)


def splat(scalar: ir.Value, lanes: int) -> ir.Value:
    """Returns a constant from outside the kernel as a vector. It is made again, so that the kernel captures no value."""
    op = defining(scalar)
    assert op is not None and op.name == "arith.constant", f"epilogue captures {scalar}"
    constant = ir.Operation.create("arith.constant", results=[scalar.type], attributes={"value": op.attributes["value"]})
    return vector.broadcast(vector_of(lanes, scalar.type), constant.results[0])


def _users(values: set[ir.Value], body: list[ir.Operation]) -> set[ir.Value]:
    """Returns `values` and all values that are computed from them."""
    found = set(values)
    for op in body:
        if any(v in found for v in op.operands):
            found.update(op.results)
    return found


def _fits(type_: ir.Type, sum_type: ir.Type) -> bool:
    """Whether a value can be stored in the memory of a sum without loss."""
    if not isinstance(type_, ir.FloatType) or not isinstance(sum_type, ir.FloatType):
        return False
    return ir.FloatType(type_).width <= ir.FloatType(sum_type).width
