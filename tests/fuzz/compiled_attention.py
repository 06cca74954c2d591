"""python -m tests.fuzz.compiled_attention --seconds 600 --seed 0: attention as models spell it, compiled, against float64.

A spelling is compiled with open sizes, once for heads of some number, size and type, for inference or training; masks, lengths
and batches change from case to case. The reference is the same function without compilation, in float64.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from gossamer.backend import sparse
from tests.fuzz.attention import TOLERANCE, Case, make, seen

INF = float("inf")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
GRAPHS = (
    (1, 1, 16, F32, False, False, False),
    (4, 2, 16, F32, True, True, False),
    (2, 1, 24, BF16, True, False, True),
    (4, 1, 64, F32, False, True, True),
    (4, 4, 32, F16, True, True, True),
)
"""Heads of queries and of keys, elements of a head, type, whether tokens come before heads in memory, and whether masks have a
batch and heads."""
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])

Function = Callable[..., Tensor]
Masks = Callable[[Case, Tensor, torch.Generator, torch.dtype], tuple[Any, ...]]


@dataclass(frozen=True)
class Spelling:
    """A function of q, k, v and what `given` makes of a case and which queries see which keys.

    square   whether there are as many keys as queries
    nan      whether queries that see no key get NaN
    """

    function: Function
    given: Masks
    square: bool = False
    nan: bool = False


def _repeated(x: Tensor, like: Tensor) -> Tensor:
    return x.repeat_interleave(like.shape[1] // x.shape[1], 1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ _repeated(k, q).mT * q.shape[-1] ** -0.5


def _weighted(scores: Tensor, v: Tensor) -> Tensor:
    return scores.softmax(-1) @ _repeated(v, scores)


def _places(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])


def _window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = _places(q, k)
    return _sdpa(q, k, v, (i - j).abs() <= 20)


def _causal_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = _places(q, k)
    return _sdpa(q, k, v, torch.zeros((), dtype=q.dtype).where((j <= i) & (i - j < 30), -INF))


def _documents(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    return _sdpa(q, k, v, document[:, None, :, None] == document[:, None, None, :])


def _padded(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    i, j = _places(q, k)
    mask = (j <= i) & (attention_mask[:, None, None, :] > 0)
    return _sdpa(q, k, v, torch.zeros((), dtype=q.dtype).where(mask, torch.finfo(q.dtype).min))


def _einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, _repeated(k, q)) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, -INF).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, _repeated(v, q))


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return _weighted(torch.tanh(_scores(q, k) / 5) * 5 + mask, v)


def _flexed(q: Tensor, k: Tensor, v: Tensor, document: Tensor, block_mask: Any, alibi: bool) -> Tensor:
    if q.dtype == torch.float64:
        i, j = _places(q, k)
        scores = _scores(q, k) + (SLOPES[: q.shape[1], None, None].double() * (j - i) if alibi else 0)
        scores = scores.masked_fill((document[:, None, :, None] != document[:, None, None, :]) | (j > i), -INF)
        return _weighted(scores, v)

    def bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + SLOPES[h] * (j - i)

    return flex_attention(q, k, v, score_mod=bias if alibi else None, block_mask=block_mask, enable_gqa=True)


def _bools(case: Case, sees: Tensor, draw: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    return (sees.contiguous(),)


def _numbers(case: Case, sees: Tensor, draw: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    added = torch.randn(sees.shape, generator=draw) if case.added else torch.zeros(sees.shape)
    return (added.masked_fill(~sees, -INF).to(dtype),)


def _ids(case: Case, sees: Tensor, draw: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    return (
        torch.randint(0, 2, (case.batch, case.queries), generator=draw).mul(torch.rand(1, generator=draw) < 0.9).cumsum(1) // 9,
    )


def _lengths(case: Case, sees: Tensor, draw: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    lengths = torch.randint(1, case.keys + 1, (case.batch, 1), generator=draw)
    right = torch.arange(case.keys) < lengths
    from_left = case.seed % 2 and dtype == F32  # the lowest number of others does not absorb scores, as that of float64 does
    return ((right.flip(1) if from_left else right).long(),)


def _blocked(case: Case, sees: Tensor, draw: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    (document,) = _ids(case, sees, draw, dtype)
    mask = lambda b, h, i, j: (document[b, i] == document[b, j]) & (j <= i)
    return document, create_block_mask(mask, case.batch, None, case.queries, case.keys, device="cpu")


def _nothing(case: Case, sees: Tensor, draw: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    return ()


SPELLINGS = {
    "bools": Spelling(_sdpa, _bools),
    "numbers": Spelling(_sdpa, _numbers),
    "causal": Spelling(lambda q, k, v: _sdpa(q, k, v, causal=True), _nothing, square=True),
    "window": Spelling(_window, _nothing, square=True),
    "causal window": Spelling(_causal_window, _nothing, square=True),
    "documents": Spelling(_documents, _ids, square=True),
    "padded": Spelling(_padded, _lengths, square=True),
    "written, added": Spelling(lambda q, k, v, mask: _weighted(_scores(q, k) + mask, v), _numbers, nan=True),
    "written, filled": Spelling(lambda q, k, v, m: _weighted(_scores(q, k).masked_fill(~m, -INF), v), _bools, nan=True),
    "written, chosen": Spelling(lambda q, k, v, m: _weighted(torch.where(m, _scores(q, k), -1e9), v), _bools),
    "einsum": Spelling(_einsum, _bools, nan=True),
    "capped": Spelling(_capped, _numbers, nan=True),
    "flex": Spelling(lambda q, k, v, d, b: _flexed(q, k, v, d, b, alibi=False), _blocked, square=True),
    "flex, ALiBi": Spelling(lambda q, k, v, d, b: _flexed(q, k, v, d, b, alibi=True), _blocked, square=True),
}


class Compiled:
    """The functions, each compiled when it is first needed."""

    def __init__(self, dense: str) -> None:
        self._dense, self._found = dense, dict[str, Function]()

    def of(self, name: str) -> Function:
        if name not in self._found:
            options: Any = {"dense": self._dense, "min_gain": 0, "strict": True}
            function = SPELLINGS[name].function
            self._found[name] = torch.compile(function, backend=sparse, fullgraph=True, dynamic=True, options=options)
        return self._found[name]


def plan(choose: random.Random) -> tuple[str, bool, int]:
    """A spelling, whether it is trained, and which of GRAPHS it is."""
    return choose.choice(list(SPELLINGS)), choose.random() < 0.5, choose.randrange(len(GRAPHS))


def difference(seed: int, compiled: Compiled) -> tuple[str, str | None]:
    """The spelling of a seed, and what is wrong with it, if anything."""
    choose = random.Random(seed)
    name, grad, graph = plan(choose)
    spelling = SPELLINGS[name]
    heads, kv_heads, size, dtype, by_token, mask_batch, mask_heads = GRAPHS[graph]
    case = make(seed)
    queries = choose.choice((2, 17, 64, 100, choose.randint(2, 300)))
    keys = queries if spelling.square else choose.choice((queries, choose.randint(2, 300)))
    case = replace(
        case, heads=heads, group=heads // kv_heads, size=size, queries=queries, keys=keys, batch=choose.randint(2, 3)
    )
    case = replace(case, dtype=dtype, by_token=by_token, mask_batch=mask_batch, mask_heads=mask_heads)
    draw = torch.Generator().manual_seed(seed)
    sees = seen(case, draw)
    if (spelling.nan and grad) or (name == "written, chosen" and dtype == F16):  # -1e9 is minus infinity in float16 alone
        sees = sees | ~sees.any(-1, keepdim=True)
    given = spelling.given(case, sees, draw, dtype)

    def made(count: int, tokens: int) -> Tensor:
        x = torch.randn(case.batch, tokens, count, case.size, generator=draw).to(dtype)
        x = (x.transpose(1, 2) if case.by_token else x.transpose(1, 2).contiguous()).requires_grad_(grad)
        torch._dynamo.mark_static(x, [1, 3])
        return x

    tensors = made(heads, queries), made(kv_heads, keys), made(kv_heads, keys)
    upstream = torch.randn(case.batch, heads, queries, case.size, generator=draw)
    wide = [x.detach().double().requires_grad_(grad) for x in tensors]
    more = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given]
    with torch.set_grad_enabled(grad):
        expected = spelling.function(*wide, *more)
        result = compiled.of(name)(*tensors, *given)
    found = [("result", result, expected)]
    if grad:
        theirs = torch.autograd.grad(expected, wide, upstream.double())
        ours = torch.autograd.grad(result, tensors, upstream.to(dtype))
        found += zip(("dq", "dk", "dv"), ours, theirs, strict=True)
    for what, mine, true in found:
        mine, true = mine.detach().double(), true.detach()
        if mine.shape != true.shape or not torch.equal(mine.isnan(), true.isnan()):
            return name, f"{what} is NaN elsewhere"
        error = (mine - true).nan_to_num(0).abs().max() / true.nan_to_num(0).abs().max().clamp(min=1)
        if not float(error) <= TOLERANCE[dtype]:
            return name, f"{what} differs by {float(error):.1e} ({case}, training {grad})"
    return name, None


def main() -> int:
    """The number of cases that failed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=600)
    options.add_argument("--seed", type=int, default=0, help="of the first case, the next one's is one more")
    options.add_argument("--count", type=int, default=1 << 60, help="cases at most")
    options.add_argument("--dense", default="eager", choices=("eager", "inductor"))
    given = options.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    begin, seed, how, compiled = time.monotonic(), given.seed, Counter[str](), Compiled(given.dense)
    while time.monotonic() < begin + given.seconds and seed < given.seed + given.count:
        try:
            name, problem = difference(seed, compiled)
        except Exception as error:  # which of them, and go on
            name, problem = "raised", f"{type(error).__name__}: {str(error)[:400]}"
        how["wrong" if problem else "right"] += 1
        how[name] += 1
        if problem:
            print(f"seed {seed}, {name}: {problem}", flush=True)
        seed += 1
        if (seed - given.seed) % 100 == 0:
            print(f"{seed - given.seed} cases, {how['wrong']} wrong, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{seed - given.seed} cases from {given.seed} on: {how['wrong']} wrong, {how['right']} right")
    print(torch._dynamo.utils.counters["stats"]["unique_graphs"], "graphs")
    print(*(f"{count:6} {name}" for name, count in how.items()), sep="\n")
    return how["wrong"]


if __name__ == "__main__":
    sys.exit(min(main(), 100))
