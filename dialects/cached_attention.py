"""The ops of the kernel dialect for attention of a few queries, as in text generation: each key and value is read once.

`kernel.attend_cached` reads keys and values from a cache. `kernel.attend_appended` also copies them, with those of the new
tokens behind them, into one memory, which is the cache of the next step.
"""

from collections.abc import Sequence
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from gossamer.dialects.attention import TANH, steps_of
from gossamer.dialects.kernel import KernelOp, verified

SIZES = ("batch", "heads", "keys", "past")
"""The first entries of `sizes`. The first `past` keys are in k and v, the others in new_k and new_v."""

STRIDED = {
    "kernel.attend_cached": ("q", "out", "mask", "k", "v"),
    "kernel.attend_appended": ("q", "out", "mask", "k", "v", "new_k", "new_v"),
}
"""The tensors whose three strides, by batch, head and token, follow in `sizes`, in this order. Others are contiguous."""


def _problem(op: Any) -> str | None:
    size, group, queries = (ir.IntegerAttr(a).value for a in (op.head_size, op.group, op.queries))
    if size < 1 or group < 1 or queries < 1:
        return f"has {queries} queries of {group} heads of {size} elements"
    if not len(op.score) or not all(isinstance(step, float) or step == TANH for step in steps_of(op.score)):
        return f'has a score function {op.score}, which must be the scale, then numbers and "{TANH}"'
    needed = len(SIZES) + 3 * len(STRIDED[op.operation.name])
    return None if len(op.sizes) == needed else f"has {len(op.sizes)} sizes, must be {needed}"


class _Cached(KernelOp, traits=[ext.Pure]):
    """The operands and attributes that both ops have.

    q, k, v    memory of [batch, heads, queries, head_size] and [batch, heads / group, keys, head_size], by sizes and
               strides; elements of a head are contiguous
    mask       memory of [batch, heads, queries, keys], keys contiguous, which is added to the scores; may be missing
    sizes      see SIZES and STRIDED
    score      the steps from <q, k> to the score, the scale first. The mask is added after them.
    out        as q. A query gets 0 if all its scores are minus infinity.
    """

    lowering = "lower-attend-cached"
    takes = "q: F[any], k: F[any], v: F[any], mask: f[any]?"
    gives = "out: F[any]"

    sizes: Sequence[ext.Operand[Any]]
    head_size: ir.IntegerAttr
    group: ir.IntegerAttr
    queries: ir.IntegerAttr
    score: ir.ArrayAttr

    verify_invariants = verified(_problem)


class AttendCachedOp(_Cached, name="attend_cached"):
    """Attention over the keys and values of one memory."""


class AttendAppendedOp(_Cached, name="attend_appended"):
    """Attention over past and new keys and values.

    new_k, new_v    memory, as k and v
    all_k, all_v    memory of the past and then the new ones, [batch, heads / group, keys, head_size]
    """

    takes = "new_k: F[any], new_v: F[any]"
    gives = "all_k: F[any], all_v: F[any]"
