"""`StoredEmbeddingBag` and `StoredEmbedding` are layers of torch.nn whose tables take less memory.

Rows are integers of 8 or 4 bits with a scale for each row, or float16, or nonzeros and a bit for each column.

row[c] = scale q[c]        a row is read in a quarter, an eighth or half of the bytes, and summed in f32
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.sparsity.bags.few_bits import floats_of, quantized_rows
from gossamer.sparsity.bags.nonzero_rows import bytes_of_bits, nonzero_rows
from gossamer.sparsity.bags.sum_bags import WIDEST
from gossamer.sparsity.pruning.norm_hooks import remover_of_norm
from gossamer.sparsity.quantization.kept_types import KeepsTypes

BITS = {"float16": 16, "int8": 8, "int4": 4}
NONZEROS = "nonzeros"
_TYPES = {"float16": torch.float16, "int8": torch.int8, "int4": torch.uint8, NONZEROS: torch.float32}
TABLES = (nn.Embedding, nn.EmbeddingBag)


def why_no_table(layer: nn.Module) -> str:
    """Returns why the table of a layer cannot be stored in less memory, "" if it can."""
    if isinstance(layer, _Stored):
        return "is stored in less memory already"
    if not isinstance(layer, TABLES) or type(layer).forward not in _FORWARDS:
        return "no table that torch looks up"
    if remover_of_norm(layer):
        return "its rows are computed from others"
    if layer.max_norm is not None:
        return "max_norm writes to its rows at every call"
    columns = layer.embedding_dim
    if not 0 < columns <= WIDEST:
        return f"its rows have {columns} columns, must be 1 to {WIDEST}"
    return "" if layer.weight.device.type in ("cpu", "meta") else "is on a GPU"


class _Stored(KeepsTypes):
    """The common base of both classes.

    weight_int8      [rows, columns]; or in its place
    weight_int4      uint8 [rows, (columns + 1) / 2], see few_bits.py; or
    weight_float16   [rows, columns]; or
    weight_nonzeros  f32 [nonzeros], see nonzero_rows.py
    weight_scale     [rows], f32; empty for float16; or in its place
    weight_bits      uint8, of nonzeros
    weight           the table as floats, in its original dtype or that of a conversion (`half`, `to`); computed at each access,
                     never written

    Conversions change the dtype of results. The stored buffers keep theirs.
    """

    embedding_dim: int
    _kind: str
    _was: type[nn.Module]
    _is_trained: bool
    _parameters: dict[str, nn.Parameter | None]

    @property
    def names(self) -> tuple[str, str]:
        """The names of both buffers."""
        return _names(self._kind)

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """The values of the table, and its scales or bits."""
        values, of_rows = (getattr(self, name) for name in self.names)
        return values, of_rows

    @property
    def weight(self) -> Tensor:
        """The table as floats."""
        return floats_of(*self.stored, self.embedding_dim).to(self._dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._kind}"  # type: ignore[misc]

    def look_up(
        self, indices: Tensor, offsets: Tensor | None, weights: Tensor | None, kind: str, padding: int | None, last: bool
    ) -> Tensor:
        """Returns the sums, means or maxima of bags of rows, [bags, columns]."""
        own = None if weights is None else weights.float()
        values, of_rows = self.stored
        (found,) = torch.ops.gossamer.sum_bags.default(
            [values], [indices], [offsets], [own], [-1 if padding is None else padding], kind, last, [of_rows],
            [self.embedding_dim],
        )  # fmt: skip
        return found.to(self._dtype)


class StoredEmbeddingBag(_Stored, nn.EmbeddingBag):  # type: ignore[override]
    """An EmbeddingBag whose table takes less memory. The table has no gradient; weights of entries have one."""

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Computes what nn.EmbeddingBag computes."""
        if per_sample_weights is not None and (self.mode != "sum" or per_sample_weights.requires_grad):
            return F.embedding_bag(
                input, self.weight, offsets, mode=self.mode, per_sample_weights=per_sample_weights,
                include_last_offset=self.include_last_offset, padding_idx=self.padding_idx,
            )  # fmt: skip
        last = self.include_last_offset and offsets is not None
        return self.look_up(input, offsets, per_sample_weights, self.mode, self.padding_idx, last)


