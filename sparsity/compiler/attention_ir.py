"""Contract IR of attention over the edges of a graph: `kernel.attend_edges` and its gradient, for any pattern and size of it.

Heads and their features are part of the kernel; nodes and entries are open.
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
    """What is computed, see `edge_attention.attend_edges`.

    terms     what is read: "values", "target", "source", "edge", "queries", "keys", "direction", "seed"
    shared    whether there is one "edge" for all heads
    weighted  whether the product of query and key has a factor an entry
    features  of values, `size` of queries and keys
    format    of the pattern, CSR
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
        """Of a term, and of what is computed from them."""
        heads = self.heads
        if name == "edge":
            return 1 if self.shared else heads
        sizes = {"values": self.features, "gradient": self.features, "statistics": 2}
        sizes |= dict.fromkeys(("queries", "keys", "direction"), self.size)
        return 1 if name == "weight" else heads * sizes.get(name, 1)


def forward(attention: Attention) -> str:
    """(pattern, terms) → (sums, statistics)"""
    results = {"out": "gradient", "statistics": "statistics"}
    return _region(attention, AttendEdgesOp, attention.terms, results, None)


def gradient(attention: Attention, side: str, writes: tuple[str, ...], entry: torch.dtype | None) -> str:
    """(pattern, terms, saved) → the gradients of `writes`; `entry` is the type of the integers that a transpose has."""
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
