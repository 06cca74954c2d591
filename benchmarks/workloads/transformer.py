"""Stacks of pruned transformer layers with random weights: a vision encoder, two causal decoders, and a step of decoding.

vit    ViTModel of `transformers`: pre-norm, gelu, 196 patches and a class token
gpt    written out in plain torch.nn: pre-norm, one Linear for query, key and value, causal attention, gelu (tanh)
llama  LlamaModel of `transformers`: RMS norms, rotary positions, three heads of queries to one of keys and values, gated silu
step   written out in torch: the next token of eight such layers of 1024 features, after 256 whose keys and values are kept
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
INPUTS = {"vit": ("1", "4"), "gpt": ("1x1", "1x128", "4x128"), "llama": ("1x128", "4x128"), "step": ("1x1",)}


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


class StepLayer(nn.Module):
    """A layer of a Llama as its next token sees it: hidden states [1, 1, 1024] → the same."""

    LAYERS, WIDTH, HEADS, SHARED, GATED, PAST = 8, 1024, 16, 4, 2816, 256
    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        width, head = self.WIDTH, self.WIDTH // self.HEADS
        self.norm1, self.norm2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, width // self.SHARED, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, self.GATED, bias=False) for _ in range(2))
        self.down = nn.Linear(self.GATED, width, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(1, self.HEADS // self.SHARED, self.PAST, head))
        angles = self.PAST * 1e4 ** -(torch.arange(0, head, 2) / head)
        self.register_buffer("cos", angles.cos().repeat(2))
        self.register_buffer("sin", angles.sin().repeat(2))

    def forward(self, x: Tensor) -> Tensor:
        normed = _rms_norm(x, self.norm1)
        q, k, v = (each(normed).unflatten(-1, (-1, self.cos.numel())).transpose(1, 2) for each in (self.q, self.k, self.v))
        keys, values = torch.cat([self.keys, self._turned(k)], 2), torch.cat([self.values, v], 2)
        q = self._turned(q).unflatten(1, (-1, self.SHARED)).flatten(2, 3)  # queries that share keys are tokens of one head
        mixed = F.scaled_dot_product_attention(q, keys, values)
        x = x + self.out(mixed.reshape(1, 1, -1))
        normed = _rms_norm(x, self.norm2)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _turned(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * self.cos + torch.cat([-high, low], -1) * self.sin


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def step() -> nn.Module:
    return nn.Sequential(*(StepLayer() for _ in range(StepLayer.LAYERS)))


NETWORKS = {"vit": Vit, "gpt": gpt, "llama": Llama, "step": step}


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
    return torch.randn(batch, tokens, StepLayer.WIDTH if model == "step" else WIDTH).to(dtype)


def weights(model: str) -> int:
    """Elements of the weights of a layer."""
    if model == "llama":
        return (2 * WIDTH + 2 * WIDTH // 3 + 3 * GATED) * WIDTH
    if model == "step":
        return (2 * StepLayer.WIDTH + 2 * StepLayer.WIDTH // StepLayer.SHARED + 3 * StepLayer.GATED) * StepLayer.WIDTH
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
            2e-9 * rows(model, size) * (StepLayer.LAYERS if model == "step" else LAYERS) * weights(model),
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
