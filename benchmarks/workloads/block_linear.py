"""One Linear with bias and ReLU of which whole blocks are pruned."""

from __future__ import annotations

import argparse

from benchmarks.arguments import add_dtype, add_list, shapes, shares, sizes
from benchmarks.pruning import patterns
from benchmarks.registry import Case, Workload
from benchmarks.workloads.linear import case


def add_arguments(parser: argparse._ActionsContainer) -> None:
    add_list(parser, "--shapes", shapes, "768x3072,3072x768", "in x out")
    add_list(parser, "--blocks", patterns, "16x1,1x16,4x4,16x16,32x32", "outputs x inputs of a block")
    add_list(parser, "--sparsity", shares, ".8,.9", "shares of zeros")
    add_list(parser, "--tokens", sizes, "1,8,128,512", "rows of the input")
    add_dtype(parser)


def cases(args: argparse.Namespace) -> list[Case]:
    return [
        case(features, pattern, sparsity, tokens, args.dtype)
        for features in args.shapes
        for pattern in args.blocks
        for sparsity in args.sparsity
        for tokens in args.tokens
    ]


WORKLOAD = Workload(
    "one block-pruned Linear with bias and ReLU", add_arguments, cases, panels=("pattern", "sparsity"), across="tokens"
)
