"""Computes scaled dot-product attention only for tiles that a mask does not hide.

gossamer::attend_masked(q, k, v, mask, scale, cap, seed, dropout, own) -> (Tensor, Tensor)   its tiles are found at the call
gossamer::attend_masked_backward                                              the gradients of q, k and v
gossamer::attend_masked_scores                                                these, and the gradient of the mask's numbers

They have the results of `aten::_scaled_dot_product_flash_attention_for_cpu` and its backward: the weighted values, the
logarithm of each query's sum of exp(score), and the gradients. `Scoring` describes the scores. Queries that see no key get 0.
None of the operations stores the scores.
Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.attention import TANH, TILE_QUERIES, Step
from gossamer.runtime.memory.huge_pages import large_zeros
from gossamer.runtime.modules import sizes as known_sizes
from gossamer.runtime.operations import Operation
from gossamer.runtime.region_kernel import RegionKernel, SparseOperand
from gossamer.runtime.remembered import Remembered
from gossamer.runtime.target import host
from gossamer.runtime.torch_internals import cpu_attention, cpu_attention_backward
from gossamer.sparsity.attention.blocks_ir import attend_blocks
from gossamer.sparsity.attention.mask import Mask, everything
from gossamer.sparsity.attention.tile_table import TileTable
from gossamer.sparsity.compiler.compile_kernel import compile_region

TYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
MOST_SHARE = 0.8
"""Above this share of tiles, torch's kernel, which computes all tiles, may be faster."""

Given = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, or their gradients."""

_tables = Remembered[Any]("all", most=16)
"""Tables of masks that graphs compute. They are compared by values, because Inductor reuses a buffer for other masks, and torch
does not count these writes."""


def attention_kernel(what: str, q: Tensor, scale: float, score: Sequence[Step] = (), dropout: float = 0.0) -> RegionKernel:
    """Returns the kernel for heads like those of q: "forward", or the gradients of "queries", "keys" or "scores".

    CompileError if it cannot be compiled.
    """
    return _kernel(what, q.shape[-1], scale, tuple(score), dropout, _dots(q))


@lru_cache(256)
def _kernel(what: str, *how: Any) -> RegionKernel:
    return compile_region(attend_blocks(what, *how), schedule="attend-blocks" if what == "forward" else "attend-blocks-grad")


def _dots(q: Tensor) -> bool:
    """Whether products multiply pairs of bf16."""
    here = host()
    return q.dtype == torch.bfloat16 and q.shape[-1] % 2 == 0 and "bf16dots" in here.instructions and here.vector_bits == 512


def _pairs(*given: Tensor) -> list[Tensor]:
    """Returns the operands that kernels read as pairs of bf16, with the layout of `_streamed`."""
    return [x.contiguous() for x in given] if _dots(given[0]) else []


def cap_steps(cap: float | None) -> tuple[Step, ...]:
    """Returns the steps of a soft cap."""
    return () if cap is None else (1 / cap, TANH, cap)


@dataclass(frozen=True)
class Scoring:
    """How products of queries and keys become weights.

    cap      a score is cap * tanh(scale * <q, k> / cap), before the mask is added; without a cap it is scale * <q, k>
    seed     an integer [1] for dropout; the same seed drops the same weights at every call
    dropout  the share of weights in [0, 1) that are set to 0; the others are divided by the remaining share
    own      whether torch's kernel must not be used, however little is hidden. Its gradients are wrong for queries whose keys
             are all hidden by a low number
    """

    scale: float
    cap: float | None = None
    seed: Tensor | None = None
    dropout: float = 0.0
    own: bool = False

    def steps(self, table: TileTable) -> tuple[Step, ...]:
        """Returns the steps of the score function under a mask."""
        return *cap_steps(self.cap), *table.steps

    @property
    def only_ours(self) -> bool:
        """Whether only our kernel computes this, not torch's."""
        return self.own or self.cap is not None or self.seed is not None


def attend(
    q: Tensor, k: Tensor, v: Tensor, table: TileTable, how: Scoring, score: Sequence[Step] | None = None
) -> tuple[Tensor, Tensor]:
    """Computes attention of [batch, heads, queries, size] to [batch, kv heads, keys, size] in the tiles of the table.

    Operands are f32, bf16 or f16, sums are f32; heads is a multiple of kv heads. `score` has the steps of the score function,
    by default those of `how` and the table. The result has the dtype of q and the strides of `like`; the logarithms are f32
    [batch, heads, queries].
    """
    out = like(q)
    pairs = _pairs(q, k)
    given = [_streamed(q) if pairs else by_features(q.float()), _streamed(k), _streamed(v)]
    wide = out if out.dtype == torch.float32 else like(given[0])
    statistics = q.new_empty(q.shape[:3], dtype=torch.float32)
    if not out.numel() or not k.shape[2]:
        return out.zero_(), statistics.zero_()
    more: list[Tensor | int] = [*_random(how), *pairs, *_sizes(q, k, table, q.shape[2], [*given, wide])]
    score = how.steps(table) if score is None else tuple(score)
    kernel = attention_kernel("forward", q, how.scale, score, how.dropout)
    kernel.into([wide, statistics], [*given, *table.tensors, *more])
    if wide is not out:
        out.copy_(wide)
    return out, statistics


