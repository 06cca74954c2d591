"""The ops of the kernel dialect over the edges of a graph: `kernel.attend_edges` and its gradient, and `kernel.reduce_edges`.

%y, %s = "kernel.attend_edges"(%a, %values, %target, %source)
    {heads = 8 : i64, weighted = 0 : i64, scale = 1.0 : f64, slope = 0.2 : f64, dropout = 0.0 : f64,
     operandSegmentSizes = array<i32: 1, 1, 1, 1, 0, 0, 0, 0, 0>}
    : (tensor<?x?xf32, #CSR>, tensor<?x64xf32>, tensor<?x8xf32>, tensor<?x8xf32>) -> (tensor<?x64xf32>, tensor<?x16xf32>)
"""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from gossamer.dialects.kernel import KernelOp, verified

TERMS = ("values", "target", "source", "edge", "queries", "keys", "direction", "seed")
"""The dense operands of attention. Only the first is required."""
SAVED = ("statistics", "gradient", "delta", "entry")
"""The further operands of its gradient. The last one is only given for transposes."""
GRADIENTS = {"target": ("target", "queries", "edge", "weight", "direction"), "source": ("source", "keys", "values")}
"""The operands that have a gradient, by the side of the pattern along which the gradient is summed."""


_TERMS = (
    "a: #W[any any], values: W[columns wide!], target: W[rows heads!]?, source: W[columns heads!]?, edge: W[entries each!]?, "
    "queries: W[rows inner!]?, keys: W[columns inner!]?, direction: W[any inner!]?, seed: i32[any]?"
)


def operands_of(op: Any) -> dict[str, ir.Value]:
    """Returns the dense operands of one of these ops, by name."""
    names = TERMS if op.operation.name == "kernel.attend_edges" else (*TERMS, *SAVED)
    return {name: value for name in names if (value := getattr(op, name)) is not None}


def gradients_of(op: Any) -> list[str]:
    """Returns the names of the operands whose gradients a kernel.attend_edges_grad gives."""
    names = [name for side in GRADIENTS.values() for name in side]
    return [name for name in names if getattr(op, f"of_{name}") is not None]


def _problem(op: Any) -> str | None:
    if (op.queries is None) != (op.keys is None):
        return "needs keys where there are queries, and queries where there are keys"
    if op.direction is not None and op.keys is None:
        return "needs queries and keys where there is a direction"
    dropout = ir.FloatAttr(op.dropout).value
    if not 0 <= dropout < 1 or (dropout > 0) != (op.seed is not None):
        return f"has a dropout of {dropout:g}, which must be in [0, 1), and a seed if and only if it is not 0"
    heads = ir.IntegerAttr(op.heads).value
    columns = ir.RankedTensorType(op.values.type).shape[1]
    if heads < 1 or columns % heads:
        return f"has {columns} columns of values for {heads} heads"
    if op.operation.name == "kernel.attend_edges":
        return None
    side, given = ir.StringAttr(op.side).value, gradients_of(op)
    if side not in GRADIENTS:
        return f"has the side '{side}', must be target or source"
    if not given or any(name not in GRADIENTS[side] for name in given):
        return f"gives gradients of {', '.join(given)}; on the {side} side there are {', '.join(GRADIENTS[side])}"
    return None


