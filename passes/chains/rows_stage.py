"""The body of a chain's stage of maps, sums and maxima of rows: loops over the features, with tokens in the lanes.

    mean = sum(x)              one sweep
    c = x - mean / N           another sweep, in which the sum takes c from registers
    v = sum(c * c)
    y = c * rsqrt(v / N)       a third sweep, which stores the bytes of q without loading y
    q = int8(round(y * s))

An op joins the sweep of the previous ops unless it needs a reduction of a whole row from them. A map to int8 makes quads of
four features, with 128 added to each byte.
"""

from collections.abc import Callable, Mapping
from math import gcd, inf
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.passes.chains.frame import Frame
from gossamer.passes.chains.inner_products import emit_inner, features_at_once
from gossamer.passes.chains.plan_chain import columns, inner_products, is_quantized, reads
from gossamer.passes.loops.epilogue import on_lanes
from gossamer.passes.loops.queries import defining, dims
from gossamer.passes.loops.vectors import index, loop, narrowed, splat_of, vector_of, widened, zeros
from gossamer.passes.weights_int8.byte_products import as_multiplied

_QUAD = 4  # features that are stored together when an op of the stage makes bytes

Join = Callable[[ir.Value, ir.Value], ir.Value]


def emit_rows(ops: list[Any], frame: Frame) -> None:
    """Emits the ops of a stage, in order."""
    sweeps: list[list[Any]] = []
    for op in ops:
        if sweeps and _joins(op, sweeps[-1]):
            sweeps[-1].append(op)
        else:
            sweeps.append([op])
    for sweep in sweeps:
        _emit_sweep(sweep, frame)


def _joins(op: Any, sweep: list[Any]) -> bool:
    """Whether an op has the features of a sweep, and reads of the sweep's results only the current feature."""
    made = {each.operation.results[0]: each for each in sweep}
    if any(inner.x in made for inner in inner_products(op)):
        return False
    own = [read for read in reads(op) if read.operands[0] in made]
    return _features(op) == _features(sweep[0]) and all(
        _is_map(made[read.operands[0]]) and 1 in dims(ir.AffineMapAttr(read.attributes["map"]).value) for read in own
    )


