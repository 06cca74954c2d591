"""Recognises the activation between the products of experts by its values.

    %gate, %up = split(%sums, 48, -1)
    %hidden = mul(silu(%gate), %up)          →   Gate("silu", "halves")

This file runs the nodes between the products on float64 numbers of all magnitudes. It compares the results with every
activation that the operation has. So it does not matter how a model, or a decomposition, spells the activation. Spellings may
differ in their slopes, such as relu and clamp(min=0) at 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from gossamer.backend.graph.fusable import ELEMENTWISE
from gossamer.backend.graph.layout import is_view
from gossamer.backend.graph.nodes import between, function_of, hint
from gossamer.backend.graph.patterns import CONVERTS, is_rounding, number_of
from gossamer.runtime.experts.activations import LAYOUTS
from gossamer.sparsity.experts.named_activation import moderate, named, numbers, same_slopes

_MOST = 200
"""Most nodes between two products that can be an activation."""

_OPEN = 64
"""Stands for an unknown size."""

_LINES, _NUMBERS, _MOST_NUMBERS = 8, 1 << 16, 1 << 24
"""How many lines of sums are tried at least, how many numbers are enough, and how many take too much memory."""


@dataclass(frozen=True)
class Gate:
    """An activation and a layout, as `runtime/experts/activations.py` names them.

    same_slopes  whether the gradients, too, are those of this activation
    """

    activation: str
    layout: str
    same_slopes: bool = True


def gate_at(hidden: fx.Node, sums: fx.Node, dim: int, rows: int, columns: int) -> Gate | None:
    """Returns the activation that computes `hidden`, with so many columns, from the sums of a product; None if the operation
    does not have it. The product's rows lie innermost in dimension `dim` of the sums."""
    if hidden is sums:
        return Gate("identity", "up")
    shape = [hint(size) or _OPEN for size in sums.meta["val"].shape]
    repeated = shape.pop(dim) // rows
    layouts = [layout for layout in LAYOUTS if rows == (columns if layout == "up" else 2 * columns)]
    cut = lambda given: [given.flatten(-2).movedim(-1, dim)]
    return _gate(Between((sums,), hidden), shape, (repeated, rows), cut, layouts)


@dataclass(frozen=True)
class Between:
    """The computation of an expert between its products.

    sums    the results of the first products, [tokens, rows]
    hidden  the operand of the second product
    """

    sums: tuple[fx.Node, ...]
    hidden: fx.Node

    @cached_property
    def nodes(self) -> list[fx.Node]:
        """The nodes that compute it."""
        return between(self.sums, self.hidden)

    @cached_property
    def spelling(self) -> str:
        """The operations and their operands as text. Experts that compute the same have the same text."""
        places = {node: f"%{number}" for number, node in enumerate((*self.sums, *self.nodes))}
        known = lambda node: places.get(node, "size" if isinstance(node.meta.get("val"), torch.SymInt) else node.name)
        return str([(str(node.target), *fx.map_arg((node.args, dict(node.kwargs)), known)) for node in self.nodes])

    def of(self, given: Sequence[Tensor]) -> Tensor | None:
        """Returns the hidden value for these sums; None if it depends on other values, or the nodes are no activation."""
        nodes = self.nodes
        if len(nodes) > _MOST or not all(n.target in ELEMENTWISE or is_view(n) or _is_split(n) for n in nodes):
            return None
        return _run(nodes, dict(zip(self.sums, given, strict=True)), self.hidden)


def gate_between(given: Between, columns: int) -> tuple[Gate | None, tuple[int, ...]]:
    """Returns the activation of an expert whose hidden value has so many columns, and the order that puts its gate before its
    up.
    """
    rows = [int(node.meta["val"].shape[1]) for node in given.sums]
    if len(rows) == 1:
        return gate_at(given.hidden, given.sums[0], 1, rows[0], columns), (0,)
    if rows != [columns, columns]:
        return None, ()
    tokens = hint(given.sums[0].meta["val"].shape[0]) or _OPEN
    for order in ((0, 1), (1, 0)):
        cut = lambda sums, order=order: [sums.chunk(2, -1)[place] for place in order]
        gate = _gate(given, [tokens], (2 * columns,), cut, ["halves"])
        if gate is not None:
            return gate, order
    return None, ()


def _gate(
    between: Between,
    lines: Sequence[int],
    line: Sequence[int],
    cut: Callable[[Tensor], Sequence[Tensor]],
    layouts: Sequence[str],
) -> Gate | None:
    """Returns the activation that `between` computes from the sums that `cut` takes from numbers of sizes [*lines, *line].

    Some lines are enough, unless a view names their number.
    """
    few = max(_LINES, _NUMBERS // prod(line))
    for sizes in ([min(each, few) for each in lines], lines):
        given = numbers([*sizes, *line]) if prod(sizes) * prod(line) <= _MOST_NUMBERS else None
        try:
            return None if given is None else _named(between, given, cut, layouts)
        except RuntimeError:  # for these sizes
            continue
    return None


def _named(between: Between, given: Tensor, cut: Callable[[Tensor], Sequence[Tensor]], layouts: Sequence[str]) -> Gate | None:
    found = between.of(cut(given))
    known = None if found is None else named(found, given, layouts)
    if known is None:
        return None
    with torch.inference_mode(False), torch.enable_grad():
        given = moderate(given).clone().requires_grad_()
        found = between.of(cut(given))
        return Gate(*known, found is not None and same_slopes(found, given, *known))


def _is_split(node: fx.Node) -> bool:
    return str(node.target).startswith("aten.split")


def _run(nodes: list[fx.Node], given: Mapping[fx.Node, Tensor], hidden: fx.Node) -> Tensor | None:
    """Returns the value of `hidden` that nodes compute from these values; None if it depends on other values."""
    values: dict[fx.Node, Any] = dict(given)
    unknown = False

    def value(node: fx.Node) -> Any:
        nonlocal unknown
        if node in values:
            return values[node]
        meta = node.meta.get("val")
        found = hint(meta) if isinstance(meta, int | torch.SymInt) else number_of(node)
        unknown |= found is None
        if found is None or not isinstance(meta, Tensor):
            return found
        return torch.tensor(found, dtype=torch.float64 if meta.is_floating_point() else meta.dtype)

    for node in nodes:
        args, named = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
        if unknown or (node.target in CONVERTS and not is_rounding(node)):
            return None
        values[node] = args[0] if is_rounding(node) else function_of(node)(*args, **named)
    result = values[hidden]
    return result if isinstance(result, Tensor) else None
