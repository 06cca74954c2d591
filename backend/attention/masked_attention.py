"""masked-attention: dense attention whose mask hides most tiles computes the others only.

    %m = where(le(abs(sub(%i, %j)), 64), 0, -inf)                    →    %p, %t, %w = its tiles, found once
    %a = scaled_dot_product(%q, %k, %v, attn_mask=%m)                →    %a = gossamer::attend_tiles(%q, %k, %v, %p, %t, %w)

A mask that depends on nothing but positions is looked at now, and not made at run time. Of any other, if it says which keys are
seen and not what is added, the tiles are found once for all layers: where it is computed from documents, lengths or other
inputs, when those are new (gossamer::attend_under), else when it is there (gossamer::attend_masked).
"""

from dataclasses import dataclass
from math import inf, prod
from typing import Any, ClassVar, Self

import torch
from torch import fx

from gossamer.backend.chains.masks import Constants
from gossamer.backend.graph.attention_calls import AttentionCall, calls, gradients_of
from gossamer.backend.graph.emit import Emitter, constant, take_place
from gossamer.backend.graph.expressions import Expression, computed_from, cut
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import noticed
from gossamer.backend.graph.names import place_of
from gossamer.backend.graph.nodes import ancestors, hint, same_shape
from gossamer.backend.graph.patterns import Hole, match, where
from gossamer.backend.graph.refused import Refused
from gossamer.backend.report.report import Decision
from gossamer.backend.run import computed, mask_ops
from gossamer.dialects.attention import ADD, TILE_KEYS, TILE_QUERIES, Step
from gossamer.dialects.errors import CompileError
from gossamer.runtime.torch_internals import cpu_attention, cpu_attention_backward
from gossamer.sparsity.attention.masked_attention import (
    LARGEST_HEAD,
    MOST_SHARE,
    TYPES,
    attend_masked,
    attend_masked_backward,
    attend_masked_scores,
    attention_kernel,
    cap_steps,
)
from gossamer.sparsity.attention.tile_table import Strips, TileTable, tile_table

aten = torch.ops.aten

_LEAST = 2e8
"""Operations of dense attention below which its mask is not worth a look at run time, which costs some 50 µs."""
_LONGEST = 64  # nodes of a mask: what takes more of the graph is a part of the model

_MASK_AT: dict[Any, int] = {attend_masked: 3, attend_masked_backward: 6, attend_masked_scores: 6}
"""By operation, where its mask is among the arguments."""

_Tables = tuple[TileTable, TileTable]
"""Of a mask, and of it with queries and keys in each other's place."""


class MaskedAttention:
    """Attention under a mask takes the schedule `blocks` where the mask leaves few tiles."""

    name: ClassVar[str] = "masked-attention"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """A decision for each attention with a mask."""
        if context.options.schedule == "reference":
            return []
        constants, decisions, tables = Constants(graph), list[Decision](), dict[fx.Node, _Tables | None]()
        for call in calls(graph):
            if not call.values[0].is_cpu or (call.mask is None and not call.ours):
                continue
            found = _Masked.of(call, constants, tables)
            try:
                decisions.append(found.replace(context))
            except (Refused, CompileError) as problem:
                decisions.append(found.decision(context, context.reason(problem)))
        if any(decision.sparse for decision in decisions):
            graph.eliminate_dead_code()
        return decisions