class _Backward:
    """The operands for gradients of `attend(*given, table, how, score)`, and calls of the kernels."""

    def __init__(
        self,
        upstream: Tensor,
        given: Given,
        out: Tensor,
        statistics: Tensor,
        how: Scoring,
        of_statistics: Tensor | None = None,
    ) -> None:
        self._given, self._how = given, how
        self.read = [_streamed(x) for x in (*given, upstream)]
        self._pairs = _pairs(*given, upstream)
        delta = (self.read[3] * out).sum(-1, dtype=torch.float32).contiguous()
        if of_statistics is not None:
            delta -= of_statistics
        self._rows = statistics.contiguous(), delta

    def run(self, what: str, table: TileTable, made: Sequence[Tensor], score: Sequence[Step] | None = None) -> None:
        """Computes the gradients of "queries", of "keys" (and values), or of keys, values and "scores", into `made`.

        The last two need the table of the transposed mask.
        """
        q, k, _ = self._given
        rows = q.shape[2] if what == "queries" else k.shape[2]
        more: list[Tensor | int] = [*_random(self._how), *self._pairs, *_sizes(q, k, table, rows, [*self.read, *made])]
        operands: list[Tensor | SparseOperand | int] = [self.read[3], *self._rows, *self.read[:3], *table.tensors, *more]
        score = self._how.steps(table) if score is None else tuple(score)
        attention_kernel(what, q, self._how.scale, score, self._how.dropout).into(made, operands)


def gradients(
    upstream: Tensor,
    given: Given,
    out: Tensor,
    statistics: Tensor,
    tables: tuple[TileTable, TileTable],
    how: Scoring,
    score: Sequence[Step] | None = None,
    of_statistics: Tensor | None = None,
    of_scores: Tensor | None = None,
) -> Given:
    """Returns the gradients of q, k and v of `attend(*given, table, how, score)`, from those of the result and the statistics.

    tables     those of the mask and of its transpose
    of_scores  f32 [batch, heads, queries, keys]: the gradient of the numbers added to scores is added to it. Dimensions over
               which the gradient is summed are expanded, with a stride of 0
    """
    k = given[1]
    of = tuple(_result(x, x.dtype) for x in given)
    if not out.numel() or not k.numel():
        return tuple(x.zero_() for x in of)  # type: ignore[return-value]
    wide = [x if x.dtype == torch.float32 else _result(x, torch.float32) for x in of]
    backward = _Backward(upstream, given, out, statistics, how, of_statistics)
    backward.run("queries", tables[0], wide[:1], score)
    if of_scores is None:
        backward.run("keys", tables[1], wide[1:], score)
    else:
        backward.run("scores", tables[1], [*wide[1:], of_scores], score)
    for x, computed in zip(of, wide, strict=True):
        if x is not computed:
            x.copy_(computed)
    return of  # type: ignore[return-value]


