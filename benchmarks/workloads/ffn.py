"""The feed-forward part of a transformer layer, as a chain and as the two Linears that it consists of."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.arguments import DTYPES, add_dtype, add_list, counted, shape, shares, sizes, some_of
from benchmarks.models import PrunedModel
from benchmarks.pruning import pattern, prune_linears
from benchmarks.registry import Case, Workload

TOLERANCE = {"f32": 2e-5, "bf16": 4e-2}


def add_arguments(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--features", type=shape, default=(768, 3072), help="outer x inner width (default 768x3072)")
    parser.add_argument("--pattern", type=pattern, default="unstructured", help="what is pruned (default unstructured)")
    add_list(parser, "--sparsity", shares, ".5,.8,.9,.95", "shares of zeros")
    add_list(parser, "--tokens", sizes, "16,128,512", "rows of the input")
    add_list(parser, "--parts", some_of("chain", "up", "down"), "chain,up,down", "of which")
    add_dtype(parser)


def build(features: tuple[int, int], part: str, pattern: str, sparsity: float, tokens: int, dtype: str) -> PrunedModel:
    outer, inner = features
    torch.manual_seed(0)
    up, down = nn.Sequential(nn.Linear(outer, inner), nn.GELU()), nn.Linear(inner, outer)
    model: nn.Module = {"chain": nn.Sequential(*up, down), "up": up, "down": nn.Sequential(down)}[part]
    prune_linears(model, pattern, sparsity)
    x = torch.randn(tokens, inner if part == "down" else outer)
    return PrunedModel(model.eval().to(DTYPES[dtype]), (x.to(DTYPES[dtype]),), TOLERANCE)


def cases(args: argparse.Namespace) -> list[Case]:
    outer, inner = args.features
    typed = {} if args.dtype == "f32" else {"dtype": args.dtype}
    named = [] if args.pattern == "unstructured" else [args.pattern]
    found = []
    for tokens in args.tokens:
        for sparsity in args.sparsity:
            for part in args.parts:
                name = " ".join([part, *named, f"{sparsity:.0%}", counted(tokens, "token"), *typed.values()])
                parameters = {"part": part, "pattern": args.pattern, "sparsity": sparsity, "tokens": tokens, **typed}
                gflop = 2e-9 * tokens * outer * inner * (2 if part == "chain" else 1)
                make = partial(build, args.features, part, args.pattern, sparsity, tokens, args.dtype)
                found.append(Case(name, parameters, make, gflop))
    return found


def conclude(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """What it brings to compute the chain at once."""
    times: dict[tuple[str, ...], dict[str, float]] = {}
    for case in cases:
        parameters = dict(case["parameters"])
        part = parameters.pop("part")
        for name, result in case["results"].items():
            if "median_ms" in result:
                where = ", ".join(f"{key} {value}" for key, value in parameters.items())
                times.setdefault((where, name), {})[part] = result["median_ms"]
    return [
        f"- {where}, {name}: the chain is {(ms['up'] + ms['down']) / ms['chain']:.2f}x as fast as its two layers"
        for (where, name), ms in times.items()
        if ms.keys() == {"chain", "up", "down"} and name.startswith("sparse")
    ]


WORKLOAD = Workload(
    "up, gelu and down of a transformer layer, and each by itself",
    add_arguments,
    cases,
    conclude=conclude,
    panels=("part", "tokens"),
    across="sparsity",
    preparing=0.5,
)
