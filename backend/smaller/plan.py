"""Finds a smaller graph for one of Dynamo's, if it pays. compile.py calls this."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gossamer.backend.graph.inputs import density
from gossamer.backend.graph.modes import Modes
from gossamer.backend.graph.nodes import argument
from gossamer.backend.report.options import SMALLER_LAYERS, Options
from gossamer.backend.report.report import Decision
from gossamer.backend.smaller import attention, pointwise, products, views
from gossamer.backend.smaller.analysis import Analysis
from gossamer.backend.smaller.build import Builder, SmallerGraph
from gossamer.backend.smaller.recipe import Recipe
from gossamer.backend.smaller.worth import Judged, judge
from gossamer.runtime.torch_internals import free_unbacked_symbols
from gossamer.runtime.weight_store import store_of

_RULES = {**products.RULES, **pointwise.RULES, **views.RULES, **attention.RULES}
_SHARE = 1 / 16
"""A graph is analysed if at least this share of the rows or columns of a weight is zeros."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A smaller graph, and the decisions about its weights."""

    smaller: SmallerGraph
    decisions: Sequence[Decision]


def plan(graph: fx.Graph, statics: Mapping[int, str], values: Sequence[Any], options: Options) -> Plan | None:
    """Returns the smaller graph; None if there is none, or it does not pay.

    graph    one of Dynamo's graphs
    statics  names of the static inputs, by their indices
    values   the values of all inputs
    """
    if options.schedule != "auto" or SMALLER_LAYERS in options.disable:
        return None
    placeholders = graph.find_nodes(op="placeholder")
    known = {placeholders[n]: values[n] for n in statics if _is_plain(values[n])}
    if Modes.of(graph).with_gradients:  # what this room adds to a graph has gradients only if the whole graph has them
        return None
    if not any(map(_has_empty_lines, known.values())) and not _has_zero_scales(graph, known):
        return None
    names = {placeholders[n]: name for n, name in statics.items()}
    gradients = torch.is_grad_enabled()
    training = gradients and any(each.requires_grad for each in known.values())
    try:
        with torch.autocast("cpu", enabled=False), torch.inference_mode(False), torch.set_grad_enabled(training):
            analysis = Analysis(graph, Recipe(graph, known), names, gradients, training)
            return _planned(analysis, options)
    except Exception as error:  # after any error in the analysis, the graph stays as it is
        if options.strict:
            raise
        warnings.warn(
            f"gossamer: the search for empty rows and columns failed ({type(error).__name__}: {error}). The graph is compiled "
            f'without it; options={{"disable": ["{SMALLER_LAYERS}"]}} does so from the start.',
            stacklevel=2,
        )
        return None


def _planned(analysis: Analysis, options: Options) -> Plan | None:
    analysis.run(_RULES)
    judged = judge(analysis, options.min_gain)
    if not any(each.pays for each in judged):
        return None
    if any(1 in each.kept for each in judged if each.pays) and _has_unbacked_sizes(analysis.graph):
        return None  # if a matrix has one row, torch asks whether it has one column, too, but that size is unknown
    smaller = Builder(analysis, analysis.atoms.kept()).run()
    return Plan(smaller, [*_decisions(judged)])


def _decisions(judged: Sequence[Judged]) -> Iterator[Decision]:
    """Yields a decision for each product whose weight has empty rows or columns."""
    for each in judged:
        rows, columns = each.kept
        m, k = each.product.weight.shape[:2]
        small = each.small
        weight, width = each.product.weight, each.product.weight.dtype.itemsize
        left_out = " and ".join(
            f"{all_ - kept} of {all_} {what}"
            for all_, kept, what in ((m, rows, "rows"), (k, columns, "columns"))
            if kept < all_
        )
        yield Decision(
            each.product.name, each.product.op, tuple(weight.shape), density(weight),
            f"{rows}x{columns}" if each.pays else None, "smaller" if each.pays else None, each.pays,
            f"without {left_out}" if each.pays else f"{left_out} are zeros, {_why_not(each)}", each.gain,
            dense_bytes=weight.numel() * width if each.pays else 0, packed_bytes=small.numel() * width if each.pays else 0,
        )  # fmt: skip


def _why_not(judged: Judged) -> str:
    return f"but without them the weight would lose its {judged.lost}" if judged.lost else "too few to make it faster"


def _is_plain(value: object) -> bool:
    if not isinstance(value, Tensor) or type(value) not in (Tensor, torch.nn.Parameter):
        return False
    return value.is_cpu and value.layout is torch.strided and store_of(value) is None


def _has_unbacked_sizes(graph: fx.Graph) -> bool:
    return any(free_unbacked_symbols(node.meta.get("example_value")) for node in graph.find_nodes(op="placeholder"))


def _has_empty_lines(value: Tensor) -> bool:
    """Whether at least a sixteenth of the rows or columns is zeros. Looks at the first elements of each first."""
    if value.dim() < 2 or value.numel() < 2:
        return False
    with torch.no_grad():
        return any(_empty(each) >= _SHARE * each.shape[0] for each in (value.flatten(1), value.transpose(0, 1).flatten(1)))


def _empty(lines: Tensor) -> int:
    width = 16
    while lines.shape[0] and width < lines.shape[1]:
        lines, width = lines[(lines[:, :width] == 0).all(1)], 8 * width
    return int((lines == 0).all(1).sum())


def _has_zero_scales(graph: fx.Graph, known: Mapping[fx.Node, Tensor]) -> bool:
    scales = [argument(node, 3, "weight") for node in graph.find_nodes(op="call_function", target=F.batch_norm)]
    return any(each in known and bool((known[each] == 0).any()) for each in scales)
