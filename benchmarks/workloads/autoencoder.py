"""The autoencoders that Scorch was measured on (784 inputs, two hidden layers and their mirror image), pruned per layer."""

from __future__ import annotations

import argparse
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from benchmarks.arguments import add_list, shares, sizes, some_of
from benchmarks.models import PrunedModel
from benchmarks.pruning import prune_linears
from benchmarks.registry import Case, Workload

WIDTHS = {"small": (784, 1024, 512), "medium": (784, 2048, 1024), "large": (784, 4096, 2048)}
TOLERANCE = {"f32": 2e-5, "bf16": 5e-2}


def add_arguments(parser: argparse._ActionsContainer) -> None:
    add_list(parser, "--sizes", some_of(*WIDTHS), "small,medium,large", "which of the networks")
    add_list(parser, "--sparsity", shares, ".5,.8,.9,.95,.99", "shares of zeros")
    add_list(parser, "--batch", sizes, "256", "rows of the input")


def layers(size: str) -> list[tuple[int, int]]:
    encoder = WIDTHS[size]
    return list(pairwise((*encoder, *encoder[-2::-1])))


def build(size: str, sparsity: float, batch: int) -> PrunedModel:
    torch.manual_seed(0)
    modules = [module for features in layers(size) for module in (nn.Linear(*features), nn.ReLU())]
    model = nn.Sequential(*modules[:-1]).eval()
    prune_linears(model, "unstructured", sparsity)
    return PrunedModel(model, (torch.rand(batch, WIDTHS[size][0]),), TOLERANCE)


def cases(args: argparse.Namespace) -> list[Case]:
    return [
        Case(
            f"{size} {'-'.join(map(str, WIDTHS[size]))} {sparsity:.0%} batch {batch}",
            {"size": size, "sparsity": sparsity, "batch": batch},
            partial(build, size, sparsity, batch),
            2e-9 * batch * sum(k * m for k, m in layers(size)),
        )
        for size in args.sizes
        for sparsity in args.sparsity
        for batch in args.batch
    ]


WORKLOAD = Workload("Scorch's autoencoders", add_arguments, cases, panels=("size",), across="sparsity", preparing=0.6)
