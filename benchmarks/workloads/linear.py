"""One pruned Linear with bias and ReLU: the shapes of small transformers, and one that no tile divides."""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import nn

from benchmarks.arguments import DTYPES, add_dtype, add_list, counted, shapes, shares, sizes
from benchmarks.models import PrunedModel
from benchmarks.pruning import prune
from benchmarks.registry import Case, Workload

# Float32 results differ by the order of the sums: about √K · 6e-8 of the largest entry, for K terms.
TOLERANCE = {"f32": 1e-5, "bf16": 3e-2, "int8": 3e-2}
SHAPES = "768x3072,3072x768,384x1536,1536x384,1000x1333"


def add_arguments(parser: argparse._ActionsContainer) -> None:
    add_list(parser, "--shapes", shapes, SHAPES, "in x out")
    add_list(parser, "--sparsity", shares, ".5,.7,.8,.9,.95", "shares of zeros")
    add_list(parser, "--tokens", sizes, "1,8,32,128,512", "rows of the input")
    add_dtype(parser)


def build(features: tuple[int, int], pattern: str, sparsity: float, tokens: int, dtype: str = "f32") -> PrunedModel:
    """Normally distributed weights, pruned."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(*features)
    with torch.no_grad():
        linear.weight.normal_(generator=generator)
        linear.bias.normal_(generator=generator)
        prune(linear.weight, pattern, sparsity)
    inputs = torch.randn(tokens, features[0], generator=generator)
    model = nn.Sequential(linear, nn.ReLU()).eval().to(DTYPES[dtype])
    return PrunedModel(model, (inputs.to(DTYPES[dtype]),), TOLERANCE)


def case(features: tuple[int, int], pattern: str, sparsity: float, tokens: int, dtype: str = "f32") -> Case:
    """The case of one Linear; a pattern that is not "unstructured" is in its name and its parameters."""
    k, m = features
    shape = f"{k}x{m}"
    named = [] if pattern == "unstructured" else [pattern]
    share = [] if ":" in pattern else [f"{sparsity:.0%}"]
    typed = {} if dtype == "f32" else {"dtype": dtype}
    return Case(
        " ".join([shape, *named, *share, counted(tokens, "token"), *typed.values()]),
        {"shape": shape, "pattern": pattern, "sparsity": sparsity, "tokens": tokens, **typed},
        partial(build, features, pattern, sparsity, tokens, dtype),
        2e-9 * tokens * k * m,
    )


def cases(args: argparse.Namespace) -> list[Case]:
    return [
        case(features, "unstructured", sparsity, tokens, args.dtype)
        for features in args.shapes
        for sparsity in args.sparsity
        for tokens in args.tokens
    ]


WORKLOAD = Workload("one pruned Linear with bias and ReLU", add_arguments, cases, panels=("tokens",), across="sparsity")
