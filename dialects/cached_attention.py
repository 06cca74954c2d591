"""The ops of the kernel dialect for attention of a few queries, as a model generates text: each key and value is read once.

`kernel.attend_cached` reads keys and values as they lie in a cache, `kernel.attend_appended` puts those of new tokens behind
them on the way: past and new keys become one memory, which is the next step's past.
"""

from collections.abc import Sequence
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from gossamer.dialects.attention import TANH, steps_of
from gossamer.dialects.kernel import KernelOp, verified

SIZES = ("batch", "heads", "keys", "past")
"""What `sizes` begins with; `past` of the keys are in k and v, the others in new_k and new_v."""

STRIDED = {
    "kernel.attend_cached": ("q", "out", "mask", "k", "v"),
    "kernel.attend_appended": ("q", "out", "mask", "k", "v", "new_k", "new_v"),
}
"""What has three strides behind them, of batch, head and token. The others have their tokens one behind the other."""


def _problem(op: Any) -> str | None:
    size, group, queries = (ir.IntegerAttr(a).value for a in (op.head_size, op.group, op.queries))
    if size < 1 or group < 1 or queries < 1:
        return f"has {queries} queries of {group} heads of {size} elements"
    if not len(op.score) or not all(isinstance(step, float) or step == TANH for step in steps_of(op.score)):
        return f'has a score function {op.score}, which must be the scale, then numbers and "{TANH}"'
    needed = len(SIZES) + 3 * len(STRIDED[op.operation.name])
    return None if len(op.sizes) == needed else f"has {len(op.sizes)} sizes, must be {needed}"


class _Cached(KernelOp, traits=[ext.Pure]):
    """What the ops share.

    q, k, v    memory, in which sizes and strides find [batch, heads, queries, head_size] and [batch, heads / group, keys,
               head_size]; elements of a head are next to each other
    mask       memory, [batch, heads, queries, keys]: what is added to scores, keys next to each other; maybe none
    sizes      see SIZES and STRIDED
    score      the steps from <q, k> to the score, the scale first, before the mask is added
    out        as q; queries whose keys all have minus infinity get 0
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
    """Attention over keys and values that lie in one memory."""


class AttendAppendedOp(_Cached, name="attend_appended"):
    """Attention over past and new keys and values.

    new_k, new_v    memory, as k and v
    all_k, all_v    memory, past and new ones, [batch, heads / group, keys, head_size]
    """

    takes = "new_k: F[any], new_v: F[any]"
    gives = "all_k: F[any], all_v: F[any]"