@dataclass(frozen=True)
class _Masked:
    """One attention under a mask; that with dropout or a soft cap may have none.

    condition  the bools of which the mask is made, None if it is more than these
    tables     its tiles where positions alone say them
    backward   the operations for its gradients, and `of_scores` those that compute that of the mask, too
    """

    call: AttentionCall
    condition: fx.Node | None
    tables: _Tables | None
    backward: tuple[fx.Node, ...]
    of_scores: bool

    @classmethod
    def of(cls, call: AttentionCall, constants: Constants, tables: dict[fx.Node, _Tables | None]) -> Self:
        """That of an operation. The `tables` are those of masks seen before."""
        mask, (q, k, _) = call.mask, call.values
        readable = None if mask is None or _unsupported(call, mask) else mask
        condition = _condition(readable) if readable is not None else None
        if readable is not None and readable not in tables:
            known = _known(readable if condition is None else condition, constants)
            tables[readable] = None if known is None else _tables(known, q.shape[2], k.shape[2])
        found = gradients_of(call.node)
        backward = tuple(each for each in found if each.target is not attend_masked_scores)
        return cls(call, condition, None if mask is None else tables.get(mask), backward, len(found) > len(backward))

    @property
    def mask(self) -> fx.Node | None:
        """That of the operation."""
        return self.call.mask

    @property
    def sizes(self) -> tuple[int, ...]:
        """Those of its mask, or of its scores."""
        q, k, _ = self.call.values
        return tuple(hint(n) or 0 for n in (self.mask.meta["val"].shape if self.mask is not None else (q.shape[2], k.shape[2])))

    @property
    def share(self) -> float:
        """Of the tiles that its mask leaves."""
        return 1.0 if self.tables is None else self.tables[0].share(self.sizes[-1])

    def decision(self, context: GraphContext, reason: str, share: float | None = None, **more: Any) -> Decision:
        """What the report says of it; dense where nothing `more` is said."""
        sparse, given = bool(more), self.mask is not None and self.mask.op == "placeholder"
        named = context.inputs.name(self.mask) if given and self.mask is not None else place_of(self.call.node)
        kind, schedule = (f"{TILE_QUERIES}x{TILE_KEYS} tiles", "blocks") if sparse else (None, None)
        share = self.share if share is None else share
        gain = more.pop("gain", None)
        return Decision(named, "attention", self.sizes, share, kind, schedule, sparse, reason, gain, **more)

    def replace(self, context: GraphContext) -> Decision:
        """Puts the operation of ours in its place. Raises Refused."""
        expression = self._expression()
        self._check(expression, context)
        kernels = self._kernels()
        name, forward, gradient = self._arguments(expression, context)
        replaced = Emitter(self.call.node)(getattr(torch.ops.gossamer, name).default, *self.call.operands, *forward)
        for each in self.backward:
            operation = getattr(torch.ops.gossamer, f"{name}_backward").default
            each.replace_all_uses_with(Emitter(each)(operation, *each.args[:6], *gradient))
        take_place(self.call.node, replaced)
        if self.tables is not None:
            left = f"{self.share:.0%} of the tiles are computed, {self._not_made()}"
            picture = self.tables[0].picture(self.sizes[-1])
            return self.decision(context, left, gain=1 / self.share if self.share else None, picture=picture, kernels=kernels)
        table = self._table_now(expression, forward[-1], context) if expression is not None else None
        when = "when what it is computed from is new" if expression is not None else "at every call"
        left = "" if self.call.ours else f"; torch's own kernel runs where these are over {MOST_SHARE:.0%}"
        share = None if table is None else table.share(self.sizes[-1])
        picture = "" if table is None else table.picture(self.sizes[-1])
        return self.decision(
            context, f"the tiles that its mask leaves are found {when}{left}", share, picture=picture, kernels=kernels
        )

    def _check(self, expression: Expression | None, context: GraphContext) -> None:
        """Raises Refused for what the operation of ours does not compute, or not faster."""
        may_stay, (q, k, _) = context.options.min_gain > 0 and not self.call.ours, self.call.values
        if self.mask is not None and (reason := _unsupported(self.call, self.mask)):
            raise Refused(reason)
        if self.tables is not None:
            if self.share > MOST_SHARE and may_stay:
                raise Refused(f"its mask leaves {self.share:.0%} of the tiles")
            return
        if self.mask is not None and not self.of_scores and not self.call.ours and (self.condition or expression) is None:
            raise Refused("its mask adds numbers that are computed with activations")
        if 4 * prod(hint(n) or 0 for n in q.shape) * (hint(k.shape[2]) or 0) < _LEAST and may_stay:
            raise Refused("it is too small to look at its mask at every call")

    def _expression(self) -> Expression | None:
        """How its mask is computed, where its tiles are to be found when that is new."""
        looked_at = self.mask if self.condition is None else self.condition
        known = self.tables is not None or looked_at is None or self.of_scores
        return None if known or looked_at is None else _expression(looked_at, self.call.node.graph)

    def _kernels(self) -> tuple[str, ...]:
        """The keys of what it calls. Raises CompileError."""
        parts = ("forward", *(("queries", "keys") if self.backward else ()), *(("queries", "scores") if self.of_scores else ()))
        added = (ADD,) if self.mask is not None and self.condition is None else ()
        steps: tuple[Step, ...] = (*cap_steps(self.call.cap), *(added if self.tables is None else self.tables[0].steps))
        q = self.call.values[0]
        return tuple(attention_kernel(part, q, self.call.scale, steps, self.call.dropout).key for part in parts)

    def _arguments(self, expression: Expression | None, context: GraphContext) -> tuple[str, list[Any], list[Any]]:
        """The operation, and the arguments of it and of that for its gradients, besides queries, keys and values."""
        if expression is not None:
            key = mask_ops.attention_mask(expression, noticed(expression.leaves, context.options.verify))
            given = [list(expression.leaves), list(expression.numbers), *self.call.scoring, key]
            return "attend_under", given, given
        if self.tables is not None:
            parts = [constant(self.call.node, part) for each in self.tables for part in each.tensors]
            return "attend_tiles", [parts[:4], *self.call.scoring], [parts, *self.call.scoring]
        given = [self.mask if self.condition is None else self.condition, *self.call.scoring]
        return "attend_masked", given, given

    def _table_now(self, expression: Expression, key: str, context: GraphContext) -> TileTable | None:
        """Its tiles as the inputs are now."""
        q, k, _ = self.call.values
        now = context.inputs.given_now(expression.leaves, expression.numbers, (q, k))
        return None if now is None else computed.known(key).current(now, ()).table(q, k)

    def _not_made(self) -> str:
        """What takes no memory: the scores of attention that is written out, else the mask, which torch's operation reads."""
        q, k, _ = self.call.values
        what, value, shape = "scores", q, (*q.shape[:3], k.shape[2])
        if self.mask is not None and not self.call.ours:
            what, value, shape = "mask", self.mask.meta["val"], self.mask.meta["val"].shape
        return f"{prod(hint(n) or 0 for n in shape) * value.element_size() / 1e6:.3g} MB of {what} are not made"


