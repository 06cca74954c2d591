"""The real all-MiniLM-L6-v2 as a sentence encoder, its 36 encoder Linears pruned by magnitude.

The model, its pruning and its text are those of `examples/pruned_transformer.py`: what a user is shown is
what is measured.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.registry import Case, Problem, Workload
from benchmarks.workloads.linear import shares

TOLERANCE = {"f32": 1e-5, "bf16": 5e-2}
INPUTS = ("8x128", "1x128", "1x16", "8x128-padded")
EXAMPLE = Path(__file__).parents[2] / "examples" / "pruned_transformer.py"


@cache
def example() -> Any:
    """The example as a module: a script for users, in no package, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location("pruned_transformer", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def pretrained() -> tuple[nn.Module, Any]:
    encoder, tokenizer = example().load_encoder()
    return encoder, tokenizer


def inputs(value: str) -> list[str]:
    found = value.split(",")
    if unknown := sorted(set(found) - set(INPUTS)):
        raise argparse.ArgumentTypeError(f"unknown input {', '.join(unknown)}; there are {', '.join(INPUTS)}")
    return found


def add_arguments(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--sparsity", type=shares, default=shares(".3,.8,.9,.95"), help="shares of zeros")
    parser.add_argument("--inputs", type=inputs, default=list(INPUTS), help=f"of {', '.join(INPUTS)} (default: all)")


def passages(batch: int, tokens: int, padded: bool, tokenizer: Any) -> list[str]:
    """Real passages that fill every row or, if `padded`, cut to between a few words and most of a row."""
    long = [text for text in example().topics.values() if len(tokenizer(text)["input_ids"]) >= tokens][:batch]
    if not padded:
        return long
    words = [tokens * (row + 1) // (2 * batch) for row in range(batch)]
    return [" ".join(text.split()[:count]) for text, count in zip(long, words, strict=True)]


def build(size: str, sparsity: float) -> Problem:
    dense, tokenizer = pretrained()
    encoder = copy.deepcopy(dense)
    example().prune(encoder, sparsity)
    batch, tokens = (int(part) for part in size.removesuffix("-padded").split("x"))
    rows = passages(batch, tokens, size.endswith("-padded"), tokenizer)
    return Problem(encoder, example().tokenize(tokenizer, rows, tokens), TOLERANCE)


def cases(args: argparse.Namespace) -> list[Case]:
    return [
        Case(f"{sparsity:.0%} {size}", {"sparsity": sparsity, "input": size}, partial(build, size, sparsity))
        for sparsity in args.sparsity
        for size in args.inputs
    ]


WORKLOAD = Workload("all-MiniLM-L6-v2 with pruned encoder Linears", add_arguments, cases)
