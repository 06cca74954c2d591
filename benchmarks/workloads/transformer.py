"""Stacks of pruned transformer layers with random weights: a vision encoder and two causal decoders.

vit    ViTModel of `transformers`: pre-norm, gelu, 196 patches and a class token
gpt    written out in plain torch.nn: pre-norm, one Linear for query, key and value, causal attention, gelu (tanh)
llama  LlamaModel of `transformers`: RMS norms, rotary positions, three heads of queries to one of keys and values, gated silu
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.arguments import DTYPES, add_dtype, add_list, shares, some_of, texts
from benchmarks.models import PrunedModel
from benchmarks.pruning import pattern, prune_linears
from benchmarks.registry import Case, Workload

LAYERS, WIDTH, HEADS = 4, 768, 12
GATED = 2048  # width of a gated feed-forward block
WORDS = 1000
PATCHES = 197
TOLERANCE = {"f32": 5e-5, "bf16": 5e-2, "int8": 1e-1, "int4": 4e-1}
INPUTS = {"vit": ("1", "4"), "gpt": ("1x1", "1x128", "4x128"), "llama": ("1x1", "1x128", "4x128")}


class Vit(nn.Module):
    """Images [batch, 3, 224, 224] → hidden states [batch, 197, 768]."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTModel

        self.vit = ViTModel(ViTConfig(num_hidden_layers=LAYERS), add_pooling_layer=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden: Tensor = self.vit(images).last_hidden_state
        return hidden


class GptLayer(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


def gpt() -> nn.Module:
    """Hidden states [batch, tokens, 768] → the same."""
    return nn.Sequential(*(GptLayer() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))


class Llama(nn.Module):
    """Words [batch, tokens], int64 → hidden states [batch, tokens, 768]."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": GATED, "num_hidden_layers": LAYERS}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 3}
        self.llama = LlamaModel(LlamaConfig(**sizes, **heads, use_cache=False))

    def forward(self, words: Tensor) -> Tensor:
        hidden: Tensor = self.llama(words).last_hidden_state
        return hidden


NETWORKS = {"vit": Vit, "gpt": gpt, "llama": Llama}


def add_arguments(parser: argparse._ActionsContainer) -> None:
    add_list(parser, "--models", some_of(*INPUTS), "vit,gpt,llama", "of which")
    add_list(parser, "--sparsity", shares, ".8,.9,.95", "shares of zeros")
    parser.add_argument("--pattern", type=pattern, default="unstructured", help="what is pruned (default unstructured)")
    default = "; ".join(f"{model} {','.join(found)}" for model, found in INPUTS.items())
    parser.add_argument("--inputs", type=texts, help=f"batch of vit, batch x tokens of the others (default {default})")
    add_dtype(parser)


def build(model: str, size: str, pattern: str, sparsity: float, dtype: str) -> PrunedModel:
    torch.manual_seed(0)
    network = NETWORKS[model]().eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("weight") and parameter.dim() == 2:
                parameter.normal_(std=0.04)
    prune_linears(network, pattern, sparsity)
    return PrunedModel(network.to(DTYPES[dtype]), (inputs(model, size, DTYPES[dtype]),), TOLERANCE)


def inputs(model: str, size: str, dtype: torch.dtype) -> Tensor:
    """Random ones."""
    if model == "vit":
        return torch.randn(int(size), 3, 224, 224).to(dtype)
    batch, tokens = map(int, size.split("x"))
    if model == "llama":
        return torch.randint(0, WORDS, (batch, tokens))
    return torch.randn(batch, tokens, WIDTH).to(dtype)


def weights(model: str) -> int:
    """Elements of the weights of a layer."""
    if model == "llama":
        return (2 * WIDTH + 2 * WIDTH // 3 + 3 * GATED) * WIDTH
    return 12 * WIDTH**2


def rows(model: str, size: str) -> int:
    if model == "vit":
        return PATCHES * int(size)
    batch, tokens = map(int, size.split("x"))
    return batch * tokens


def cases(args: argparse.Namespace) -> list[Case]:
    typed = {} if args.dtype == "f32" else {"dtype": args.dtype}
    named = [] if args.pattern == "unstructured" else [args.pattern]
    return [
        Case(
            " ".join([model, *named, f"{sparsity:.0%}", size, *typed.values()]),
            {"model": model, "pattern": args.pattern, "sparsity": sparsity, "input": size, **typed},
            partial(build, model, size, args.pattern, sparsity, args.dtype),
            2e-9 * rows(model, size) * LAYERS * weights(model),
        )
        for model in args.models
        for sparsity in args.sparsity
        for size in args.inputs or INPUTS[model]
    ]


WORKLOAD = Workload(
    "stacks of pruned transformer layers, random weights",
    add_arguments,
    cases,
    panels=("model", "input"),
    across="sparsity",
    preparing=1.5,
)
