"""The ops of the kernel dialect for attention under a mask of tiles: `kernel.attend_blocks` and its gradients.

A mask is a table of the tiles that it does not hide, each of TILE_QUERIES queries and TILE_KEYS keys:

positions  where the tiles of each row of tiles begin, and where the last one's end
tiles      three numbers each: twice the number of the tile's keys, plus 1 if it is hidden in part; for those the number of its
           words; the number of its floats, where there are any
words      TILE_QUERIES words a tile that is hidden in part: bit k of word q says whether query q sees key k
floats     TILE_KEYS rows of TILE_QUERIES numbers: what is added to the scores; several tiles may have the same ones
"""

from collections.abc import Sequence
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from gossamer.dialects.kernel import KernelOp, verified

TILE_QUERIES, TILE_KEYS = 32, 16

SIZES = ("batch", "heads", "group", "queries", "keys", "table_batch", "table_head", "table_row")
"""What `sizes` begins with: lengths, and the elements of `positions` from a batch, head and row of tiles to the next (0 where
all have the same)."""
STRIDED = {
    "kernel.attend_blocks": ("q", "k", "v", "out"),
    "kernel.attend_blocks_of_queries": ("q", "k", "v", "gradient", "of_q"),
    "kernel.attend_blocks_of_keys": ("q", "k", "v", "gradient", "of_k", "of_v"),
    "kernel.attend_blocks_of_scores": ("q", "k", "v", "gradient", "of_k", "of_v", "of_scores"),
}
"""What has three strides behind them, of batch, head and token."""

LOW, ADDED_LOW, FILLED_LOW = -1e30, -3.4028234663852886e38, -2e38
"""Scores below the first are taken as equal, for those of queries that see no other keys: what is added absorbs the rest. The
second number is added to them, or the third, if their scores have been replaced and so have no gradient."""

Step = str | float
ADD, TANH = "add", "tanh"
"""The steps of a score function: the floats of a tile are added, the hyperbolic tangent; a number is multiplied with."""


def steps_of(score: ir.ArrayAttr) -> list[Step]:
    """The steps of a `score` attribute."""
    return [ir.StringAttr(s).value if isinstance(s, ir.StringAttr) else ir.FloatAttr(s).value for s in score]


def _problem(op: Any) -> str | None:
    size, strided = ir.IntegerAttr(op.head_size).value, STRIDED[op.operation.name]
    if size < 1:
        return f"has heads of {size} elements"
    for step in op.score:
        if str(step) not in (f'"{ADD}"', f'"{TANH}"') and not isinstance(step, ir.FloatAttr):
            return f'has a score function with {step}, there are "{ADD}", "{TANH}" and numbers'
    if not len(op.score) or not isinstance(op.score[0], ir.FloatAttr):
        return "has a score function that does not begin with the scale"
    dropout = ir.FloatAttr(op.dropout).value
    if not 0 <= dropout < 1 or (dropout > 0) != (op.seed is not None):
        return f"has a dropout of {dropout:g}, which must be in [0, 1), and a seed if and only if it is not 0"
    needed = len(SIZES) + 3 * len(strided)
    if len(op.sizes) != needed:
        return f"has {len(op.sizes)} sizes, must be {needed}: {', '.join(SIZES)}, then three strides of {', '.join(strided)}"
    products = 2 if op.operation.name == "kernel.attend_blocks" else 4
    if len(op.pairs) not in (0, products) or (len(op.pairs) and size % 2):
        return f"has {len(op.pairs)} pairs for heads of {size} elements, there may be {products} if these are even"
    return None


class _Attention(KernelOp, traits=[ext.Pure]):
    """What the ops share.

    q, k, v      memory, in which sizes and strides find [batch, heads, queries, head_size] and so on; each `group` of heads
                 shares the keys and values of one. Elements of a head are next to each other.
    positions    [rows + 1] of i32 for each batch and head, tiles [3 n] of i32, words [n * TILE_QUERIES] of i16,
                 floats [n * TILE_KEYS * TILE_QUERIES] of f32
    sizes        see SIZES and STRIDED
    score        the steps from <q, k> to the score, the scale first; what is hidden is left out after them
    seed         [1] of i32: weights are set to 0 with a probability of `dropout`, the others divided by what is left, by the
                 random bits (dialects/philox.py) of the seed and the number of batch, head, query and key
    pairs        nothing; or q, k and, for gradients, v and the gradient in bf16, laid out as they are, for targets that
                 multiply pairs of them. Then products of rows are of these, sums of weighted rows of the others.
    """

    takes = (
        "q: f32[any], k: f32[any], v: f32[any], positions: i32[any], tiles: i32[any], words: i16[any], floats: f32[any], "
        "seed: i32[any]?, pairs: bf16[any]*"
    )

    sizes: Sequence[ext.Operand[Any]]
    head_size: ir.IntegerAttr
    score: ir.ArrayAttr
    dropout: ir.FloatAttr

    verify_invariants = verified(_problem)


class AttendBlocksOp(_Attention, name="attend_blocks"):
    """Scaled dot-product attention of heads, where a table says which queries see which keys.

    out          memory, as q; queries that see no key get 0
    statistics   [batch, heads, queries], the logarithm of the sum of exp(score), without the score if that is below LOW, 0 for
                 queries that see no key
    """

    gives = "out: f32[any], statistics: f32[any]"


class _Gradient(_Attention):
    """gradient    memory, as out
    statistics  of the forward op
    delta       [batch, heads, queries], the sum over a head's elements of out times gradient
    """

    lowering = "lower-attend-blocks-grad"
    takes = "gradient: f32[any], statistics: f32[any], delta: f32[any]"


class AttendBlocksOfQueriesOp(_Gradient, name="attend_blocks_of_queries"):
    """The gradient of q, memory as q, for that of the result of kernel.attend_blocks; the scores are computed again."""

    gives = "of_q: f32[any]"


class AttendBlocksOfKeysOp(_Gradient, name="attend_blocks_of_keys"):
    """The gradients of k and v, as kernel.attend_blocks_of_queries has that of q. In its table keys and queries change places:
    a tile is TILE_QUERIES keys and TILE_KEYS queries."""

    gives = "of_k: f32[any], of_v: f32[any]"


class AttendBlocksOfScoresOp(_Gradient, name="attend_blocks_of_scores"):
    """What kernel.attend_blocks_of_keys gives, and the gradient of what is added to the scores, summed over what has a stride
    of 0. It is added to what is there.

    of_scores   memory, [batch, heads, queries, keys]; keys are next to each other
    """

    gives = "of_k: f32[any], of_v: f32[any], of_scores: f32[any]"