class AttendEdgesOp(KernelOp, name="attend_edges", traits=[ext.Pure]):
    """Attention over edges: softmax of scores over the entries of each row, and the sum of rows of values that it weights.

    z[p, h]   = leaky_relu(target[i, h] + source[j, h] + edge[p, h] + scale w[p] <queries[i, h], keys[j, h]>, slope)
    out[i, h] = sum_p keep[p, h] softmax_p(z[p, h]) values[j, h]     over the entries p = (i, j) of row i of the pattern

    With a direction, the last term of z is scale w[p] <direction[h], leaky_relu(queries[i, h] + keys[j, h], slope)>, and there
    is no leaky_relu around z. Without dropout keep is 1. Else it is 0 with probability `dropout`, or 1 / (1 - dropout); seed,
    p and h determine it.

    a              the pattern, CSR. w are its values if `weighted` is 1, else ones.
    values         [columns, heads * features]
    target         [rows, heads]
    source         [columns, heads]
    edge           [entries, heads], or [entries, 1] if all heads have the same
    queries, keys  [rows, heads * size], [columns, heads * size]
    direction      [1, heads * size]
    seed           [1] of i32
    out            [rows, heads * features]
    statistics     [rows, 2 * heads]: the largest score of each row, then 1 / sum of exp(z - largest)
    """

    takes = _TERMS
    gives = "out: W[rows wide!], statistics: W[rows twice!]"

    heads: ir.IntegerAttr
    weighted: ir.IntegerAttr
    scale: ir.FloatAttr
    slope: ir.FloatAttr
    dropout: ir.FloatAttr

    verify_invariants = verified(_problem)


class AttendEdgesGradOp(KernelOp, name="attend_edges_grad", traits=[ext.Pure]):
    """The gradients of kernel.attend_edges along one side of the pattern. It recomputes the softmax.

    side        "target": `a` is the pattern; "source": `a` is its transpose, whose rows are the columns of the pattern
    statistics  those of the forward op
    gradient    [rows, heads * features], the gradient of its result
    delta       [rows, heads], the sum over features of result times gradient
    entry       [entries], for a transpose: the place of each entry in the values of `a` and in `edge`
    of_…        the gradients, in the shapes of the operands. The one of the direction is a part for each row, still to be
                summed: [rows, heads * size].
    """

    takes = f"{_TERMS}, statistics: W[rows twice!], gradient: W[rows wide!], delta: W[rows heads!], entry: i[entries]?"
    gives = (
        "of_target: W[rows heads!]?, of_queries: W[rows inner!]?, of_edge: W[entries each!]?, of_weight: W[entries one!]?, "
        "of_direction: W[rows inner!]?, of_source: W[columns heads!]?, of_keys: W[columns inner!]?, "
        "of_values: W[columns wide!]?"
    )

    side: ir.StringAttr
    heads: ir.IntegerAttr
    weighted: ir.IntegerAttr
    scale: ir.FloatAttr
    slope: ir.FloatAttr
    dropout: ir.FloatAttr

    verify_invariants = verified(_problem)


_READS = tuple(f"affine_map<(d0, d1, d2) -> ({dim}, d2)>" for dim in ("d0", "d1"))


def _reduce_problem(op: Any) -> str | None:
    if ir.StringAttr(op.kind).value not in ("add", "max", "min"):
        return f"has the kind {op.kind}, must be add, max or min"
    *body, end = [inner.operation for inner in op.body.blocks[0].operations]
    if end.name != "kernel.yield":
        return "body must end in kernel.yield"
    for inner in body:
        if inner.name != "kernel.read":
            continue
        if str(inner.attributes["map"]) not in _READS:
            return "body reads a row by (r, c, f) -> (r, f), or what belongs to a column by (r, c, f) -> (c, f)"
    return None


class ReduceEdgesOp(KernelOp, name="reduce_edges", traits=[ext.Pure]):
    """y[r, f] = the sum, maximum or minimum (`kind`, with NaNs kept) of body over the entries (r, c) of row r of the pattern.

    A row without entries gives 0. The body reads matrices by (r, c, f) -> (r, f) and by (r, c, f) -> (c, f).

    %y = "kernel.reduce_edges"(%a) ({ %0 = "kernel.read"(%x) ...; "kernel.yield"(%0) }) {kind = "max"}
        : (tensor<?x?xf32, #CSR>) -> tensor<?x64xf32>
    """

    takes = "a: #t[rows columns]"
    gives = "result: t[rows features!]"

    kind: ir.StringAttr
    body: ext.Region

    verify_region_invariants = verified(_reduce_problem)
