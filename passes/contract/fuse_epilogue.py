"""fuse-epilogue: a contraction and the elementwise work on its result become one `kernel.contract`.

before   %0 = linalg.generic (fill with 0) ...
         %1 = linalg.generic {parallel, parallel, reduction} ins(%x, %w) outs(%0) { out + in * in_1 }
         %2 = linalg.generic {parallel, parallel} ins(%1, %bias) { math.tanh(in + in_1) }
after    %2 = "kernel.contract"(%x, %w) ({ ^bb0(%sum): tanh(%sum + kernel.read(%bias)) }) {indexing_maps = [...]}

Expects generic ops (after linalg-generalize-named-ops and linalg-fuse-elementwise-ops). A contraction that has no factor with
a sparse encoding is left alone. Narrow factors are widened to the accumulator's type, as linalg has it.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir

from gossamer.dialects.kernel import ContractOp, ReadOp, YieldOp
from gossamer.passes.loops.queries import clone_into, defining, dims, filled_with, parallel, reductions, sole_user, walk

_MULTIPLIED = {"arith.addf": "arith.mulf", "arith.addi": "arith.muli"}  # by what adds up


@dataclass(frozen=True)
class FuseEpilogue:
    """Turn contractions with a sparse factor, and the elementwise generics after them, into `kernel.contract`."""

    name: ClassVar[str] = "fuse-epilogue"

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "linalg.generic"):
            if _is_contraction(op):
                _fuse(op)


def _is_contraction(op: ir.Operation) -> bool:
    """Whether `op` is sum(a * b) from zero, over projected permutations, with a sparse factor."""
    if len(op.operands) != 3 or len(op.results) != 1 or not reductions(op):
        return False
    factors = [ir.RankedTensorType(v.type) for v in list(op.operands)[:2]]
    if all(f.encoding is None for f in factors) or filled_with(op.operands[2]) != 0:
        return False
    maps = _maps(op)
    if not all(m.is_projected_permutation for m in maps):
        return False
    if dims(maps[2]) != list(range(maps[2].n_dims - len(reductions(op)))):
        return False
    block = op.regions[0].blocks[0]
    body = list(block.operations)
    total = defining(body[-1].operands[0])
    if total is None or total.name not in _MULTIPLIED or block.arguments[2] not in list(total.operands):
        return False
    product = next((defining(v) for v in total.operands if v != block.arguments[2]), None)
    if product is None or product.name != _MULTIPLIED[total.name]:
        return False
    return {_widened(v) for v in product.operands} == {block.arguments[0], block.arguments[1]}


def _widened(value: ir.Value) -> ir.Value:
    op = defining(value)
    return op.operands[0] if op is not None and op.name in ("arith.extf", "arith.extsi") else value


def _maps(op: ir.Operation) -> list[ir.AffineMap]:
    return [ir.AffineMapAttr(a).value for a in ir.ArrayAttr(op.attributes["indexing_maps"])]


def _fuse(op: ir.Operation) -> None:
    lhs, rhs, _ = op.operands
    result = op.results[0]
    epilogues: list[ir.Operation] = []
    while (user := _epilogue_of(result)) is not None:
        epilogues.append(user)
        result = user.results[0]
    last = epilogues[-1] if epilogues else op
    maps = ir.ArrayAttr.get(list(ir.ArrayAttr(op.attributes["indexing_maps"]))[:2])
    with ir.InsertionPoint(last), last.location:
        contract = ContractOp(lhs, rhs, maps, result=result.type)
        block = ir.Block.create_at_start(
            contract.epilogue, [ir.RankedTensorType(op.results[0].type).element_type], [last.location]
        )
        with ir.InsertionPoint(block):
            value: ir.Value = block.arguments[0]
            feed = op.results[0]
            for epilogue in epilogues:
                value = _inline(epilogue, feed, value)
                feed = epilogue.results[0]
            YieldOp(value)
    result.replace_all_uses_with(contract.result)
    for dead in reversed([op, *epilogues]):
        dead.erase()


def _epilogue_of(result: ir.Value) -> ir.Operation | None:
    """The one elementwise generic that reads `result` element by element, if it can go into the contraction."""
    user = sole_user(result)
    if user is None or user.name != "linalg.generic" or len(user.results) != 1 or not parallel(user):
        return None
    inputs, maps = list(user.operands)[:-1], _maps(user)
    identity = ir.AffineMap.get_identity(ir.RankedTensorType(result.type).rank)
    fed = [m for v, m in zip(inputs, maps, strict=False) if v == result]
    block = user.regions[0].blocks[0]
    reads_init = any(True for _ in block.arguments[len(inputs)].uses)
    if not fed or any(m != identity for m in fed) or maps[-1] != identity or reads_init:
        return None
    if any(ir.RankedTensorType(v.type).encoding is not None for v in inputs):
        return None
    if any(o.operation.name == "linalg.index" for o in block.operations):
        return None
    return user


def _inline(epilogue: ir.Operation, feed: ir.Value, value: ir.Value) -> ir.Value:
    """Clone the body of `epilogue` at the insertion point, with `value` for `feed`; returns what it yields."""
    block, maps = epilogue.regions[0].blocks[0], _maps(epilogue)
    mapping: dict[ir.Value, ir.Value] = {}
    for i, operand in enumerate(list(epilogue.operands)[:-1]):
        argument = block.arguments[i]
        mapping[argument] = (
            value if operand == feed else ReadOp(operand, ir.AffineMapAttr.get(maps[i]), result=argument.type).result
        )
    return clone_into(block, mapping)[0]
