"""Replaces products of sorted tokens with pruned weights of experts by sparse regions.

    %y = grouped_mm(%x, transpose(%w), %ends)    →    %y = gossamer::region([%x, %ends, %w], "5c01…")

%x is [tokens, k] and sorted by expert, %w is [experts, m, k], and %ends says where each expert's tokens end. The product is
torch.nn.functional.grouped_mm, or the operation that transformers uses where Inductor has none.

Each expert becomes a region, as any product does. It has kernels for few and for many tokens, because the number of an expert's
tokens is known only at run time.
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
    """The product of one of several experts, each of which gets a part of the tokens.

    experts  the number of experts
    """

    experts: int = 1

    @property
    def tokens(self) -> int | None:
        """The tokens of an average expert; None if unknown."""
        tokens = hint(self.x.meta["val"].shape[0])
        return None if tokens is None else -(-tokens // self.experts)

    @property
    def dynamic(self) -> bool:
        """Whether the number of tokens may change: always."""
        return True

    @property
    def op(self) -> str:
        """The name of the operation in reports."""
        return "experts"


def judged(node: fx.Node, statics: Mapping[fx.Node, Static], context: GraphContext) -> "Judged | None":
    """Returns what becomes of a grouped product whose weights have many zeros; None for other products."""
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
    """The facts about the weights of experts that a report shows. `itemsize` is the bytes of an element."""

    name: str
    shape: tuple[int, ...]
    density: float
    itemsize: int

    @classmethod
    def of(cls, static: Static) -> "Seen":
        """Returns the facts about weights that are a tensor."""
        return cls(static.name, tuple(static.tensor.shape), density(static.tensor), static.tensor.itemsize)


@dataclass(frozen=True)
class Judged:
    """A grouped product with pruned weights.

    experts  the product of each expert
    reason   why it stays dense; None if it becomes sparse
    gain     how many times faster it is predicted to be
    """

    node: fx.Node
    seen: Seen
    experts: list[Expert]
    reason: str | None
    gain: float | None

    @property
    def weights(self) -> fx.Node:
        """The weights of all experts, [experts, columns, rows]."""
        found: fx.Node = arguments(self.node)[1]
        return found

    def dense(self, reason: str) -> Decision:
        """Returns the decision to leave it dense."""
        return _decision(self.seen, reason, self.gain, [])

    def put(self, statics: Mapping[fx.Node, Static], context: GraphContext) -> Decision:
        """Replaces the product by a region for each expert. If one fails to compile, warns and leaves it dense, or raises
        CompileError under `strict`. Returns the decision."""
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
        """Returns the region of each expert. Raises CompileError if one fails to compile."""
        leaves = self.experts[0].weight.leaves
        name, values = statics[self.experts[0].weight.main].name, [statics[leaf].tensor for leaf in leaves]
        regions = [grow(each, ()) for each in self.experts]
        return [
            build_region(region, f"{name}[{number}]", values, context.options, context.dump)
            for number, region in enumerate(regions)
        ]

    def sparse(self, built: list[Built], how: str = "") -> Decision:
        """Returns the decision for regions. `how` says how they are put together."""
        return _decision(self.seen, None, self.gain, built, how)

    def forget(self) -> None:
        """Removes the nodes that `_experts` added from the graph."""
        for each in self.experts:
            selected = arguments(each.node)[1]
            each.node.graph.erase_node(each.node)
            selected.graph.erase_node(selected)


def main_weight(weight: fx.Node, statics: Mapping[fx.Node, Static]) -> Static | None:
    """Returns the largest static tensor that weights are computed from; None if they depend on other values, too."""
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
    # Among tensors of one size, prefer a parameter to its mask, and values to their coordinates.
    order = lambda each: (each.numel(), isinstance(each, torch.nn.Parameter), each.is_floating_point())
    largest = max(behind, key=lambda node: order(statics[node].tensor), default=None)
    return None if largest is None else statics[largest]


def _refused(node: fx.Node) -> str | None:
    """Returns why a grouped product must stay as it is, whatever its weights; None if it need not."""
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
    """Adds the product of each expert with all tokens to the graph, to be removed by `forget`. Returns the products."""
    x, weights = arguments(node)[:2]
    emit, count = Emitter(node), weights.meta["val"].shape[0]
    products = [emit(aten.mm.default, x, emit(*expert_of(weights, number))) for number in range(count)]
    return [expert_at(product, values, count) for product in products]


def expert_at(product: fx.Node, values: dict[fx.Node, torch.Tensor], count: int) -> Expert:
    """Returns the product of one of `count` experts that a node is."""
    contraction = contraction_at(product, values)
    assert contraction is not None
    given = {field.name: getattr(contraction, field.name) for field in fields(Contraction)}
    return Expert(**given, experts=count)


def _judged(experts: list[Expert], context: GraphContext) -> tuple[str | None, float | None]:
    """Returns why the experts stay dense, None if they become sparse; and the predicted gain for all of them together."""
    judged = [judge(each, context.options) for each in experts]
    refused = next((reason for reason, gain in judged if gain is None), None)
    if refused is not None:
        return refused, None
    gain = len(experts) / sum(1 / predicted_gain(each) for each in experts)
    reason = next((reason for reason, _ in judged if reason is not None), None)
    return (reason if gain < context.options.min_gain else None), gain


def _replace(node: fx.Node, leaves: tuple[fx.Node, ...], built: list[Built]) -> None:
    """Replaces the grouped product by one call of the region op."""
    key = content_hash("experts", *(each.key for each in built))
    region_op.add(key, ExpertRegions(regions_of(built)))
    ends = node.args[2] if len(node.args) > 2 else node.kwargs["offs"]
    y = Emitter(node)(region_op.region, [node.args[0], ends, *leaves], key)
    node.replace_all_uses_with(y)
    node.graph.erase_node(node)


def regions_of(built: Sequence[Built]) -> tuple[CompiledRegion, ...]:
    """Returns the compiled regions."""
    regions = tuple(each.region for each in built if isinstance(each.region, CompiledRegion))
    assert len(regions) == len(built)  # only reordered weights have other regions
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