def _unsupported(call: AttentionCall, mask: fx.Node) -> str | None:
    """Why the operation of ours does not compute what torch's does, whatever its mask hides."""
    q, k, v = call.values
    if call.ours:
        return None
    if call.dropout or call.causal:
        return "it has dropout" if call.dropout else "it is causal beside its mask"
    if not (q.dtype in TYPES and q.dtype == k.dtype == v.dtype):
        return f"its queries, keys and values are {', '.join(str(each.dtype).removeprefix('torch.') for each in (q, k, v))}"
    if not (isinstance(q.shape[3], int) and isinstance(v.shape[3], int)):
        return "the size of its heads is open: compile without dynamic=True, and sizes that change are found"
    if not 0 < q.shape[3] <= LARGEST_HEAD or q.shape[3] != v.shape[3]:
        return f"its heads have {q.shape[3]} numbers, of values {v.shape[3]}: equally many, up to {LARGEST_HEAD}, are supported"
    return None if mask.meta["val"].dim() in (2, 4) else f"its mask has {mask.meta['val'].dim()} dimensions"


def _expression(mask: fx.Node, graph: fx.Graph) -> Expression | None:
    """How a mask is computed from inputs of the graph; None if it depends on more of it than masks do."""
    inputs = {node for node in graph.nodes if node.op == "placeholder"}
    nodes = ancestors([mask], lambda node: node in inputs)
    whole = len(nodes) <= _LONGEST and computed_from(graph, inputs).issuperset(nodes)
    return cut([mask], inputs) if whole and not any(n in inputs and _of_activations(n) for n in nodes) else None


def _of_activations(given: fx.Node) -> bool:
    """Whether an input of the graph is numbers of which more is made than masks."""
    value = given.meta["val"]
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    seen, pending = {given}, [given]
    while pending:
        node = pending.pop()
        for user in node.users:
            if user.target in (cpu_attention, cpu_attention_backward, *_MASK_AT, *mask_ops.OPERATIONS):
                if node in user.args[: _MASK_AT.get(user.target)]:  # and not the mask, or a leaf of it
                    return True
            elif user.op == "output":
                return True
            elif user not in seen:
                seen.add(user)
                pending.append(user)
    return False


def _known(mask: fx.Node, constants: Constants) -> torch.Tensor | Strips | None:
    """What positions alone say, as much of it at a time as memory should take."""
    by_strips = constants.strips(mask)
    return constants.of(mask) if by_strips is None else by_strips


def _tables(mask: torch.Tensor | Strips, queries: int, keys: int) -> _Tables:
    if isinstance(mask, Strips):
        return tile_table(mask), tile_table(mask, turned=True)
    mask = mask if mask.dim() == 4 else mask[None, None]
    whole = mask.expand(*mask.shape[:2], queries, keys)
    return tile_table(whole), tile_table(whole, turned=True)


def _condition(mask: fx.Node) -> fx.Node | None:
    """The bools that a mask was made of as 0 and minus infinity."""
    found = match(where(Hole("seen"), 0, -inf), mask)
    return found["seen"] if found is not None and same_shape(found["seen"], mask) else None