def _emit_sweep(ops: list[Any], frame: Frame) -> None:
    bodies = [_Body(op, frame) for op in ops]
    reductions = [body for body in bodies if not _is_map(body.op)]
    starts = [body.start for body in reductions for _ in range(frame.vectors)]
    inner = [each for op in ops for each in inner_products(op)]
    together = _QUAD if any(_makes_bytes(op) for op in ops) else gcd(_features(ops[0]), features_at_once(frame)) if inner else 1
    if _features(ops[0]) % together:
        raise CompileError(f"a chain quantizes whole quads of features, not {_features(ops[0])}")
    with loop(index(0), index(_features(ops[0]) // together), index(1), starts) as steps:
        step, totals = steps.induction_variable, list(steps.inner_iter_args)
        first = arith.muli(step, index(together)) if together > 1 else step
        features = [arith.addi(first, index(i)) if i else first for i in range(together)]
        products = [(each.operation.results[0], emit_inner(each, features, frame)) for each in inner]
        for v in range(frame.vectors):
            bytes_: dict[ir.Value, list[ir.Value]] = {}
            for number, n in enumerate(features):
                known = {result: values[number * frame.vectors + v] for result, values in products}
                for body in bodies:
                    result, value = body.op.operation.results[0], body.at(n, v, known)
                    if _makes_bytes(body.op):
                        bytes_.setdefault(result, []).append(value)
                    elif _is_map(body.op):
                        known[result] = widened(value, frame.vec)
                        frame.store(value, result, n, v)
                    else:
                        place = reductions.index(body) * frame.vectors + v
                        totals[place] = body.join(totals[place], value)
            for result, quad in bytes_.items():
                vector.store(_line(quad), frame.buffers[result], [step, index(_QUAD * frame.lanes * v)])
        if starts:
            scf.YieldOp(totals)
    for number, body in enumerate(reductions):
        for v in range(frame.vectors):
            frame.store(steps.results[number * frame.vectors + v], body.op.operation.results[0], index(0), v)


def _is_map(op: Any) -> bool:
    return bool(op.operation.name == "kernel.map")


def _makes_bytes(op: Any) -> bool:
    return _is_map(op) and is_quantized(ir.RankedTensorType(op.operation.results[0].type).element_type)


def _features(op: Any) -> int:
    """Returns the number of features of an op."""
    return columns(op.operation.results[0]) if _is_map(op) else int(ir.IntegerAttr(op.size).value)


def _line(quad: list[ir.Value]) -> ir.Value:
    """Joins four vectors of bytes to one that has the four bytes of each token side by side."""
    lanes = ir.VectorType(quad[0].type).shape[0]
    words = vector_of(lanes, ir.IntegerType.get_signless(32))
    line = zeros(words)
    for i, byte in enumerate(quad):
        place = vector.broadcast(words, arith.constant(words.element_type, 8 * i))
        line = arith.ori(line, arith.shli(arith.extui(words, byte), place))
    return as_multiplied(vector.bitcast(vector_of(_QUAD * lanes, ir.IntegerType.get_signless(8)), line), lanes)


def _joined(op: Any, vec: ir.VectorType, value: ir.Value) -> tuple[ir.Value, Join]:
    """Returns the initial value of a reduction of rows, and the function that adds a value.

    Maxima of magnitudes compare bits as integers, which have the same order, with NaN as the greatest. This takes one
    instruction instead of six.
    """
    if op.operation.name == "kernel.sum":
        return zeros(vec), arith.addf
    source, element = defining(value), ir.FloatType(vec.element_type)
    if source is None or source.name != "math.absf":
        return splat_of(vec, -inf), arith.maximumf
    bits = vector_of(vec.shape[0], ir.IntegerType.get_signless(element.width))
    return zeros(vec), lambda a, b: vector.bitcast(vec, arith.maxsi(vector.bitcast(bits, a), vector.bitcast(bits, b)))


class _Body:
    """The body of an op. Its constructor emits the ops that do not depend on the feature, once, before the sweep.

    start, join  for a sum or a maximum: the initial value, and the function that adds a value
    """

    def __init__(self, op: Any, frame: Frame) -> None:
        *body, terminator = [o.operation for o in op.body.blocks[0].operations]
        self.op, self.frame, self.result = op, frame, terminator.operands[0]
        if not _is_map(op):
            element = ir.RankedTensorType(op.operation.results[0].type).element_type
            self.start, self.join = _joined(op, vector_of(frame.lanes, element), self.result)
        varying: set[ir.Value] = set()
        for o in body:
            reads_feature = o.name == "kernel.read" and 1 in dims(ir.AffineMapAttr(o.attributes["map"]).value)
            if reads_feature or o.name == "kernel.inner" or any(v in varying for v in o.operands):
                varying.update(o.results)
        self.varying = [o for o in body if any(r in varying for r in o.results)]
        fixed = [o for o in body if o not in self.varying]
        self.fixed: list[dict[ir.Value, ir.Value]] = []
        for v in range(frame.vectors):
            mapping: dict[ir.Value, ir.Value] = {}
            for o in fixed:
                on_lanes([o], mapping, o.results[0], frame.lanes, frame.reader(index(0), v, {}))
            self.fixed.append(mapping)

    def at(self, n: ir.Value, v: int, known: Mapping[ir.Value, ir.Value]) -> ir.Value:
        """Returns the body's value for feature n and vector v of tokens. Values that are `known` are not loaded."""
        load = self.frame.reader(n, v, known)

        def read(op: ir.Operation, type_: ir.VectorType) -> ir.Value:
            given = known.get(op.operands[0])
            return load(op, type_) if given is None else narrowed(given, type_)

        return on_lanes(self.varying, dict(self.fixed[v]), self.result, self.frame.lanes, read)
