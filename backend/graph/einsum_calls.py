"""Reads the operations on SparseTensors in a traced graph: gossamer::einsum, gossamer::sample, and their operands."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.nodes import arguments, same
from gossamer.sparsity.compiler.operands import Held, Spec

aten, ours = torch.ops.aten, torch.ops.gossamer

COMPRESSED_ROWS = ["dense", "compressed"]


@dataclass(frozen=True, eq=False)
class Given(Held[fx.Node]):
    """An operand: the nodes of its arrays, and its sizes if it is sparse."""

    sizes: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes as numbers: for symbolic ones, their values during tracing."""
        return tuple(map(hint, self.sizes))

    @property
    def density(self) -> float:
        """The share of elements that are stored."""
        return min(1.0, hint(self.values.meta["val"].shape[0]) / max(1, prod(self.shape)))

    @property
    def rows(self) -> "Rows | None":
        """Positions and coordinates of a matrix stored by rows, or by columns, for which `row` and `column` are exchanged.
        None for other formats."""
        if self.format is None or len(self.letters) != 2 or [level.kind for level in self.format.levels] != COMPRESSED_ROWS:
            return None
        if any(level.block > 1 or level.structured for level in self.format.levels):
            return None
        outer, inner = (self.letters[level.dim] for level in self.format.levels)
        sizes = dict(zip(self.letters, self.sizes, strict=True))
        return Rows(same(self.arrays[0]), same(self.arrays[1]), outer, inner, (sizes[outer], sizes[inner]))


@dataclass(frozen=True, eq=False)
class Rows:
    """A pattern stored by rows, with the letters of its rows and columns."""

    positions: fx.Node
    coordinates: fx.Node
    row: str
    column: str
    sizes: tuple[Any, Any]

    @property
    def pattern(self) -> tuple[fx.Node, fx.Node]:
        """Positions and coordinates: equal for two operands that share their arrays."""
        return self.positions, self.coordinates


@dataclass(frozen=True, eq=False)
class Call:
    """A call of gossamer::einsum or gossamer::sample. The first operand of gossamer::sample is the pattern."""

    node: fx.Node
    spec: Spec
    operands: tuple[Given, ...]

    @property
    def text(self) -> str:
        """The letters of the call, as in torch.einsum."""
        return f"{','.join(operand.letters for operand in self.operands)}->{self.spec.result.letters}"

    @property
    def sparse(self) -> list[Given]:
        """The sparse operands."""
        return [each for each in self.operands if each.sparse]

    @property
    def dense(self) -> list[Given]:
        """The dense operands."""
        return [each for each in self.operands if not each.sparse]


def call_at(node: Any, target: Any) -> Call | None:
    """Returns the call of a node if it calls the operation `target`, or None."""
    if not isinstance(node, fx.Node) or node.target is not target:
        return None
    arrays, sizes, text = arguments(node)
    remaining: Iterator[fx.Node] = iter(arrays)
    extents = iter(sizes)
    spec = Spec.parse(text)
    given = []
    for operand in spec.operands:
        own = tuple(islice(remaining, operand.arrays))
        count = len(operand.letters) if operand.format is not None else 0
        given.append(Given(operand, own, tuple(islice(extents, count))))
    return Call(node, spec, tuple(given))


def hint(size: Any) -> int:
    """Returns a size in a graph as a number: for a symbolic size, its value during tracing."""
    size = size.meta["val"] if isinstance(size, fx.Node) else size
    return size if isinstance(size, int) else size.node.hint or 0
