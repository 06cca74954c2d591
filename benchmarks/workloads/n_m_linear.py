"""One Linear with bias and ReLU that keeps n of every m neighbouring weights."""

from __future__ import annotations

import argparse

from benchmarks.arguments import add_dtype, add_list, shapes, sizes
from benchmarks.pruning import density, patterns
from benchmarks.registry import Case, Workload
from benchmarks.workloads.linear import case


def add_arguments(parser: argparse._ActionsContainer) -> None:
    add_list(parser, "--shapes", shapes, "768x3072,3072x768", "in x out")
    add_list(parser, "--groups", patterns, "2:4,1:4", "weights that are kept of every so many")
    add_list(parser, "--tokens", sizes, "1,4,8,128", "rows of the input")
    add_dtype(parser)


def cases(args: argparse.Namespace) -> list[Case]:
    return [
        case(features, pattern, 1 - density(pattern, 0), tokens, args.dtype)
        for features in args.shapes
        for pattern in args.groups
        for tokens in args.tokens
    ]


WORKLOAD = Workload("one n:m-pruned Linear with bias and ReLU", add_arguments, cases, panels=("pattern",), across="tokens")