def gradients_and_scores(
    upstream: Tensor,
    given: Given,
    out: Tensor,
    statistics: Tensor,
    tables: tuple[TileTable, TileTable],
    how: Scoring,
    summed: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns `gradients`, and the gradient of the numbers added to scores, [batch, heads, queries, keys] in the dtype of q.

    summed  those of the first two axes over which the latter is summed; they have size 1
    """
    q, k, _ = given
    whole = *q.shape[:3], k.shape[2]
    of_scores = large_zeros([1 if axis in summed else size for axis, size in enumerate(whole)])
    steps = [0 if axis in summed else step for axis, step in enumerate(of_scores.stride())]
    added_to = of_scores.as_strided(of_scores.shape, steps)
    found = gradients(upstream, given, out, statistics, tables, how, of_scores=added_to)
    return *found, of_scores.to(q.dtype)


def _random(how: Scoring) -> list[Tensor]:
    return [] if how.seed is None else [how.seed.to(torch.int32)]


def by_features(x: Tensor) -> Tensor:
    """Returns x with contiguous elements of a head. Kernels (ours and torch's) read only the other dimensions' strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def like(q: Tensor) -> Tensor:
    """Returns memory for a result: with the strides of q, or contiguous if the elements of q's heads are not."""
    made = torch.empty_like(q)
    by_feature = known_sizes.known_true(made.stride(-1) == 1) or known_sizes.known_true(made.shape[-1] == 1)
    return made if by_feature else torch.empty_like(q, memory_format=torch.contiguous_format)


def _streamed(x: Tensor) -> Tensor:
    """Returns x in f32, with contiguous tokens of a head. Tokens a power of two apart would share few lines of the cache."""
    return x.float().contiguous()


def _result(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns memory for a gradient, with the layout of torch's operation, token by token."""
    batch, heads, tokens, size = x.shape
    return x.new_empty((batch, tokens, heads, size), dtype=dtype).transpose(1, 2)


def _sizes(q: Tensor, k: Tensor, table: TileTable, rows: int, strided: Sequence[Tensor]) -> list[int]:
    """Returns the sizes that kernels take. `rows` is the number of queries or keys in the rows of the table."""
    positions, (by_batch, by_head, by_row) = table.positions, table.positions.stride()
    strides = (
        by_batch if positions.shape[0] > 1 else 0,
        by_head if positions.shape[1] > 1 else 0,
        by_row if positions.shape[2] > 2 or rows <= TILE_QUERIES else 0,
    )
    sizes = [q.shape[0], q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], *strides]
    for x in strided:
        sizes += x.stride()[:3]
    return sizes


# The operations


def attend_where(q: Tensor, k: Tensor, v: Tensor, mask: Mask, how: Scoring) -> tuple[Tensor, Tensor]:
    """Computes `attend` if the mask leaves few tiles, or torch's kernel cannot compute it, else runs torch's kernel."""
    table = mask.table(q, k)
    if how.only_ours or table.share(k.shape[2]) <= MOST_SHARE:
        return attend(q, k, v, table, how)
    given = map(by_features, (q, k, v))
    out, statistics = cpu_attention(*given, 0.0, False, attn_mask=mask.added(q.dtype), scale=how.scale)
    result = like(q)
    return out if out.stride() == result.stride() else result.copy_(out), statistics.contiguous()


def gradients_where(upstream: Tensor, given: Given, out: Tensor, statistics: Tensor, mask: Mask, how: Scoring) -> Given:
    """Returns the gradients of `attend_where`."""
    q, k, _ = given
    table = mask.table(q, k)
    if how.only_ours or table.share(k.shape[2]) <= MOST_SHARE:
        tables = table, mask.table(q, k, turned=True)
        return gradients(upstream, given, out, statistics, tables, how)
    by_token = statistics.transpose(1, 2).contiguous().transpose(1, 2)
    added = mask.added(q.dtype)
    read = map(by_features, (upstream, *given, out))
    found = cpu_attention_backward(*read, by_token, 0.0, False, attn_mask=added, scale=how.scale)
    return tuple(_result(x, x.dtype).copy_(x) for x in found)  # type: ignore[return-value]


def _mask(mask: Tensor | None, k: Tensor) -> Mask:
    if mask is None:
        return everything(k.shape[2])
    return Mask(lambda: mask, lambda more, make: _tables.get([mask], more, make), lasts=False)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
    return attend_where(q, k, v, _mask(mask, k), Scoring(*how))


def _attend_backward(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor, mask: Tensor | None, *how: Any
) -> Given:
    return gradients_where(upstream, (q, k, v), out, statistics, _mask(mask, k), Scoring(*how))


def _attend_scores(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor, mask: Tensor | None, *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *scoring, summed = how
    found = _mask(mask, k)
    tables = found.table(q, k), found.table(q, k, turned=True)
    return gradients_and_scores(upstream, (q, k, v), out, statistics, tables, Scoring(*scoring), summed)


def fake(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Returns empty results of attention, for tracing."""
    return like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def fake_backward(_upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, ...]:
    """Returns empty gradients of attention, for tracing."""
    return tuple(_result(x, x.dtype) for x in (q, k, v))


def _fake_scores(upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    sizes = (*q.shape[:3], k.shape[2])
    return *fake_backward(upstream, q, k, v), q.new_empty([1 if axis in rest[-1] else n for axis, n in enumerate(sizes)])


_GIVEN = "Tensor q, Tensor k, Tensor v, "
_SAVED = f"Tensor upstream, {_GIVEN}Tensor out, Tensor statistics, "
SCORING = "float scale, float? cap, Tensor? seed, float dropout, bool own"
"""The arguments of operations that make a `Scoring`."""
_MASK = f"Tensor? mask, {SCORING}"
_GRADIENTS = "(Tensor, Tensor, Tensor)"
attend_masked = Operation(f"attend_masked({_GIVEN}{_MASK}) -> (Tensor, Tensor)", _attend, fake=fake).register()
attend_masked_backward = Operation(
    f"attend_masked_backward({_SAVED}{_MASK}) -> {_GRADIENTS}", _attend_backward, fake=fake_backward
).register()
attend_masked_scores = Operation(
    f"attend_masked_scores({_SAVED}{_MASK}, int[] summed) -> (Tensor, Tensor, Tensor, Tensor)",
    _attend_scores,
    fake=_fake_scores,
).register()
