"""The real all-MiniLM-L6-v2 as a sentence encoder, its 36 encoder Linears pruned by magnitude.

The model and its text are those that `examples/pruned_transformer.py` shows.
"""

from __future__ import annotations

import argparse
import copy
import re
from functools import cache, partial
from pydoc_data.topics import topics
from typing import Any

from torch import nn

from benchmarks.arguments import DTYPES, add_dtype, add_list, shares
from benchmarks.examples import example
from benchmarks.models import PrunedModel
from benchmarks.pruning import pattern, prune_linears
from benchmarks.registry import Case, Workload

TOLERANCE = {"f32": 1e-5, "bf16": 5e-2, "int8": 1e-1}
INPUTS = "8x128,1x128,1x16,8x128-padded,8x100,8x37,1x100,1x37"
WEIGHTS = 6 * (4 * 384 * 384 + 2 * 384 * 1536)
EXAMPLE = "sentence_encoder"


@cache
def pretrained() -> tuple[nn.Module, Any]:
    encoder, tokenizer = example(EXAMPLE).load_encoder()
    return encoder, tokenizer


def size(text: str) -> tuple[int, int]:
    batch, tokens = text.removesuffix("-padded").split("x")
    return int(batch), int(tokens)


def inputs(value: str) -> list[str]:
    found = value.split(",")
    if wrong := [part for part in found if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(-padded)?", part)]:
        raise argparse.ArgumentTypeError(f"'{wrong[0]}' is not batch x tokens such as 8x128 or 8x128-padded")
    return found


def add_arguments(parser: argparse._ActionsContainer) -> None:
    add_list(parser, "--sparsity", shares, ".3,.5,.8,.9,.95", "shares of zeros")
    add_list(parser, "--inputs", inputs, INPUTS, "batch x tokens")
    parser.add_argument("--pattern", type=pattern, default="unstructured", help="what is pruned (default unstructured)")
    add_dtype(parser)


def passages(batch: int, tokens: int, padded: bool, tokenizer: Any) -> list[str]:
    """Real passages that fill every row or, if `padded`, cut to between a few words and most of a row."""
    long = [text for text in topics.values() if len(tokenizer(text)["input_ids"]) >= tokens][:batch]
    if not padded:
        return long
    words = [tokens * (row + 1) // (2 * batch) for row in range(batch)]
    return [" ".join(text.split()[:count]) for text, count in zip(long, words, strict=True)]


def build(text: str, pattern: str, sparsity: float, dtype: str = "f32") -> PrunedModel:
    dense, tokenizer = pretrained()
    encoder = copy.deepcopy(dense)
    prune_linears(encoder, pattern, sparsity)
    batch, tokens = size(text)
    rows = passages(batch, tokens, text.endswith("-padded"), tokenizer)
    return PrunedModel(encoder.to(DTYPES[dtype]), example(EXAMPLE).tokenize(tokenizer, rows, tokens), TOLERANCE)


def cases(args: argparse.Namespace) -> list[Case]:
    typed = {} if args.dtype == "f32" else {"dtype": args.dtype}
    named = [] if args.pattern == "unstructured" else [args.pattern]
    return [
        Case(
            " ".join([*named, f"{sparsity:.0%}", text, *typed.values()]),
            {"pattern": args.pattern, "sparsity": sparsity, "input": text, **typed},
            partial(build, text, args.pattern, sparsity, args.dtype),
            2e-9 * size(text)[0] * size(text)[1] * WEIGHTS,
        )
        for sparsity in args.sparsity
        for text in args.inputs
    ]


WORKLOAD = Workload(
    "all-MiniLM-L6-v2 with pruned encoder Linears", add_arguments, cases, panels=("input",), across="sparsity", preparing=2.0
)
