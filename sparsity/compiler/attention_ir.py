"""Builds contract IR of attention over the edges of a graph: `kernel.attend_edges` and its gradient.

The numbers of heads and features are constants of the kernel. The numbers of nodes and entries are open.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch_mlir import ir

from gossamer.dialects.edges import SAVED, AttendEdgesGradOp, AttendEdgesOp
from gossamer.dialects.format import Format
from gossamer.passes.framework.context import building
from gossamer.runtime.elements import ELEMENTS
from gossamer.sparsity.compiler.op_ir import Op, region


@dataclass(frozen=True)
class Attention:
    """The attention to compute, see `edge_attention.attend_edges`.

    terms     the tensors to read: "values", "target", "source", "edge", "queries", "keys", "direction", "seed"
    shared    whether all heads share one "edge"
    weighted  whether each entry has a factor for the product of query and key
    features  the features of values; `size`: those of queries and keys
    format    the format of the pattern, CSR
    """

    terms: tuple[str, ...]
    heads: int
    features: int
    size: int
    shared: bool
    weighted: bool
    scale: float
    slope: float
    dropout: float
    format: Format
    dtype: torch.dtype

    def columns(self, name: str) -> int:
        """Returns the number of columns of a term, or of a result, as a matrix."""
        heads = self.heads
        if name == "edge":
            return 1 if self.shared else heads
        sizes = {"values": self.features, "gradient": self.features, "statistics": 2}
        sizes |= dict.fromkeys(("queries", "keys", "direction"), self.size)
        return 1 if name == "weight" else heads * sizes.get(name, 1)


def forward(attention: Attention) -> str:
    """Returns the IR of (pattern, terms) → (sums, statistics)."""
    results = {"out": "gradient", "statistics": "statistics"}
    return _region(attention, AttendEdgesOp, attention.terms, results, None)


def gradient(attention: Attention, side: str, writes: tuple[str, ...], entry: torch.dtype | None) -> str:
    """Returns the IR of (pattern, terms, saved) → gradients of `writes`. `entry` is the integer dtype of a transpose."""
    reads = (*attention.terms, *(SAVED if entry is not None else SAVED[:-1]))
    return _region(attention, AttendEdgesGradOp, reads, {f"of_{name}": name for name in writes}, entry, side=side)


def _region(
    attention: Attention,
    op: Op,
    reads: Sequence[str],
    results: Mapping[str, str],
    entry: torch.dtype | None,
    **more: str,
) -> str:
    with building():
        element, open_ = ir.Type.parse(ELEMENTS[attention.dtype]), ir.ShapedType.get_dynamic_size()

        def type_of(name: str) -> ir.Type:
            if name in ("entry", "seed"):
                integers = torch.int32 if name == "seed" else entry
                assert integers is not None
                return ir.RankedTensorType.get([open_], ir.Type.parse(ELEMENTS[integers]))
            return ir.RankedTensorType.get([open_, attention.columns(name)], element)

        pattern = ir.RankedTensorType.get([open_, open_], element, ir.Attribute.parse(str(attention.format)))
        takes = {"a": pattern} | {name: type_of(name) for name in reads}
        gives = {result: type_of(name) for result, name in results.items()}
        numbers = {"scale": attention.scale, "slope": attention.slope, "dropout": attention.dropout}
        return region(op, takes, gives, heads=attention.heads, weighted=int(attention.weighted), **numbers, **more)
