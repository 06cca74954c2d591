"""The ops of the kernel dialect for operations on sparse tensors of any shape, which are arguments of each call.

`kernel.sample` computes one value for each stored entry of a sparse pattern (SDDMM). `kernel.gather_rows` multiplies a sparse
matrix with a dense one, with an epilogue like that of `kernel.contract`. `kernel.multiply_rows` multiplies two sparse ones.

    %y = "kernel.gather_rows"(%a, %x) ({
    ^bb0(%sum: f32):
      %b = "kernel.read"(%bias) {map = affine_map<(d0, d1) -> (d1)>} : (tensor<?xf32>) -> f32
      %0 = arith.addf %sum, %b : f32
      "kernel.yield"(%0) : (f32) -> ()
    }) {lanes = 16 : i64, vectors = 16 : i64} : (tensor<?x?xf32, #CSR>, tensor<?x?xf32>) -> tensor<?x?xf32>

Segments are consecutive entries, such as the rows of a CSR matrix: segment s has the entries from positions[s] up to
positions[s + 1]. `kernel.segment_reduce` gives a value for each segment, `kernel.segment_map` one for each entry or segment.
Their bodies read [segments] tensors by (s, p) -> (s) and [entries] tensors by (s, p) -> (p).

    %m = "kernel.segment_reduce"(%positions) ({ %0 = "kernel.read"(%x) ...; "kernel.yield"(%0) }) {kind = "max"}
    %e = "kernel.segment_map"(%positions) ({ exp(x - m) }) {each = "entry"} : (tensor<?xi32>) -> tensor<?xf32>
"""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from gossamer.dialects.kernel import KernelOp, epilogue_problem, verified


def _sample_problem(op: Any) -> str | None:
    pattern, result = ir.RankedTensorType(op.pattern.type), ir.RankedTensorType(op.result.type)
    if pattern.encoding is None:
        return "needs a pattern with a sparse encoding"
    if result.rank != 1:
        return f"gives {result}, must be one value for each stored entry"
    if len(op.body.blocks) != 1 or len(op.body.blocks[0].arguments) != 0:
        return "needs one block without arguments"
    *body, end = [inner.operation for inner in op.body.blocks[0].operations]
    if end.name != "kernel.yield":
        return "body must end in kernel.yield"
    count = pattern.rank + ir.IntegerAttr(op.reduced).value
    for inner in body:
        if inner.name == "kernel.read" and ir.AffineMapAttr(inner.attributes["map"]).value.n_dims != count:
            return f"reads with a map that is not over {count} dimensions, the pattern's and the reduced ones"
    return None


SEGMENT_REDUCTIONS = ("add", "mul", "max", "min")


def _segment_problem(op: Any) -> str | None:
    attribute, known = ("kind", SEGMENT_REDUCTIONS) if op.operation.name.endswith("reduce") else ("each", ("entry", "segment"))
    given = ir.StringAttr(op.operation.attributes[attribute]).value
    if given not in known:
        return f"has the {attribute} '{given}', must be {' or '.join(known)}"
    if len(op.body.blocks) != 1 or len(op.body.blocks[0].arguments) != 0:
        return "needs one block without arguments"
    element = ir.RankedTensorType(op.result.type).element_type
    *body, end = [inner.operation for inner in op.body.blocks[0].operations]
    if end.name != "kernel.yield" or end.operands[0].type != element:
        return f"body must end in a kernel.yield of {element}"
    for inner in body:
        if inner.name == "kernel.read" and ir.AffineMapAttr(inner.attributes["map"]).value.n_dims != 2:
            return "reads with a map that is not over 2 dimensions, segments and entries"
    return None


def _gather_rows_problem(op: Any) -> str | None:
    a, x, result = (ir.RankedTensorType(value.type) for value in (op.a, op.x, op.result))
    if a.rank != 2 or x.rank not in (1, 2) or result.rank != x.rank:
        return "takes a matrix, and a matrix or a vector, to one of the same rank"
    if a.encoding is None or x.encoding is not None or result.encoding is not None:
        return "needs a sparse left factor, a dense right one and a dense result"
    return epilogue_problem(op)


class SampleOp(KernelOp, name="sample", traits=[ext.Pure]):
    """values[p] = sum of body at the coordinates of each stored entry p of a sparse pattern.

    The maps of its kernel.reads have the dimensions of the pattern, then the `reduced` dimensions that are summed over.
    """

    lowering = "lower-dots"
    pattern: ext.Operand[Any]
    reduced: ir.IntegerAttr
    result: ext.Result[Any]
    body: ext.Region

    verify_region_invariants = verified(_sample_problem)


