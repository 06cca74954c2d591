"""The ops of the kernel dialect for the heads of a transformer and the order of its tokens, in chains of products.

`kernel.normalize` divides each head by its norm, `kernel.rotate` is rotary position embedding, and `kernel.attend` is scaled
dot-product attention among the tokens of a sequence. `kernel.regroup` reorders matrices whose rows come position by position.
"""

from collections.abc import Sequence
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from gossamer.dialects.kernel import KernelOp, integers, verified


def _attend_problem(op: Any) -> str | None:
    heads, kv_heads, size = (ir.IntegerAttr(a).value for a in (op.heads, op.kv_heads, op.head_size))
    result = ir.RankedTensorType(op.result.type)
    if result.rank != 2 or result.shape[1] != heads * size:
        return f"gives {result}, {heads} heads of {size} make {heads * size} columns"
    if kv_heads < 1 or heads % kv_heads:
        return f"has {heads} heads for {kv_heads} of keys and values"
    offsets, needed = integers(op.offsets), (heads * size, kv_heads * size, kv_heads * size)
    for name, tensor, offset, columns in zip("qkv", (op.q, op.k, op.v), offsets, needed, strict=True):
        if offset + columns > ir.RankedTensorType(tensor.type).shape[1]:
            return f"reads columns {offset} to {offset + columns - 1} of {name}, which is {tensor.type}"
    if len(op.mask) > 1:
        return f"has {len(op.mask)} masks"
    return None


def _heads_problem(op: Any) -> str | None:
    heads, size, offset = (ir.IntegerAttr(a).value for a in (op.heads, op.head_size, op.offset))
    x, result = (ir.RankedTensorType(v.type) for v in (op.x, op.result))
    if result.rank != 2 or result.shape[1] != heads * size:
        return f"gives {result}, {heads} heads of {size} make {heads * size} columns"
    if offset + heads * size > x.shape[1]:
        return f"reads columns {offset} to {offset + heads * size - 1} of {x}"
    return None


def _normalize_problem(op: Any) -> str | None:
    weight, size = ir.RankedTensorType(op.weight.type), ir.IntegerAttr(op.head_size).value
    if list(weight.shape) != [size]:
        return f"multiplies heads of {size} by {weight}"
    return _heads_problem(op)


def _rotate_problem(op: Any) -> str | None:
    size, rotated = (ir.IntegerAttr(a).value for a in (op.head_size, op.rotated))
    cos, sin = (ir.RankedTensorType(v.type) for v in (op.cos, op.sin))
    problem = _heads_problem(op)
    if problem is not None:
        return problem
    if rotated % 2 or rotated > size:
        return f"turns {rotated} columns of heads of {size}"
    if cos.shape[1] != sin.shape[1] or cos.shape[1] not in (rotated, rotated // 2):
        return f"turns {rotated} columns by {cos} and {sin}"
    return None


class AttendOp(KernelOp, name="attend", traits=[ext.Pure]):
    """Scaled dot-product attention of the tokens of each sequence of `length` tokens.

    q, k, v    [T, columns]. The first column of head h is offset + h * head_size; `offsets` has those of q, k and v.
    length     index: tokens of a sequence. T is a multiple of it.
    mask       none, or one tensor that is added to the scores: [T, length], or, if `key_mask` is 1, [sequences, length]
    kv_heads   heads of k and v; each serves heads / kv_heads heads of q
    cap        bounds the scores before the mask is added: cap * tanh(scale * <q, k> / cap); 0 for no bound
    """

    q: ext.Operand[Any]
    k: ext.Operand[Any]
    v: ext.Operand[Any]
    length: ext.Operand[Any]
    mask: Sequence[ext.Operand[Any]]
    heads: ir.IntegerAttr
    kv_heads: ir.IntegerAttr
    head_size: ir.IntegerAttr
    offsets: ir.ArrayAttr
    scale: ir.FloatAttr
    cap: ir.FloatAttr
    causal: ir.IntegerAttr
    key_mask: ir.IntegerAttr
    result: ext.Result[Any]

    verify_invariants = verified(_attend_problem)


class NormalizeOp(KernelOp, name="normalize", traits=[ext.Pure]):
    """Divides heads by their root mean squares: y[t, i] = x[t, i] / sqrt(mean_j x[t, j]^2 + eps) * weight[i] for each head.

    x       [T, columns]. The first column of head h is offset + h * head_size, in the result h * head_size.
    weight  [head_size]
    """

    x: ext.Operand[Any]
    weight: ext.Operand[Any]
    heads: ir.IntegerAttr
    head_size: ir.IntegerAttr
    offset: ir.IntegerAttr
    eps: ir.FloatAttr
    result: ext.Result[Any]

    verify_invariants = verified(_normalize_problem)


class RotateOp(KernelOp, name="rotate", traits=[ext.Pure]):
    """Rotary position embedding of heads. It rotates pairs of the first `rotated` columns, i and j = i + rotated / 2.

    y[t, i] = x[t, i] cos[t, i] - x[t, j] sin[t, i]
    y[t, j] = x[t, j] cos[t, j] + x[t, i] sin[t, j]

    x         [T, columns]. The first column of head h is offset + h * head_size, in the result h * head_size.
    cos, sin  [T, rotated], or [T, rotated / 2] for both halves
    """

    x: ext.Operand[Any]
    cos: ext.Operand[Any]
    sin: ext.Operand[Any]
    heads: ir.IntegerAttr
    head_size: ir.IntegerAttr
    rotated: ir.IntegerAttr
    offset: ir.IntegerAttr
    result: ext.Result[Any]

    verify_invariants = verified(_rotate_problem)


class RegroupOp(KernelOp, name="regroup", traits=[ext.Pure]):
    """Reorders the rows of a matrix: y[b length + s] = x[s batch + b] for sequences of `length` tokens and a batch of
    T / length. If `inverse` is 1, it is the inverse."""

    takes = "x: T[tokens columns]"
    gives = "result: T[tokens columns]"

    length: ext.Operand[Any]
    inverse: ir.IntegerAttr
