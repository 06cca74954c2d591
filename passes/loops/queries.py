"""Answers questions about ops and values for several passes, and clones bodies."""

from torch_mlir import ir
from torch_mlir.dialects import func


def all_ops(root: ir.Operation) -> list[ir.Operation]:
    """Returns `root` and every op inside it, outer ones first."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        found.append(op)
        return ir.WalkResult.ADVANCE

    root.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found


def walk(module: ir.Module, name: str) -> list[ir.Operation]:
    """Returns all ops called `name` in the module, also inside other ops."""
    return [op for op in all_ops(module.operation) if op.name == name]


def public_functions(module: ir.Module) -> list[func.FuncOp]:
    """Returns the public functions that have a body."""
    functions = [op for op in module.body.operations if isinstance(op, func.FuncOp) and not op.is_external]
    return [f for f in functions if "sym_visibility" not in f.attributes]


def defining(value: ir.Value) -> ir.Operation | None:
    """Returns the op that computes `value`, or None for a block argument."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def dims(affine_map: ir.AffineMap) -> list[int | None]:
    """Returns the dimension of each result of a projected permutation; None for a constant (a broadcast)."""
    return [ir.AffineDimExpr(e).position if isinstance(e, ir.AffineDimExpr) else None for e in affine_map.results]


def iterator_types(op: ir.Operation) -> list[str]:
    """Returns the iterator kind of each dimension of a generic op: "parallel" or "reduction"."""
    text = [str(a) for a in ir.ArrayAttr(op.attributes["iterator_types"])]
    return ["reduction" if "reduction" in t else "parallel" for t in text]


def reductions(op: ir.Operation) -> list[int]:
    """Returns the dimensions that a generic op reduces."""
    return [i for i, kind in enumerate(iterator_types(op)) if kind == "reduction"]


def parallel(op: ir.Operation) -> bool:
    """Whether a generic op is elementwise."""
    return not reductions(op)


def sole_user(value: ir.Value) -> ir.Operation | None:
    """Returns the only op that uses `value`; None if none or several do."""
    users = {use.owner.operation for use in value.uses}
    return users.pop() if len(users) == 1 else None


def is_constant(value: ir.Value, number: int) -> bool:
    """Whether `value` is this integer or index constant."""
    op = defining(value)
    if op is None or op.name != "arith.constant" or not isinstance(op.attributes["value"], ir.IntegerAttr):
        return False
    return ir.IntegerAttr(op.attributes["value"]).value == number


def filled_with(value: ir.Value) -> float | int | None:
    """Returns the constant that fills a tensor; None for other tensors."""
    op = defining(value)
    while op is not None and op.name in ("tensor.expand_shape", "tensor.collapse_shape"):
        op = defining(op.operands[0])
    if op is None or op.name not in ("linalg.generic", "linalg.fill"):
        return None
    yielded = op.operands[0] if op.name == "linalg.fill" else list(op.regions[0].blocks[0].operations)[-1].operands[0]
    constant = defining(yielded)
    if constant is None or constant.name != "arith.constant":
        return None
    number = constant.attributes["value"]
    return number.value if isinstance(number, ir.FloatAttr | ir.IntegerAttr) else None


def clone_into(block: ir.Block, mapping: dict[ir.Value, ir.Value]) -> list[ir.Value]:
    """Clones `block` without its terminator at the insertion point. Returns the new operands of the terminator.

    `mapping` has the new value of each block argument. Values from outside the block stay as they are.
    """
    *body, terminator = block.operations
    for inner in body:
        op = inner.operation
        clone = ir.Operation.create(
            op.name,
            results=[r.type for r in op.results],
            operands=[mapping.get(v, v) for v in op.operands],
            attributes={name: op.attributes[name] for name in op.attributes},
            loc=op.location,
        )
        mapping.update(zip(op.results, clone.results, strict=True))
    return [mapping.get(v, v) for v in terminator.operands]
