"""python -m tests.fuzz.attention --seconds 60 --seed 0: attention under random masks, against dense float64.

A case is a mask (of a kind, for some batches and heads), lengths, heads that share keys, strides, a type, numbers that are
added, a score function, dropout, and gradients, that of the numbers among them.
"""

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gossamer.dialects.attention import ADD, TANH, Step
from gossamer.sparsity.attention.masked_attention import Scoring, attend, gradients, gradients_and_scores
from gossamer.sparsity.attention.tile_table import tile_table
from gossamer.sparsity.edges.dropout_mask import kept

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SCORES: tuple[tuple[Step, ...] | None, ...] = (None, None, None, (0.2, TANH, 5.0), (ADD, 0.2, TANH, 5.0), (0.2, TANH, 5.0, ADD))
KINDS = ("window", "causal", "causal window", "documents", "padding", "prefix", "blocks", "chance", "all", "none", "column")


@dataclass(frozen=True)
class Case:
    """Everything that a seed stands for."""

    kind: str
    batch: int
    heads: int
    group: int
    queries: int
    keys: int
    size: int
    mask_batch: bool
    mask_heads: bool
    added: str
    score: tuple[Step, ...] | None
    dtype: torch.dtype
    by_token: bool
    grad: bool
    dropout: float
    summed: tuple[int, ...]
    seed: int


def make(seed: int) -> Case:
    """The case of a seed."""
    choose = random.Random(seed)
    queries = choose.choice((1, 2, 15, 16, 31, 32, 33, 64, 100, 130, choose.randint(1, 300)))
    group = choose.choice((1, 1, 2, 4))
    added = choose.choice(("", "", "distances", "numbers", "lowest"))
    score = choose.choice(SCORES)
    return Case(
        choose.choice(KINDS), choose.randint(1, 3), group * choose.choice((1, 2)), group, queries,
        choose.choice((queries, queries, 1, 16, 17, choose.randint(1, 300))), choose.choice((1, 8, 17, 32, 64, 80, 256)),
        choose.random() < 0.4, choose.random() < 0.4, added if score is None else "" if ADD not in score else "numbers", score,
        choose.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16)), choose.random() < 0.5,
        choose.random() < 0.5, choose.choice((0.0, 0.0, 0.1, 0.7)), choose.choice(((), (0,), (1,), (0, 1))), seed,
    )  # fmt: skip


