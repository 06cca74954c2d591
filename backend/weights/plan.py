"""Turns the contractions of a graph into compiled regions and chains, and makes the Decisions. `sparse_weights.py` calls it.

contraction → judge: sparse, nearly, or dense → find chains, and compile those that gain → compile regions of the others
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from gossamer.backend.chains.build_chain import build_chain
from gossamer.backend.chains.chain_cost import ChainCosts, chain_costs, chain_pays, chain_schedule, schedules_of
from gossamer.backend.chains.find_chains import Chain, find_chains
from gossamer.backend.chains.time_chain import measured_costs
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.masked_matrix import arrangement_of, mask_of
from gossamer.backend.graph.nodes import in_training
from gossamer.backend.graph.stored_matrix import StoredMatrix
from gossamer.backend.regions.build_region import Built, build_region
from gossamer.backend.regions.contractions import Contraction
from gossamer.backend.regions.cost import gain_without_call
from gossamer.backend.regions.decide import judge, stays_dense, taken
from gossamer.backend.regions.details import details_of, end_of
from gossamer.backend.regions.grow_region import Region, grow
from gossamer.backend.report.report import FAILED, Decision
from gossamer.dialects.errors import CompileError

_NEARLY = 0.8
"""A product with at least this share of the wanted gain is tried in a chain. The products of a chain share the cost of the
operations between them."""

_NEARLY_QUANTIZED = 0.5
"""The same for products of int8. Alone, they need another operation that quantizes x. A chain quantizes x itself."""

_NEARLY_MEASURED = 0.55
"""The same if chains whose gain is in doubt are measured."""

Planned = tuple[Region | Chain, Built]


def plan(
    found: list[Contraction],
    names: dict[fx.Node, str],
    values: dict[fx.Node, torch.Tensor],
    context: GraphContext,
) -> tuple[list[Decision], list[Planned]]:
    """Decides about every contraction, and compiles the sparse ones. Returns the decisions and the compiled regions and chains,
    in the order of the graph.

    names   the names of the static leaves
    values  the values of the static leaves

    A contraction that fails to compile stays dense, with a warning. With the option `strict`, raises the error.
    """
    options = context.options
    planner = _Planner(names, values, context)
    for contraction in found:
        planner.judge(contraction)
    # If the user chose a schedule, there are no chains.
    alone = options.schedule != "auto"
    for candidates in [] if alone else ([planner.sparse | planner.nearly] if planner.nearly else []) + [planner.sparse]:
        free = [c for node, c in candidates.items() if node not in planner.decisions]
        chained = {c.node: c for c in free if c.orders is None and chain_schedule(c)}
        for chain in find_chains(found[0].node.graph, chained) if chained else []:
            planner.consider(chain)
    for contraction in planner.nearly.values():
        if contraction.node not in planner.decisions:
            planner.leave(contraction)
    for contraction in planner.sparse.values():
        if contraction.node not in planner.decisions:
            planner.take(contraction)
    planner.warn()
    decisions = [planner.decisions[c.node] for c in found if c.node in planner.decisions]
    decisions += planner.factors.values()
    order = {node: number for number, node in enumerate(found[0].node.graph.nodes)} if found else {}
    return decisions, sorted(planner.planned, key=lambda planned: order[planned[0].output])


def fix_sizes(node: fx.Node) -> None:
    """Makes Dynamo guard the sizes of a weight, because another size needs another kernel."""
    for size in node.meta["val"].shape if "val" in node.meta else ():
        int(size)


class _Planner:
    """The decisions so far. All dicts have the contractions' nodes as keys."""

    def __init__(self, names: dict[fx.Node, str], values: dict[fx.Node, torch.Tensor], context: GraphContext) -> None:
        self.names, self.values = names, values
        self.options, self.dump, self.budget = context.options, context.dump, context.measuring
        self.sparse: dict[fx.Node, Contraction] = {}
        self.nearly: dict[fx.Node, Contraction] = {}
        """Contractions that are too dense or too small by themselves, but may gain enough in a chain."""
        self.decisions: dict[fx.Node, Decision] = {}
        self.factors: dict[fx.Node, Decision] = {}
        """The decisions about factors of low rank."""
        self.planned: list[Planned] = []
        self._gains: dict[fx.Node, float | None] = {}
        self._refusals: dict[fx.Node, str | None] = {}
        self._claimed: set[fx.Node] = set()
        self._failures: list[CompileError] = []

    def judge(self, contraction: Contraction) -> None:
        """Notes a contraction as sparse or nearly sparse, or decides that it stays dense."""
        if contraction.weight.density == 1 and self.options.min_gain > 0:
            return
        refusal, gain = judge(contraction, self.options, self._renewed(contraction))
        nearly = gain is not None and gain < self.options.min_gain and self._may_chain(contraction, gain)
        if refusal is not None and not nearly:
            self.decisions[contraction.node] = self._dense(contraction, refusal, gain)
            return
        if StoredMatrix.of(contraction.weight.evaluate) is None:  # those pack any number of nonzeros alike
            for leaf in contraction.weight.leaves:
                fix_sizes(leaf)
        self._gains[contraction.node], self._refusals[contraction.node] = gain, refusal
        (self.sparse if refusal is None else self.nearly)[contraction.node] = contraction

    def _may_chain(self, contraction: Contraction, gain: float) -> bool:
        """Whether a product that gains too little by itself may gain enough in a chain, whose products share one call.

        In training, each weight is also packed again at every step. A chain does not save that time.
        """
        share = _NEARLY_QUANTIZED if contraction.quantized else _NEARLY if self.budget is None else _NEARLY_MEASURED
        reached = gain if in_training(contraction.node.graph) else gain_without_call(contraction)
        return reached >= share * self.options.min_gain

    def consider(self, chain: Chain) -> None:
        """Compiles a chain if it gains enough. If it does not compile, its contractions become single regions later.

        A chain whose gain is in doubt is compiled and measured before the decision.
        """
        members, min_gain = chain.contractions, self.options.min_gain
        costs = chain_costs(chain, min_gain)
        doubted = self._doubts(chain, costs)
        if not doubted and not chain_pays(costs, min_gain):
            return
        names, leaves = [self._name(c) for c in members], [self._leaves(c) for c in members]
        built = self._compiled(partial(build_chain, chain, names, leaves, self.options, self.dump))
        if built is not None and doubted and self.budget is not None:
            costs = measured_costs(chain, costs, built, leaves, self.budget)
        if built is None or not chain_pays(costs, min_gain):
            return
        self._take_over(chain, built)
        formats = [f.name for f in built.kernels[0].formats if f is not None]
        parts = zip(members, formats, schedules_of(chain), strict=True)
        ranks = sorted({inner.rank for inner in chain.low_rank})
        beside = [f"a rank of {' and '.join(map(str, ranks))} beside it"] if ranks else []
        reason = ", ".join([f"in a chain of {len(members)}"] * (len(members) > 1) + beside)
        for number, (contraction, format, schedule) in enumerate(parts):
            self._decide(contraction, format, schedule or built.schedule, reason, chain, built, number, costs)
        for factor in dict.fromkeys(inner.stored for inner in chain.low_rank if inner.stored in self.names):
            shape = tuple(map(int, factor.meta["val"].shape))
            found = Decision.dense(self.names[factor], "low rank", shape, 1.0, f"in the kernel of {names[0]}")
            self.factors.setdefault(factor, found)

    def _doubts(self, chain: Chain, costs: ChainCosts) -> bool:
        """Whether to measure a chain."""
        if self.budget is None or self.options.min_gain == 0 or not costs.known:
            return False
        density = max(contraction.weight.density for contraction in chain.contractions)
        return self.budget.doubts(costs.gain, costs.dense, density) and self.budget.allows()

    def leave(self, contraction: Contraction) -> None:
        """Decides that a contraction that no chain has taken stays dense."""
        reason, gain = self._refusals[contraction.node], self._gains[contraction.node]
        self.decisions[contraction.node] = self._dense(contraction, reason or "", gain)

    def take(self, contraction: Contraction) -> None:
        """Compiles the region of a contraction. If that fails, the contraction stays dense."""
        region, name = grow(contraction, self._claimed), self._name(contraction)
        leaves = self._leaves(contraction)
        built = self._compiled(partial(build_region, region, name, leaves, self.options, self.dump))
        if built is not None:
            self._take_over(region, built)
            fused = f"{region.fused} op{'s' * (region.fused > 1)} fused" if region.fused else "nothing to fuse"
            fused += ", 2 results" if region.second is not None else ""
            self._decide(contraction, built.format, built.schedule, fused, region, built)
        else:
            self.decisions[contraction.node] = self._dense(contraction, FAILED, self._gains[contraction.node])

    def warn(self) -> None:
        """Gives one warning about all contractions that failed to compile."""
        if self._failures:
            others = f" and {len(self._failures) - 1} more" if len(self._failures) > 1 else ""
            advice = "" if self.dump else " options={'dump_ir': DIR} writes every stage to files."
            warnings.warn(f"{self._failures[0]}\nIt{others} stays dense.{advice}", stacklevel=3)

    def _compiled(self, compile_: Callable[[], Built]) -> Built | None:
        try:
            return compile_()
        except CompileError as error:
            if self.options.strict:
                raise
            self._failures.append(error)
            return None

    def _take_over(self, region: Region | Chain, built: Built) -> None:
        self._claimed.update(region.members)
        self.planned.append((region, built))

    def _dense(self, contraction: Contraction, reason: str, gain: float | None) -> Decision:
        return stays_dense(contraction, self._name(contraction), reason, gain, self.options.min_gain)

    def _decide(
        self,
        contraction: Contraction,
        format: str,
        schedule: str,
        reason: str,
        region: Region | Chain,
        built: Built,
        number: int = 0,
        costs: ChainCosts | None = None,
    ) -> None:
        """Notes the decision that a region or chain takes a contraction. Its weight has this number there."""
        name, gain, whole = self._name(contraction), self._gains[contraction.node], None
        if costs is not None and costs.known and gain is not None and (costs.measured or gain < self.options.min_gain):
            whole = costs  # measured times are better than predictions, and a product may gain enough only in the chain
        details = replace(
            details_of(contraction, self.options.min_gain),
            region=built.key, stages=built.stages, end=end_of(region.output), arrays=built.arrays[number],
            whole=whole is not None,
        )  # fmt: skip
        packed = built.packed_bytes[number]
        if whole is not None:
            reason = f"{reason}; gain of the whole kernel, {'measured' if whole.measured else 'predicted'}"
            gain = whole.gain
        measured = bool(contraction.times) if whole is None else whole.measured
        self.decisions[contraction.node] = taken(contraction, name, format, schedule, reason, gain, packed, details, measured)

    def _renewed(self, contraction: Contraction) -> float:
        """Returns the share of the weight's elements that are read for new values at every training step."""
        leaves, evaluate = self._leaves(contraction), contraction.weight.evaluate
        trained = in_training(contraction.node.graph) and any(leaf.requires_grad for leaf in leaves)
        if not trained or StoredMatrix.of(evaluate) is not None:
            return 0.0
        return contraction.weight.density if arrangement_of(evaluate) is not None and mask_of(leaves) is not None else 1.0

    def _name(self, contraction: Contraction) -> str:
        return self.names[contraction.weight.main]

    def _leaves(self, contraction: Contraction) -> list[torch.Tensor]:
        return [self.values[leaf] for leaf in contraction.weight.leaves]
