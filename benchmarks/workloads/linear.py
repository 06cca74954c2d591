"""One pruned Linear with bias and ReLU: the shapes of small transformers, and one that no tile divides."""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import nn

from benchmarks.registry import Case, Problem, Workload

# Float32 results differ by the order of the sums: about √K · 6e-8 of the largest entry, for K terms.
TOLERANCE = {"f32": 1e-5, "bf16": 3e-2}


def shape(value: str) -> tuple[int, int]:
    inputs, cross, outputs = value.partition("x")
    if not (cross and inputs.isdecimal() and outputs.isdecimal() and int(inputs) and int(outputs)):
        raise argparse.ArgumentTypeError(f"'{value}' is not a shape such as 768x3072 (in_features x out_features)")
    return int(inputs), int(outputs)


def shapes(value: str) -> list[tuple[int, int]]:
    return [shape(part) for part in value.split(",")]


def shares(value: str) -> list[float]:
    found = [float(part) for part in value.split(",")]
    if not all(0 <= share < 1 for share in found):
        raise argparse.ArgumentTypeError(f"'{value}' is not a list of shares from 0 to below 1, such as .8,.9")
    return found


def sizes(value: str) -> list[int]:
    return [int(part) for part in value.split(",")]


def add_arguments(parser: argparse._ActionsContainer) -> None:
    default = "768x3072,3072x768,384x1536,1536x384,1000x1333"
    parser.add_argument("--shapes", type=shapes, default=shapes(default), help=f"in x out (default {default})")
    parser.add_argument("--sparsity", type=shares, default=shares(".5,.7,.8,.9,.95"), help="shares of zeros")
    parser.add_argument("--tokens", type=sizes, default=sizes("1,8,32,128,512"), help="rows of the input")


def build(features: tuple[int, int], sparsity: float, tokens: int) -> Problem:
    """Normally distributed weights without the smallest ones: zeros that lie at random."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(*features)
    with torch.no_grad():
        linear.weight.normal_(generator=generator)
        linear.bias.normal_(generator=generator)
        weight = linear.weight.view(-1)
        weight[weight.abs().argsort()[: round(sparsity * weight.numel())]] = 0
    inputs = torch.randn(tokens, features[0], generator=generator)
    return Problem(nn.Sequential(linear, nn.ReLU()).eval(), (inputs,), TOLERANCE)


def cases(args: argparse.Namespace) -> list[Case]:
    return [
        Case(
            f"{k}x{m} {sparsity:.0%} {tokens} token{'s' * (tokens > 1)}",
            {"shape": f"{k}x{m}", "sparsity": sparsity, "tokens": tokens},
            partial(build, (k, m), sparsity, tokens),
        )
        for k, m in args.shapes
        for sparsity in args.sparsity
        for tokens in args.tokens
    ]


WORKLOAD = Workload("one pruned Linear with bias and ReLU", add_arguments, cases)
