"""`QuantizedEmbeddingBag` and `QuantizedEmbedding`: layers of torch.nn with tables of few bits.

Rows are integers of 8 or 4 bits with a scale each, or float16.

row[c] = scale q[c]        a row is read in a quarter, an eighth or half of the bytes, and summed in f32
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.sparsity.bags.few_bits import floats_of, quantized_rows
from gossamer.sparsity.bags.sum_bags import WIDEST

BITS = {"float16": 16, "int8": 8, "int4": 4}


def why_no_table(layer: nn.Module) -> str:
    """Why a layer is no table that can be stored in few bits, "" where it is."""
    if not isinstance(layer, nn.Embedding | nn.EmbeddingBag) or type(layer).forward not in _FORWARDS:
        return "no table"
    if layer.max_norm is not None:
        return "max_norm writes to its rows at every call"
    return "" if 0 < layer.weight.shape[1] <= WIDEST and layer.weight.is_cpu else f"its rows are wider than {WIDEST}"


class _Quantized:
    """What both have.

    weight_codes  [rows, columns] of int8 or float16, or uint8 [rows, (columns + 1) / 2] (see few_bits.py)
    weight_scale  [rows], f32; empty for float16
    weight        what they stand for, in the type that it had; computed when it is asked for, never written
    """

    weight_codes: Tensor
    weight_scale: Tensor
    embedding_dim: int
    _dtype: torch.dtype

    @property
    def weight(self) -> Tensor:
        """The table as floats."""
        return floats_of(self.weight_codes, self.weight_scale, self.embedding_dim).to(self._dtype)

    def look_up(
        self, indices: Tensor, offsets: Tensor | None, weights: Tensor | None, kind: str, padding: int | None, last: bool
    ) -> Tensor:
        """[bags, columns]"""
        own = None if weights is None else weights.float()
        (found,) = torch.ops.gossamer.sum_bags.default(
            [self.weight_codes], [indices], [offsets], [own], [-1 if padding is None else padding], kind, last,
            [self.weight_scale], [self.embedding_dim],
        )  # fmt: skip
        return found.to(self._dtype)


class QuantizedEmbeddingBag(_Quantized, nn.EmbeddingBag):  # type: ignore[override]
    """An EmbeddingBag with a table in few bits. The table has no gradient; weights of entries have theirs."""

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """As that of nn.EmbeddingBag."""
        if per_sample_weights is not None and (self.mode != "sum" or per_sample_weights.requires_grad):
            return F.embedding_bag(
                input, self.weight, offsets, mode=self.mode, per_sample_weights=per_sample_weights,
                include_last_offset=self.include_last_offset, padding_idx=self.padding_idx,
            )  # fmt: skip
        last = self.include_last_offset and offsets is not None
        return self.look_up(input, offsets, per_sample_weights, self.mode, self.padding_idx, last)


class QuantizedEmbedding(_Quantized, nn.Embedding):  # type: ignore[override]
    """An Embedding with a table in few bits, which has no gradient."""

    def forward(self, input: Tensor) -> Tensor:
        """As that of nn.Embedding."""
        return self.look_up(input.reshape(-1, 1), None, None, "sum", None, False).view(*input.shape, self.embedding_dim)


_FORWARDS = (nn.Embedding.forward, nn.EmbeddingBag.forward)


def become_quantized(layer: nn.Module, bits: int) -> None:
    """Turns an Embedding or EmbeddingBag into one of few bits, in place, so that hooks and references to it hold."""
    made: Any = layer
    table = made.weight.detach()
    codes, scale = quantized_rows(table, bits)
    del made._parameters["weight"]
    made.__class__ = QuantizedEmbedding if isinstance(layer, nn.Embedding) else QuantizedEmbeddingBag
    made._dtype = table.dtype
    made.register_buffer("weight_codes", codes)
    made.register_buffer("weight_scale", scale)
