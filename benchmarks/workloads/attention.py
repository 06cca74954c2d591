"""Attention of 8 heads of 32 (16 of 64 for causal windows) under the masks that models ship with.

window-W         W tokens to each side, and one token that sees all and is seen by all (Longformer)
causal-W         the last W tokens (Mistral)
documents        packed documents of 256 tokens in the mean
padding          a batch of 8, half full in the mean
bigbird          blocks of 64: neighbours, the first and three that chance has chosen
prefix           the first quarter is seen by all, the rest is causal
"""

from __future__ import annotations

from argparse import Namespace, _ActionsContainer
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.arguments import DTYPES, add_dtype, add_list, sizes, some_of
from benchmarks.attention import Attention, Rule
from benchmarks.contenders import openvino as of_models
from benchmarks.contenders.sparse import chosen, missing
from benchmarks.registry import Case, Contender, Prepared, Unsupported, Workload

WINDOWS = (64, 256, 512, 1024)
MASKS = (*(f"{kind}-{w}" for kind in ("window", "causal") for w in WINDOWS), "documents", "padding", "bigbird", "prefix")
PASSES = ("forward", "both")
BLOCK = 64
LONGEST = 16384  # tokens of those who make arrays of queries x keys


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--masks", some_of(*MASKS), "window-64,causal-256,documents,padding,bigbird,prefix", "which masks")
    add_list(parser, "--lengths", sizes, "1024,4096", "tokens")
    add_list(parser, "--passes", some_of(*PASSES), "forward,both", "forward alone, or with gradients")
    add_dtype(parser)


