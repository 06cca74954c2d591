"""The models that are compiled on a GPU: pruned feed-forward networks, an encoder, and a graph network."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import gossamer
from gossamer.sparsity.pruning.patterns import mask_of, pattern_of

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""How far results may be from f64, as a share of the largest."""


@dataclass(frozen=True)
class Case:
    """A feed-forward network of a transformer, pruned in some way, and maybe quantized to int8. `pattern` is that of prune."""

    name: str
    dtype: torch.dtype
    density: float
    pattern: str = "unstructured"
    tokens: tuple[int, ...] = (1, 33, 512)
    width: int = 1024
    inner: int = 4096
    int8: bool = False

    def model(self) -> nn.Module:
        """On the CPU."""
        dense = nn.Sequential(nn.Linear(self.width, self.inner), nn.GELU(), nn.Linear(self.inner, self.width))
        model = pruned(dense, self.density, self.pattern).to(self.dtype)
        return gossamer.quantize(model) if self.int8 else model

    @property
    def tolerance(self) -> float:
        """Of the largest result; what is a little more or less may be rounded to another integer."""
        return 2e-2 if self.int8 else TOLERANCE[self.dtype]


CASES = (
    Case("unstructured f32", torch.float32, 0.1),
    Case("unstructured bf16", torch.bfloat16, 0.1),
    Case("unstructured f16", torch.float16, 0.5, tokens=(1, 4, 33)),
    Case("2:4 f16", torch.float16, 0.5, "2:4"),
    Case("blocks of 64 bf16", torch.bfloat16, 0.2, "64x64"),
    Case("unstructured int8", torch.float32, 0.1, tokens=(1, 8, 33, 512), int8=True),
    Case("V:N:M bf16", torch.bfloat16, 0.25, "128:2:8"),
    Case("blocks of 64 int8", torch.float32, 0.2, "64x64", int8=True),
)


def pruned(model: nn.Module, density: float, pattern: str = "unstructured") -> nn.Module:
    """The model, of whose linear layers the largest weights are left."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data *= mask_of(pattern_of(pattern), layer.weight.detach().abs(), density)
    return model


def encoder(dtype: torch.dtype) -> nn.Module:
    """A transformer of MiniLM's sizes with 90 % zeros."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    model = BertModel(BertConfig(vocab_size=1000, attn_implementation="sdpa", **sizes), add_pooling_layer=False)
    return pruned(model, 0.1).to(dtype).eval()


class Convolution(nn.Module):
    """Message passing as graph networks spell it: weighted rows of the sources of edges, summed at their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(64, 32)

    def forward(self, x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
        """[nodes, 32]"""
        rows = self.lift(x)
        return torch.zeros_like(rows).index_add(0, edges[1], rows.index_select(0, edges[0]) * weight[:, None])
