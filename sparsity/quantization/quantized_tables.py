"""`QuantizedEmbeddingBag` and `QuantizedEmbedding`: layers of torch.nn with tables of few bits.

Rows are integers of 8 or 4 bits with a scale each, or float16.

row[c] = scale q[c]        a row is read in a quarter, an eighth or half of the bytes, and summed in f32
"""

import copy
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.sparsity.bags.few_bits import floats_of, quantized_rows
from gossamer.sparsity.bags.sum_bags import WIDEST

BITS = {"float16": 16, "int8": 8, "int4": 4}
TYPES = {"float16": torch.float16, "int8": torch.int8, "int4": torch.uint8}


TABLES = (nn.Embedding, nn.EmbeddingBag)


def why_no_table(layer: nn.Module) -> str:
    """Why a layer is no table that can be stored in few bits, "" where it is."""
    if isinstance(layer, _Quantized):
        return "is in few bits already"
    if not isinstance(layer, TABLES) or type(layer).forward not in _FORWARDS:
        return "no table that torch looks up"
    if layer.max_norm is not None:
        return "max_norm writes to its rows at every call"
    columns = layer.embedding_dim
    if not 0 < columns <= WIDEST:
        return f"its rows have {columns} columns, must be 1 to {WIDEST}"
    return "" if layer.weight.device.type in ("cpu", "meta") else "is on a GPU"


class _Quantized:
    """What both have.

    weight_int8     [rows, columns]; or in its place
    weight_int4     uint8 [rows, (columns + 1) / 2], see few_bits.py; or
    weight_float16  [rows, columns]
    weight_scale    [rows], f32; empty for float16
    weight          what they stand for, in the type that it had or that the module was converted to (`half`, `to`); computed
                    when it is asked for, never written

    Conversions change the type of results. Few bits stay as they are, and scales f32.
    """

    weight_scale: Tensor
    embedding_dim: int
    _bits: str
    _dtype: torch.dtype

    @property
    def codes(self) -> Tensor:
        """The table in few bits."""
        found: Tensor = getattr(self, f"weight_{self._bits}")
        return found

    @property
    def weight(self) -> Tensor:
        """The table as floats."""
        return floats_of(self.codes, self.weight_scale, self.embedding_dim).to(self._dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        held = {name: getattr(self, name) for name in (f"weight_{self._bits}", "weight_scale")}
        super()._apply(fn, recurse)  # type: ignore[misc]
        for name, tensor in held.items():
            setattr(self, name, tensor.to(getattr(self, name).device))
        self._dtype = fn(torch.empty(0, dtype=self._dtype)).dtype
        return self

    def look_up(
        self, indices: Tensor, offsets: Tensor | None, weights: Tensor | None, kind: str, padding: int | None, last: bool
    ) -> Tensor:
        """[bags, columns]"""
        own = None if weights is None else weights.float()
        (found,) = torch.ops.gossamer.sum_bags.default(
            [self.codes], [indices], [offsets], [own], [-1 if padding is None else padding], kind, last,
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


def become_quantized(layer: nn.Module, weights: str, made: dict[int, tuple[Tensor, Tensor]]) -> None:
    """Turns an Embedding or EmbeddingBag into one of few bits, in place, so that hooks and references to it hold.

    made  codes and scales of tables, by their ids: layers that share a table still do
    """
    table: Tensor = layer._parameters["weight"]  # type: ignore[assignment]
    if id(table) not in made:
        made[id(table)] = quantized_rows(table, BITS[weights])
    _become(layer, weights, *made[id(table)])


def _become(layer: Any, weights: str, codes: Tensor, scale: Tensor) -> None:
    layer._dtype, layer._bits = layer._parameters.pop("weight").dtype, weights
    layer.__class__ = QuantizedEmbedding if isinstance(layer, nn.Embedding) else QuantizedEmbeddingBag
    layer.register_buffer(f"weight_{weights}", codes)
    layer.register_buffer("weight_scale", scale)


@dataclass(frozen=True)
class FloatTable:
    """A table that is to be one of few bits, as a file has it."""

    layer: nn.Module
    weights: str

    def become(self) -> nn.Module:
        """Turns it, in place, into one whose buffers are still to be filled."""
        return self._emptied(self.layer, self.layer.weight.device)  # type: ignore[arg-type]

    def look(self) -> nn.Module:
        """What it will be, on the meta device."""
        like = copy.copy(self.layer)
        like._parameters, like._buffers = dict(like._parameters), dict(like._buffers)
        return self._emptied(like, torch.device("meta"))

    def _emptied(self, layer: nn.Module, device: torch.device) -> nn.Module:
        rows, columns = layer._parameters["weight"].shape  # type: ignore[union-attr]
        width = -(-columns // 2) if self.weights == "int4" else columns
        codes = torch.empty(rows, width, dtype=TYPES[self.weights], device=device)
        _become(layer, self.weights, codes, torch.empty(0 if self.weights == "float16" else rows, device=device))
        return layer


def in_few_bits(modules: Mapping[str, nn.Module], file: Container[str]) -> dict[str, FloatTable]:
    """The tables, by name, that have floats and of which a file has few bits."""
    return {
        name: FloatTable(layer, weights)
        for name, layer in modules.items()
        for weights in BITS
        if not why_no_table(layer) and f"{name}.weight_{weights}".lstrip(".") in file
    }