def rule(name: str, tokens: int) -> Rule:
    """The mask of a name."""
    draw = torch.Generator().manual_seed(0)
    kind, _, size = name.partition("-")
    if kind == "window":
        return lambda b, q, k: ((q - k).abs() <= int(size)) | (q < 1) | (k < 1)
    if kind == "causal":
        return lambda b, q, k: (q >= k) & (q - k < int(size))
    if kind == "documents":
        ends = torch.rand(tokens, generator=draw) < 1 / 256
        document = ends.cumsum(0)
        return lambda b, q, k: document[q] == document[k]
    if kind == "padding":
        lengths = torch.linspace(1, tokens, 8).long()
        return lambda b, q, k: k < lengths[b]
    if kind == "bigbird":
        blocks = -(-tokens // BLOCK)
        chosen = torch.rand(blocks, blocks, generator=draw).argsort(-1).argsort(-1) < 3
        at = torch.arange(blocks)
        chosen |= ((at[:, None] - at).abs() <= 1) | (at == 0) | (at == 0)[:, None]
        return lambda b, q, k: chosen[q // BLOCK, k // BLOCK]
    return lambda b, q, k: (k < tokens // 4) | (q >= k)


def build(name: str, tokens: int, backward: bool, dtype: str) -> Attention:
    kind, _, size = name.partition("-")
    batch, heads, width = 8 if name == "padding" else 1, *((16, 64) if kind == "causal" else (8, 32))
    draw = torch.Generator().manual_seed(0)
    q, k, v, upstream = (torch.randn(batch, heads, tokens, width, generator=draw).to(DTYPES[dtype]) for _ in range(4))
    window = int(size) if kind in ("window", "causal") else 0
    return Attention(rule(name, tokens), q, k, v, upstream, backward, window, kind == "causal")


def cases(args: Namespace) -> list[Case]:
    return [
        Case(
            f"{name}, {tokens} tokens, {passes}",
            {"mask": name, "tokens": tokens, "passes": passes},
            partial(build, name, tokens, passes == "both", args.dtype),
            1e-9 * 4 * 256 * tokens**2,
        )
        for name in args.masks
        for tokens in args.lengths
        for passes in args.passes
    ]


def _check_length(problem: Attention) -> None:
    if problem.q.shape[2] > LONGEST:
        raise Unsupported(f"beyond {LONGEST} tokens its mask takes gigabytes, as an array of queries x keys")


def sdpa(problem: Attention) -> Prepared:
    _check_length(problem)
    mask = problem.mask()
    return Prepared(problem.call(partial(F.scaled_dot_product_attention, attn_mask=mask)))


def flex(problem: Attention) -> Prepared:
    if problem.backward:
        raise Unsupported("FlexAttention has no gradients on CPUs")
    _check_length(problem)
    batch, _, tokens, _ = problem.q.shape
    mask = create_block_mask(lambda b, h, q, k: problem.rule(b, q, k), batch, None, tokens, tokens, device="cpu")
    compiled = torch.compile(partial(flex_attention, block_mask=mask))
    return Prepared(problem.call(compiled))


def blocked(problem: Attention) -> Prepared:
    """Windows as users write them: blocks as long as the window see their neighbours, the first token sees all."""
    w, tokens = problem.window, problem.q.shape[2]
    if not w or tokens % w:
        raise Unsupported("it is written for windows that divide the length")
    after = 0 if problem.causal else w

    def windowed(x: Tensor) -> Tensor:  # by slices: Inductor (torch 2.13) gets the gradient of a transposed `unfold` wrong
        padded = F.pad(x, (0, 0, w, after)).unflatten(2, (-1, w))
        return torch.cat([padded[:, :, start : start + tokens // w] for start in range(2 + after // w)], 3)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = torch.arange(tokens // w)[:, None, None] * w
        i, j = blocks + torch.arange(w)[:, None], blocks + torch.arange(-w, w + after)
        near = (i - j).abs() <= w if not problem.causal else (i >= j) & (i - j < w)
        near = near & (j >= 0) & (j < tokens)
        scores = q.unflatten(2, (-1, w)) @ windowed(k).mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~near, -torch.inf)
        if problem.causal:
            return (scores.softmax(-1) @ windowed(v)).flatten(2, 3)
        far = (q @ k[:, :, :1].mT * q.shape[-1] ** -0.5).unflatten(2, (-1, w))
        scores = torch.cat([scores.masked_fill(j == 0, -torch.inf), far], -1).softmax(-1)
        found = (scores[..., :-1] @ windowed(v) + scores[..., -1:] * v[:, :, :1, None]).flatten(2, 3)
        first = F.scaled_dot_product_attention(q[:, :, :1], k, v)
        return torch.cat([first, found[:, :, 1:]], 2)

    return Prepared(problem.call(torch.compile(attention)))


@dataclass(frozen=True, eq=False)
class _Model:
    """A model that OpenVINO converts, and what it is called with."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    precision: str = "f32"


class _Module(nn.Module):
    """Attention under a mask that stays, as an exporter wants it."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


def openvino(problem: Attention) -> Prepared:
    if problem.backward:
        raise Unsupported("OpenVINO computes no gradients")
    if problem.precision != "f32":
        raise Unsupported("measured in f32 alone")
    _check_length(problem)
    found = of_models.prepared(_Model(_Module(problem.mask()), (problem.q, problem.k, problem.v)), "f32")
    return Prepared(lambda: found.call().flatten())


def sparse(problem: Attention) -> Prepared:
    from gossamer.backend.report.report import collect

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=problem.mask())

    call = problem.call(torch.compile(attention, backend="sparse", fullgraph=True))
    with collect() as collected:
        call()
    decisions = list(collected.decisions)
    return Prepared(call, lambda: chosen(decisions))


def contenders() -> Mapping[str, Contender]:
    return {
        "sdpa": Contender("SDPA", sdpa),
        "flex": Contender("FlexAttention, Inductor", flex),
        "blocked": Contender("blocked by hand, Inductor", blocked),
        "openvino": Contender("OpenVINO", openvino, own_threads=True, missing=of_models.missing),
        "sparse": Contender("Gossamer", sparse, missing=missing),
    }


WORKLOAD = Workload(
    "attention under masks",
    add_arguments,
    cases,
    contenders=contenders,
    baselines=("sdpa", "flex"),
    panels=("mask", "passes"),
    across="tokens",
    preparing=10.0,
)
