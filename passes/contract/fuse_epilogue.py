"""fuse-epilogue: turns a contraction and the elementwise ops on its result into one `kernel.contract`.

before   %0 = linalg.generic (fill with 0) ...
         %1 = linalg.generic {parallel, parallel, reduction} ins(%x, %w) outs(%0) { out + in * in_1 }
         %2 = linalg.generic {parallel, parallel} ins(%1, %bias) { math.tanh(in + in_1) }
after    %2 = "kernel.contract"(%x, %w) ({ ^bb0(%sum): tanh(%sum + kernel.read(%bias)) }) {indexing_maps = [...]}

If the function returns several of these values, the contraction has as many results.

Expects generic ops (after linalg-generalize-named-ops and linalg-fuse-elementwise-ops). A contraction without a sparse factor
stays as it is. Narrow factors are widened to the type of the sum, as linalg does.
"""

from dataclasses import dataclass

from torch_mlir import ir

from gossamer.dialects.kernel import ReadOp, end, product
from gossamer.passes.loops.queries import clone_into, defining, dims, filled_with, parallel, reductions, walk

_MULTIPLIED = {"arith.addf": "arith.mulf", "arith.addi": "arith.muli"}  # the op that adds up → the one that multiplies


@dataclass(frozen=True)
class FuseEpilogue:
    """Turn contractions with a sparse factor, and the elementwise generics after them, into `kernel.contract`."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "linalg.generic"):
            if is_product(op) and _has_sparse_factor(op):
                _fuse(op)


def is_product(op: ir.Operation) -> bool:
    """Whether `op` is sum(a * b), starting from zero, with maps that are projected permutations."""
    if len(op.operands) != 3 or len(op.results) != 1 or not reductions(op) or filled_with(op.operands[2]) != 0:
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


def _has_sparse_factor(op: ir.Operation) -> bool:
    return any(ir.RankedTensorType(v.type).encoding is not None for v in list(op.operands)[:2])


def _widened(value: ir.Value) -> ir.Value:
    op = defining(value)
    return op.operands[0] if op is not None and op.name in ("arith.extf", "arith.extsi") else value


def _maps(op: ir.Operation) -> list[ir.AffineMap]:
    return [ir.AffineMapAttr(a).value for a in ir.ArrayAttr(op.attributes["indexing_maps"])]


def _fuse(op: ir.Operation) -> None:
    lhs, rhs, _ = op.operands
    members, several = _members(op)
    last = members[-1]
    ends = list(several.operands) if several is not None else _ends(members)
    maps = ir.ArrayAttr.get(list(ir.ArrayAttr(op.attributes["indexing_maps"]))[:2])
    with ir.InsertionPoint(last), ir.Location.fused([op.location, last.location]):
        contract = product("contract", [lhs, rhs], {"indexing_maps": maps}, [value.type for value in ends])
        block = ir.Block.create_at_start(
            contract.epilogue, [ir.RankedTensorType(op.results[0].type).element_type], [last.location]
        )
        with ir.InsertionPoint(block):
            values: dict[ir.Value, ir.Value] = {op.results[0]: block.arguments[0]}
            for epilogue in members[1:]:
                values[epilogue.results[0]] = _inline(epilogue, values)
            end(*(values[value] for value in ends))
    if several is None:
        ends[0].replace_all_uses_with(contract.result)
    else:  # the function may return the same value twice
        for position, result in enumerate(contract.operation.results):
            several.operands[position] = result
    for dead in reversed(members):
        dead.erase()


def _members(op: ir.Operation) -> tuple[list[ir.Operation], ir.Operation | None]:
    """Returns a contraction and the elementwise generics after it that are fused into it, in order, and maybe the return op.

    It takes as many generics as leave one value that other ops use. It takes all of them, and gives the return op, if the
    function returns several of their values and no other op uses any.
    """
    members, computed = [op], {op.results[0]}
    block = [each.operation for each in op.parent.regions[0].blocks[0].operations]
    for other in block[block.index(op) + 1 :]:
        if _is_epilogue(other, computed):
            members.append(other)
            computed.add(other.results[0])
    returned = list(block[-1].operands)
    if len(returned) > 1 and set(returned) <= computed and set(_ends(members)) <= set(returned):
        return members, block[-1]
    count = next(n for n in range(len(members), 0, -1) if n == 1 or len(_ends(members[:n])) == 1)
    return members[:count], None


def _ends(members: list[ir.Operation]) -> list[ir.Value]:
    """Returns the values of these ops that other ops use."""
    return [op.results[0] for op in members if any(use.owner.operation not in members for use in op.results[0].uses)]


def _is_epilogue(op: ir.Operation, computed: set[ir.Value]) -> bool:
    """Whether an op is an elementwise generic that reads some of these values at the place of its own element."""
    if op.name != "linalg.generic" or len(op.results) != 1 or not parallel(op):
        return False
    inputs, maps = list(op.operands)[:-1], _maps(op)
    fed = [m for v, m in zip(inputs, maps, strict=False) if v in computed]
    identity = ir.AffineMap.get_identity(ir.RankedTensorType(op.results[0].type).rank)
    block = op.regions[0].blocks[0]
    reads_init = any(True for _ in block.arguments[len(inputs)].uses)
    if not fed or any(m != identity for m in fed) or maps[-1] != identity or reads_init:
        return False
    if any(ir.RankedTensorType(v.type).encoding is not None for v in inputs):
        return False
    return not any(o.operation.name == "linalg.index" for o in block.operations)


def _inline(epilogue: ir.Operation, values: dict[ir.Value, ir.Value]) -> ir.Value:
    """Clones the body of `epilogue` at the insertion point. Returns the value that it yields.

    `values` maps tensors that it reads to their elements; it reads the others by kernel.read.
    """
    block, maps = epilogue.regions[0].blocks[0], _maps(epilogue)
    mapping: dict[ir.Value, ir.Value] = {}
    for i, operand in enumerate(list(epilogue.operands)[:-1]):
        argument = block.arguments[i]
        mapping[argument] = (
            values[operand]
            if operand in values
            else ReadOp(operand, ir.AffineMapAttr.get(maps[i]), result=argument.type).result
        )
    return clone_into(block, mapping)[0]
