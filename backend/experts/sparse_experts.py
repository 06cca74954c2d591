"""Products of tokens, sorted by expert, with weights of experts that are mostly zeros, as sparse kernels.

    %y = grouped_mm(%x, transpose(%w), %ends)    →    %y = gossamer::region([%x, %ends, %w], "5c01…")

%x is [tokens, k], %w [experts, m, k], %ends says where each expert's tokens end: torch.nn.functional.grouped_mm in the graphs
of mixtures of experts, and what transformers has in its place where Inductor has none. Each expert is a region as any product
has one; there are kernels for few and for many tokens, because how many an expert gets is known at run time only.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch
from torch import fx

from gossamer.backend.experts.stored_experts import expert_of, stored_density, stored_sizes
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.expressions import computed_from
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Static, density, zero_heavy
from gossamer.backend.graph.nodes import arguments, hint, in_training
from gossamer.backend.regions.build_region import Built, build_region, content_hash
from gossamer.backend.regions.contractions import Contraction, contraction_at
from gossamer.backend.regions.cost import predicted_gain
from gossamer.backend.regions.decide import judge
from gossamer.backend.regions.grow_region import grow
from gossamer.backend.report.report import FAILED, Decision
from gossamer.backend.run import region_op
from gossamer.backend.run.compiled_region import CompiledRegion
from gossamer.backend.run.expert_regions import ExpertRegions
from gossamer.dialects.errors import CompileError

aten = torch.ops.aten


@dataclass(frozen=True)
class Expert(Contraction):
    """The product of one of several experts, among which the tokens are shared out.

    experts  their number
    """

    experts: int = 1

    @property
    def tokens(self) -> int | None:
        """Of the average expert."""
        tokens = hint(self.x.meta["val"].shape[0])
        return None if tokens is None else -(-tokens // self.experts)

    @property
    def dynamic(self) -> bool:
        """Always."""
        return True

    @property
    def op(self) -> str:
        """What a user calls it."""
        return "experts"


def judged(node: fx.Node, statics: Mapping[fx.Node, Static], context: GraphContext) -> "Judged | None":
    """What becomes of a grouped product with weights that have zeros; None for others."""
    weight: Any = node.args[1]
    static = main_weight(weight, statics) if weight.meta["val"].dim() == 3 else None
    values = {node: static.tensor for node, static in statics.items()}
    if static is None:
        return None
    stored = stored_density(weight)
    seen = Seen.of(static) if stored is None else Seen(static.name, stored_sizes(weight) or (), stored, static.tensor.itemsize)
    all_are_asked_for = context.options.min_gain == 0 and seen.density <= 0.9
    if stored is None and not (zero_heavy(static.tensor) or all_are_asked_for):
        return None
    reason, gain = _refused(node), None
    experts = _experts(node, values) if reason is None else []
    if reason is None:
        reason, gain = _judged(experts, context)
    return Judged(node, seen, experts, reason, gain)


@dataclass(frozen=True)
class Seen:
    """What a report says of the weights of experts; `itemsize` is the bytes of an element."""

    name: str
    shape: tuple[int, ...]
    density: float
    itemsize: int

    @classmethod
    def of(cls, static: Static) -> "Seen":
        """Those that are a tensor."""
        return cls(static.name, tuple(static.tensor.shape), density(static.tensor), static.tensor.itemsize)


@dataclass(frozen=True)
class Judged:
    """A grouped product with pruned weights: why it stays dense, or None, and the gain that is predicted."""

    node: fx.Node
    seen: Seen
    experts: list[Expert]
    reason: str | None
    gain: float | None

    @property
    def weights(self) -> fx.Node:
        """Those of all experts, [experts, columns, rows]."""
        found: fx.Node = arguments(self.node)[1]
        return found

    def dense(self, reason: str) -> Decision:
        """The decision where it stays as it is."""
        return _decision(self.seen, reason, self.gain, [])

    def put(self, statics: Mapping[fx.Node, Static], context: GraphContext) -> Decision:
        """Replaces it by a region for each expert, or says that one of them failed to compile."""
        leaves = self.experts[0].weight.leaves
        try:
            built = self.built(statics, context)
        except CompileError as error:
            if context.options.strict:
                raise
            warnings.warn(f"{error}\nThese experts stay dense.", stacklevel=3)
            return _decision(self.seen, FAILED, self.gain, [])
        finally:
            self.forget()
        _replace(self.node, leaves, built)
        return self.sparse(built)

    def built(self, statics: Mapping[fx.Node, Static], context: GraphContext) -> list[Built]:
        """The region of each expert. CompileError."""
        leaves = self.experts[0].weight.leaves
        name, values = statics[self.experts[0].weight.main].name, [statics[leaf].tensor for leaf in leaves]
        regions = [grow(each, ()) for each in self.experts]
        return [
            build_region(region, f"{name}[{number}]", values, context.options, context.dump)
            for number, region in enumerate(regions)
        ]

    def sparse(self, built: list[Built], how: str = "") -> Decision:
        """The decision where it is regions, and how they are put together."""
        return _decision(self.seen, None, self.gain, built, how)

    def forget(self) -> None:
        """Takes the nodes of `_experts` out of the graph."""
        for each in self.experts:
            selected = arguments(each.node)[1]
            each.node.graph.erase_node(each.node)
            selected.graph.erase_node(selected)


def main_weight(weight: fx.Node, statics: Mapping[fx.Node, Static]) -> Static | None:
    """The largest static tensor that the weights of experts, or of one, are computed from, if they are from such alone."""
    static = computed_from(weight.graph, {n: s.tensor for n, s in statics.items()})
    if weight not in static or weight.meta["val"].shape[0] == 0:
        return None
    behind, pending = list[fx.Node](), [weight]
    while pending:
        each = pending.pop()
        if each in statics:
            behind.append(each)
        else:
            pending += each.all_input_nodes
    # A parameter before its mask, and values before their coordinates.
    order = lambda each: (each.numel(), isinstance(each, torch.nn.Parameter), each.is_floating_point())
    largest = max(behind, key=lambda node: order(statics[node].tensor), default=None)
    return None if largest is None else statics[largest]


def _refused(node: fx.Node) -> str | None:
    """Why this grouped product stays as it is, whatever its weights, None if it need not."""
    x, _, *more = node.args
    ends = more[0] if more else node.kwargs.get("offs")
    rest = [*more[1:], *(value for name, value in node.kwargs.items() if name != "offs")]
    if not isinstance(x, fx.Node) or x.meta["val"].dim() != 2 or not isinstance(ends, fx.Node):
        return "no sparse kernel for grouped_mm of other than a matrix, sorted by group"
    if any(value is not None for value in rest):
        return "no sparse kernel for grouped_mm with a bias or another type of result"
    if not x.meta["val"].is_cpu:
        return "experts are sparse on CPUs only"
    return "trained dense: experts are sparse in inference only" if in_training(node.graph) else None


def _experts(node: fx.Node, values: dict[fx.Node, torch.Tensor]) -> list[Expert]:
    """The product of each expert with all tokens, as nodes that are to go again."""
    x, weights = arguments(node)[:2]
    emit, count = Emitter(node), weights.meta["val"].shape[0]
    products = [emit(aten.mm.default, x, emit(*expert_of(weights, number))) for number in range(count)]
    return [expert_at(product, values, count) for product in products]


def expert_at(product: fx.Node, values: dict[fx.Node, torch.Tensor], count: int) -> Expert:
    """The product of one of so many experts that a node is."""
    contraction = contraction_at(product, values)
    assert contraction is not None
    given = {field.name: getattr(contraction, field.name) for field in fields(Contraction)}
    return Expert(**given, experts=count)


def _judged(experts: list[Expert], context: GraphContext) -> tuple[str | None, float | None]:
    """Why the experts stay dense, None if they become sparse, and the gain that is predicted for all of them together."""
    judged = [judge(each, context.options) for each in experts]
    refused = next((reason for reason, gain in judged if gain is None), None)
    if refused is not None:
        return refused, None
    gain = len(experts) / sum(1 / predicted_gain(each) for each in experts)
    reason = next((reason for reason, _ in judged if reason is not None), None)
    return (reason if gain < context.options.min_gain else None), gain


def _replace(node: fx.Node, leaves: tuple[fx.Node, ...], built: list[Built]) -> None:
    """Puts one call of the region op where the grouped product was."""
    key = content_hash("experts", *(each.key for each in built))
    region_op.add(key, ExpertRegions(regions_of(built)))
    ends = node.args[2] if len(node.args) > 2 else node.kwargs["offs"]
    y = Emitter(node)(region_op.region, [node.args[0], ends, *leaves], key)
    node.replace_all_uses_with(y)
    node.graph.erase_node(node)


def regions_of(built: Sequence[Built]) -> tuple[CompiledRegion, ...]:
    """What runs them."""
    regions = tuple(each.region for each in built if isinstance(each.region, CompiledRegion))
    assert len(regions) == len(built)  # others are of weights that were reordered
    return regions


def _decision(seen: Seen, reason: str | None, gain: float | None, built: list[Built], how: str = "") -> Decision:
    if reason is not None:
        return Decision.dense(seen.name, "experts", seen.shape, seen.density, reason, gain)
    kernels = dict.fromkeys((each.format, each.schedule) for each in built)
    formats, schedules = (", ".join(dict.fromkeys(names)) for names in zip(*kernels, strict=True))
    return Decision(
        seen.name, "experts", seen.shape, seen.density, formats, schedules, True, f"a region for each of {len(built)}{how}",
        gain, False, prod(seen.shape) * seen.itemsize, sum(sum(each.packed_bytes) for each in built),
    )  # fmt: skip
