"""The ops of the kernel dialect for attention under a mask of tiles: `kernel.attend_blocks` and its gradients.

A mask is a table of the tiles that it does not hide, each of TILE_QUERIES queries and TILE_KEYS keys:

positions  for each row of tiles, the place of its first tile; then the end of the last one's tiles
tiles      three numbers a tile: twice its number along the keys, plus 1 if it is partly hidden; for a partly hidden tile the
           number of its words; the number of its floats, if it has any
words      TILE_QUERIES words for a partly hidden tile: bit k of word q says whether query q sees key k
floats     TILE_KEYS rows of TILE_QUERIES numbers, which are added to the scores. Several tiles may share them.
"""

from collections.abc import Sequence
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from gossamer.dialects.kernel import KernelOp, verified

TILE_QUERIES, TILE_KEYS = 32, 16

SIZES = ("batch", "heads", "group", "queries", "keys", "table_batch", "table_head", "table_row")
"""The first entries of `sizes`: lengths, then strides of `positions` by batch, head and row of tiles (0 if all have the
same)."""
STRIDED = {
    "kernel.attend_blocks": ("q", "k", "v", "out"),
    "kernel.attend_blocks_of_queries": ("q", "k", "v", "gradient", "of_q"),
    "kernel.attend_blocks_of_keys": ("q", "k", "v", "gradient", "of_k", "of_v"),
    "kernel.attend_blocks_of_scores": ("q", "k", "v", "gradient", "of_k", "of_v", "of_scores"),
}
"""The tensors whose three strides, by batch, head and token, follow in `sizes`, in this order."""

LOW, ADDED_LOW, FILLED_LOW = -1e30, -3.4028234663852886e38, -2e38
"""For queries to whose scores a mask adds huge negative numbers, at every key. Scores below LOW count as equal, because such
numbers absorb their differences. ADDED_LOW stands for such a number; FILLED_LOW does if the mask replaces the scores instead,
so that they have no gradient."""

Step = str | float
ADD, TANH = "add", "tanh"
"""The steps of a score function: "add" adds the floats of a tile, "tanh" is the hyperbolic tangent, a number is a factor."""


def steps_of(score: ir.ArrayAttr) -> list[Step]:
    """Returns the steps of a `score` attribute."""
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
    """The operands and attributes that all these ops have.

    q, k, v      memory of [batch, heads, queries, head_size] and so on, by sizes and strides. Each `group` of heads of q
                 shares one head of keys and values. Elements of a head are contiguous.
    positions    [rows + 1] of i32 for each batch and head, tiles [3 n] of i32, words [n * TILE_QUERIES] of i16,
                 floats [n * TILE_KEYS * TILE_QUERIES] of f32
    sizes        see SIZES and STRIDED
    score        the steps from <q, k> to the score, the scale first. Hidden scores are left out after the steps.
    seed         [1] of i32. Each weight is set to 0 with probability `dropout`, else divided by 1 - dropout. The random bits
                 (dialects/philox.py) depend on the seed and on the numbers of batch, head, query and key.
    pairs        empty; or q, k and, for gradients, v and the gradient in bf16 with the same strides, for targets that
                 multiply pairs of bf16. Then products of rows use these, and sums of weighted rows use the f32 tensors.
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
    """Scaled dot-product attention of heads. A table says which queries see which keys.

    out          memory, as q. Queries that see no key get 0.
    statistics   [batch, heads, queries], the logarithm of the sum of exp(score). If all scores are below LOW, they count as 0.
                 0 for queries that see no key.
    """

    gives = "out: f32[any], statistics: f32[any]"


class _Gradient(_Attention):
    """The operands of the gradient ops.

    gradient    the gradient of out; memory, as out
    statistics  those of the forward op
    delta       [batch, heads, queries], the sum over a head's elements of out times gradient
    """

    lowering = "lower-attend-blocks-grad"
    takes = "gradient: f32[any], statistics: f32[any], delta: f32[any]"


class AttendBlocksOfQueriesOp(_Gradient, name="attend_blocks_of_queries"):
    """The gradient of q, memory as q, from the gradient of the result of kernel.attend_blocks. It recomputes the scores."""

    gives = "of_q: f32[any]"


class AttendBlocksOfKeysOp(_Gradient, name="attend_blocks_of_keys"):
    """The gradients of k and v, as kernel.attend_blocks_of_queries gives that of q. In its table keys and queries are swapped:
    a tile is TILE_QUERIES keys and TILE_KEYS queries."""

    gives = "of_k: f32[any], of_v: f32[any]"


class AttendBlocksOfScoresOp(_Gradient, name="attend_blocks_of_scores"):
    """Like kernel.attend_blocks_of_keys, but also gives the gradient of the numbers that are added to the scores.

    of_scores   memory of [batch, heads, queries, keys], keys contiguous. The gradient is added to what it holds, so dimensions
                with a stride of 0 are summed over.
    """

    gives = "of_k: f32[any], of_v: f32[any], of_scores: f32[any]"