class GatherRowsOp(KernelOp, name="gather_rows", traits=[ext.Pure]):
    """y[m, n] = epilogue(sum_k a[m, k] x[k, n]) with a sparse a (CSR), scheduled: each row of a weights and sums rows of x. x
    and y may be vectors.

    A SIMD vector has `lanes` elements; up to `vectors` of them are summed at once. Rows of a large x are prefetched into the
    cache of level `ahead`. `gathers` is 1 if gather instructions are faster than single loads.
    """

    lowering = "lower-rows"
    a: ext.Operand[Any]
    x: ext.Operand[Any]
    lanes: ir.IntegerAttr
    vectors: ir.IntegerAttr
    ahead: ir.IntegerAttr
    gathers: ir.IntegerAttr
    result: ext.Result[Any]
    epilogue: ext.Region

    verify_region_invariants = verified(_gather_rows_problem)


class MultiplyRowsOp(KernelOp, name="multiply_rows", traits=[ext.Pure]):
    """c[m, n] = sum_k a[m, k] b[k, n] of matrices in CSR (SpGEMM), scheduled."""

    lowering = "lower-gustavson"
    takes = "a: #t[rows reduced], b: #t[reduced columns]"
    gives = "result: #t[rows columns]"


class GatherSlicesOp(KernelOp, name="gather_slices", traits=[ext.Pure]):
    """y[m] = sum_k a[m, k] x[k] for a matrix stored as `Slices`, scheduled. The kernel also writes the hash of `original` into
    the array `hash`. `gathers` is 1 if gather instructions are faster than single loads."""

    lowering = "lower-slices"
    takes = "a: #t[rows reduced], x: t[reduced]"
    gives = "result: t[rows]"

    gathers: ir.IntegerAttr


class TallProductOp(KernelOp, name="tall_product", traits=[ext.Pure]):
    """y[m, n] = sum_k x[m, k] w[k, n] of dense matrices, with many rows and a small w, scheduled. A SIMD vector has `lanes`
    elements; up to `vectors` of them are summed at once for each of a few rows."""

    lowering = "lower-tall"
    takes = "x: t[rows reduced], w: t[reduced columns]"
    gives = "result: t[rows columns]"

    lanes: ir.IntegerAttr
    vectors: ir.IntegerAttr


class SortKeysOp(KernelOp, name="sort_keys", traits=[ext.Pure]):
    """Sorts keys: positions[k] is the number of keys below k, and `order` the stable sorting permutation.

    Keys are less than the length of positions minus 1.
    """

    takes = "keys: i[keys]"
    gives = "positions: i[numbers], order: i[keys]"


class TakeOp(KernelOp, name="take", traits=[ext.Pure]):
    """y[p] = values[places[p]], or 0 if the place is negative."""

    takes = "values: T[values], places: i32[places]"
    gives = "result: T[places]"


class TakeInOrderOp(KernelOp, name="take_in_order", traits=[ext.Pure]):
    """Copies the values of a matrix in CSR, whose rows begin at `starts`, into a `Padded` packing of it; padding gets 0.

    If `panel` is 0, the packing has the same rows. Else it is of the transposed matrix, with `panel` rows of this one in each
    panel. `scale` is the factor in its coordinates. Both storages have the values of a row in the same order, so the op needs
    no table of places. `ends` says how far each row was read.
    """

    takes = "values: T[values], starts: I[rows], positions: i[parts], coordinates: i[entries]"
    gives = "taken: T[entries], ends: I[rows]"

    panel: ir.IntegerAttr
    scale: ir.IntegerAttr


class SegmentReduceOp(KernelOp, name="segment_reduce", traits=[ext.Pure]):
    """y[s] = the sum, product, maximum or minimum (`kind`, with NaNs kept) of body over the entries of segment s.

    A segment without entries gives the neutral element: 0, 1, the lowest or the highest number.
    """

    lowering = "lower-segments"
    takes = "positions: i[segments+1]"
    gives = "result: t[segments]"

    kind: ir.StringAttr
    body: ext.Region

    verify_region_invariants = verified(_segment_problem)


class SegmentMapOp(KernelOp, name="segment_map", traits=[ext.Pure]):
    """y[p] = body at entry p if `each` is "entry", y[s] = body at segment s if it is "segment"."""

    lowering = "lower-segments"
    takes = "positions: i[segments+1]"
    gives = "result: t[each]"

    each: ir.StringAttr
    body: ext.Region

    verify_region_invariants = verified(_segment_problem)