class StoredEmbedding(_Stored, nn.Embedding):  # type: ignore[override]
    """An Embedding whose table takes less memory, and has no gradient."""

    def forward(self, input: Tensor) -> Tensor:
        """Computes what nn.Embedding computes."""
        return self.look_up(input.reshape(-1, 1), None, None, "sum", None, False).view(*input.shape, self.embedding_dim)


_FORWARDS = (nn.Embedding.forward, nn.EmbeddingBag.forward)
Shared = dict[int, tuple[Tensor, Tensor]]
"""The stored tables, by the ids of the original ones, so that layers that share a table still share it."""


def become_stored(layer: nn.Module, kind: str, made: Shared) -> None:
    """Turns an Embedding or EmbeddingBag into a stored one in place, so that hooks on it and references to it stay valid.

    kind  "int8", "int4", "float16", or "nonzeros"
    """
    table: Tensor = layer._parameters["weight"]  # type: ignore[assignment]
    if id(table) not in made:
        made[id(table)] = nonzero_rows(table) if kind == NONZEROS else quantized_rows(table, BITS[kind])
    _become(layer, kind, *made[id(table)])


def become_floats(model: nn.Module) -> None:
    """Makes the tables of nonzeros of a model float parameters again, in place. Shared tables stay shared."""
    made = dict[int, nn.Parameter]()
    for layer in model.modules():
        if isinstance(layer, _Stored) and layer._kind == NONZEROS:
            values, own = layer.stored[0], vars(layer)
            if id(values) not in made:
                made[id(values)] = nn.Parameter(layer.weight, layer._is_trained)
            for name in layer.names:
                del layer._buffers[name]
            layer._parameters = {"weight": made[id(values)], **layer._parameters}
            layer.__class__ = layer._was  # type: ignore[assignment]
            for name in ("_kind", "_dtype", "_was", "_is_trained"):
                del own[name]


def _become(layer: Any, kind: str, values: Tensor, of_rows: Tensor) -> None:
    table = layer._parameters.pop("weight")
    layer._dtype, layer._kind, layer._was, layer._is_trained = table.dtype, kind, type(layer), table.requires_grad
    layer.__class__ = StoredEmbedding if isinstance(layer, nn.Embedding) else StoredEmbeddingBag
    for name, tensor in zip(_names(kind), (values, of_rows), strict=True):
        layer.register_buffer(name, tensor)


def _names(kind: str) -> tuple[str, str]:
    """Returns the names of a table's buffers."""
    return f"weight_{kind}", "weight_bits" if kind == NONZEROS else "weight_scale"


@dataclass(frozen=True)
class FloatTable:
    """A float table that will become stored, as in a file. `nonzeros` is the number of nonzeros in the file."""

    layer: nn.Module
    kind: str
    nonzeros: int
    weights: ClassVar[tuple[str, ...]] = ("weight",)

    def become(self) -> nn.Module:
        """Turns it in place into a stored table with empty buffers, which the caller fills."""
        return self._emptied(self.layer, self.layer.weight.device)  # type: ignore[arg-type]

    def look(self) -> nn.Module:
        """Returns a copy on the meta device that has the future buffers."""
        like = copy.copy(self.layer)
        like._parameters, like._buffers = dict(like._parameters), dict(like._buffers)
        return self._emptied(like, torch.device("meta"))

    def _emptied(self, layer: nn.Module, device: torch.device) -> nn.Module:
        rows, columns = layer._parameters["weight"].shape  # type: ignore[union-attr]
        of_rows = torch.empty(0 if self.kind == "float16" else rows, dtype=torch.float32, device=device)
        sizes: tuple[int, ...] = (rows, -(-columns // 2) if self.kind == "int4" else columns)
        if self.kind == NONZEROS:
            sizes = (self.nonzeros,)
            of_rows = torch.empty(rows, bytes_of_bits(columns), dtype=torch.uint8, device=device)
        _become(layer, self.kind, torch.empty(sizes, dtype=_TYPES[self.kind], device=device), of_rows)
        return layer


def in_less_memory(modules: Mapping[str, nn.Module], file: Mapping[str, tuple[int, ...]]) -> dict[str, FloatTable]:
    """Returns, by name, the float tables that a file has as stored ones. `file` has the shapes of the file's tensors."""
    return {
        name: FloatTable(layer, kind, file[stored][0])
        for name, layer in modules.items()
        for kind in _TYPES
        if not why_no_table(layer)
        and layer._parameters.get("weight") is not None
        and (stored := f"{name}.weight_{kind}".lstrip(".")) in file
    }
