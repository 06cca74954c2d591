"""Contract IR of attention over the edges of a graph: `kernel.attend_edges` and its gradient, for any pattern and size of it.

Heads and their features are part of the kernel; nodes and entries are open.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch_mlir import ir
from torch_mlir.dialects import func

from gossamer.dialects.edges import GRADIENTS, SAVED, TERMS
from gossamer.dialects.format import Format
from gossamer.passes.framework.context import building
from gossamer.runtime.elements import ELEMENTS


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
    sizes = {"operandSegmentSizes": _present(TERMS, attention.terms)}
    return _module(attention, "kernel.attend_edges", attention.terms, ("gradient", "statistics"), None, sizes)


def gradient(attention: Attention, side: str, writes: tuple[str, ...], entry: torch.dtype | None) -> str:
    """(pattern, terms, saved) → the gradients of `writes`; `entry` is the type of the integers that a transpose has."""
    reads = (*attention.terms, *(SAVED if entry is not None else SAVED[:-1]))
    results = [name for names in GRADIENTS.values() for name in names]
    attributes = {
        "side": f'"{side}"',
        "operandSegmentSizes": _present((*TERMS, *SAVED), reads),
        "resultSegmentSizes": _present(results, writes, before=0),
    }
    return _module(attention, "kernel.attend_edges_grad", reads, writes, entry, attributes)


def _present(names: Sequence[str], there: Sequence[str], before: int = 1) -> str:
    """How many operands or results each name has, after `before` that are always there."""
    return f"array<i32: {', '.join(['1'] * before + [str(int(name in there)) for name in names])}>"


def _module(
    attention: Attention,
    op: str,
    reads: Sequence[str],
    results: Sequence[str],
    entry: torch.dtype | None,
    attributes: dict[str, str],
) -> str:
    with building():
        module = ir.Module.create()
        element, open_ = ir.Type.parse(ELEMENTS[attention.dtype]), ir.ShapedType.get_dynamic_size()
        pattern = ir.RankedTensorType.get([open_, open_], element, ir.Attribute.parse(str(attention.format)))

        def type_of(name: str) -> ir.Type:
            if name in ("entry", "seed"):
                integers = torch.int32 if name == "seed" else entry
                assert integers is not None
                return ir.RankedTensorType.get([open_], ir.Type.parse(ELEMENTS[integers]))
            return ir.RankedTensorType.get([open_, attention.columns(name)], element)

        types, made = [pattern, *map(type_of, reads)], [type_of(name) for name in results]
        common = {
            "heads": f"{attention.heads} : i64",
            "weighted": f"{int(attention.weighted)} : i64",
        }
        numbers = {"scale": attention.scale, "slope": attention.slope, "dropout": attention.dropout}
        parsed = {name: ir.Attribute.parse(text) for name, text in {**common, **attributes}.items()}
        parsed |= {name: ir.FloatAttr.get(ir.F64Type.get(), value) for name, value in numbers.items()}
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("region", (types, made))
        with ir.InsertionPoint(function.add_entry_block()):
            arguments = list(function.entry_block.arguments)
            func.ReturnOp(ir.Operation.create(op, results=made, operands=arguments, attributes=parsed).results)
        module.operation.verify()
        return str(module)