def seen(case: Case, draw: torch.Generator) -> Tensor:
    """Which queries see which keys: [batch or 1, heads or 1, queries, keys]"""
    shape = case.batch if case.mask_batch else 1, case.heads if case.mask_heads else 1
    i, j = torch.arange(case.queries)[:, None], torch.arange(case.keys)
    any_of = lambda most: torch.randint(0, most + 1, (*shape, 1, 1), generator=draw)
    masks = {
        "window": lambda: (i - j).abs() <= any_of(40),
        "causal": lambda: i >= j - any_of(20),
        "causal window": lambda: (i >= j) & (i - j < any_of(60)),
        "documents": lambda: i // (1 + any_of(50)) == j // (1 + any_of(50)),
        "padding": lambda: j < any_of(case.keys),
        "prefix": lambda: (j < any_of(50)) | (i >= j),
        "blocks": lambda: ((i // 32 * 7 + j // 16 * 3 + any_of(20)) % 5) == 0,
        "chance": lambda: torch.rand(*shape, case.queries, case.keys, generator=draw) < 0.1 * any_of(9),
        "all": lambda: j >= 0,
        "none": lambda: j < 0,
        "column": lambda: j == any_of(case.keys),
    }
    return masks[case.kind]().expand(*shape, case.queries, case.keys)


def difference(case: Case) -> str | None:
    """What is wrong with a case, if anything."""
    draw = torch.Generator().manual_seed(case.seed)

    def made(heads: int, tokens: int) -> Tensor:
        x = torch.randn(case.batch, tokens, heads, case.size, generator=draw)
        return (x.transpose(1, 2) if case.by_token else x.transpose(1, 2).contiguous()).to(case.dtype)

    kv = case.heads // case.group
    q, k, v, upstream = made(case.heads, case.queries), made(kv, case.keys), made(kv, case.keys), made(case.heads, case.queries)
    sees = seen(case, draw)
    numbers = torch.randn(*sees.shape[:2], case.queries, case.keys, generator=draw)
    if case.added == "distances":
        numbers = -0.1 * (torch.arange(case.queries)[:, None] - torch.arange(case.keys)).abs().expand_as(sees).float()
    hidden = torch.finfo(torch.float32).min if case.added == "lowest" else -torch.inf
    if case.added == "lowest":
        numbers.zero_()
    mask = numbers.masked_fill(~sees, hidden) if case.added else sees
    tables = tile_table(mask), tile_table(mask, turned=True)
    scale = case.size**-0.5
    pairs = case.batch, case.heads, case.queries, case.keys
    seed = torch.tensor([case.seed % 1000]) if case.dropout else None
    how = Scoring(scale, None, seed, case.dropout)
    out, logarithms = attend(q, k, v, tables[0], how, case.score)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    scores = wide[0] @ wide[1].repeat_interleave(case.group, 1).mT * scale
    for step in case.score or ((ADD,) if case.added else ()):
        scores = torch.tanh(scores) if step == TANH else scores + numbers.double() if step == ADD else scores * step
    lowered = ~sees.any(-1, keepdim=True) if case.added == "lowest" else torch.zeros((), dtype=torch.bool)
    numbered = scores  # of which the gradient is that of what has been added
    scores = scores.where(~lowered, scores - scores.detach()).masked_fill(~(sees | lowered), -torch.inf)
    some = (sees | lowered).any(-1, keepdim=True)
    shares = scores.softmax(-1).where(some, 0)
    dropped = shares if seed is None else shares * kept(seed, prod(pairs), 1, case.dropout, torch.float64).view(pairs)
    expected = dropped @ wide[2].repeat_interleave(case.group, 1)
    sums = scores.logsumexp(-1).where(some[..., 0], 0)
    found = [("result", out, expected), ("logarithms", logarithms, sums)]
    if case.grad and case.score is None:
        theirs = torch.autograd.grad(expected, [*wide, numbered], upstream.double())
        ours = gradients(upstream, (q, k, v), out, logarithms, tables, how)
        found += zip(("dq", "dk", "dv"), ours, [x.nan_to_num(0) for x in theirs[:3]], strict=True)
        if case.added:
            *ours, mine = gradients_and_scores(upstream, (q, k, v), out, logarithms, tables, how, case.summed)
            exact = theirs[3].nan_to_num(0)
            found += zip(("dk with scores", "dv with scores"), ours[1:], [x.nan_to_num(0) for x in theirs[1:3]], strict=True)
            found.append(("dscores", mine, exact.sum(case.summed, keepdim=True) if case.summed else exact))
    least = 1.0
    if (
        case.dtype != torch.float32
    ):  # gradients are sums over rounded numbers, less the product of the rounded result and its own
        least = max(1.0, case.queries**0.5 / 2) * max(1.0, case.size**0.5 / 4) / (1 - case.dropout)
    for name, mine, theirs in found:
        error = (mine.double() - theirs.detach()).abs().max() / theirs.detach().abs().max().clamp(min=least)
        if not float(error) <= TOLERANCE[case.dtype]:
            return f"{name} differs by {float(error):.1e}"
    return None


def main() -> int:
    """The number of cases that failed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60)
    options.add_argument("--seed", type=int, default=0, help="of the first case, the next one's is one more")
    options.add_argument("--count", type=int, default=1 << 60, help="cases at most")
    given = options.parse_args()
    torch.set_num_threads(1)
    begin, seed, how = time.monotonic(), given.seed, Counter[str]()
    while time.monotonic() < begin + given.seconds and seed < given.seed + given.count:
        case = make(seed)
        problem = difference(case)
        how["wrong" if problem else "right"] += 1
        if problem:
            print(f"{case}: {problem}", flush=True)
        seed += 1
    print(f"{seed - given.seed} cases from {given.seed} on: {how['wrong']} wrong, {how['right']} right")
    return how["wrong"]


if __name__ == "__main__":
    sys.exit(min(main(), 100))
