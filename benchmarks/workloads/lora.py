"""A pruned Linear alone, and with a LoRA adapter beside it, not merged."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.arguments import DTYPES, add_dtype, add_list, counted, shapes, shares, sizes
from benchmarks.models import PrunedModel
from benchmarks.pruning import prune
from benchmarks.registry import Case, Workload

TOLERANCE = {"f32": 2e-5, "bf16": 3e-2, "int8": 3e-2}


class Adapted(nn.Module):
    """A frozen layer, and `b(a(x)) * scaling` beside it, as peft has it; without a rank the layer alone."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base, self.rank, self.scaling = base.requires_grad_(False), rank, 2.0
        if rank:
            self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + self.b(self.a(x)) * self.scaling if self.rank else y


def add_arguments(parser: argparse._ActionsContainer) -> None:
    add_list(parser, "--shapes", shapes, "1024x1024,2048x2048,1024x4096", "in x out")
    add_list(parser, "--ranks", sizes, "16", "of the adapter; the layer alone comes first")
    add_list(parser, "--sparsity", shares, ".9", "shares of zeros")
    add_list(parser, "--tokens", sizes, "512", "rows of the input")
    add_dtype(parser)


def build(features: tuple[int, int], rank: int, sparsity: float, tokens: int, dtype: str = "f32") -> PrunedModel:
    """Normally distributed weights, pruned."""
    torch.manual_seed(0)
    base = nn.Linear(*features)
    with torch.no_grad():
        base.weight.normal_(std=features[0] ** -0.5)
        prune(base.weight, "unstructured", sparsity)
    model = Adapted(base, rank).eval().to(DTYPES[dtype])
    return PrunedModel(model, (torch.randn(tokens, features[0]).to(DTYPES[dtype]),), TOLERANCE)


def cases(args: argparse.Namespace) -> list[Case]:
    found, typed = [], {} if args.dtype == "f32" else {"dtype": args.dtype}
    for k, m in args.shapes:
        for sparsity in args.sparsity:
            for tokens in args.tokens:
                for rank in (0, *args.ranks):
                    name = " ".join([f"{k}x{m} {sparsity:.0%} {counted(tokens, 'token')} rank {rank}", *typed.values()])
                    parameters = {"shape": f"{k}x{m}", "sparsity": sparsity, "tokens": tokens, "rank": rank, **typed}
                    gflop = 2e-9 * tokens * (k * m + rank * (k + m))
                    found.append(Case(name, parameters, partial(build, (k, m), rank, sparsity, tokens, args.dtype), gflop))
    return found


def conclude(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """What an adapter costs beside its layer."""
    times: dict[tuple[str, ...], dict[int, float]] = {}
    for case in cases:
        parameters = dict(case["parameters"])
        rank = int(parameters.pop("rank"))
        for name, result in case["results"].items():
            if "median_ms" in result:
                where = ", ".join(f"{key} {value}" for key, value in parameters.items())
                times.setdefault((where, name), {})[rank] = result["median_ms"]
    return [
        f"- {where}, {name}: with rank {rank} a call takes {ms[rank] / ms[0]:.2f}x of the layer alone"
        for (where, name), ms in times.items()
        for rank in ms
        if rank and 0 in ms
    ]


WORKLOAD = Workload(
    "a pruned Linear with a LoRA adapter beside it",
    add_arguments,
    cases,
    conclude=conclude,
    panels=("shape", "tokens"),
    across="rank",
)
