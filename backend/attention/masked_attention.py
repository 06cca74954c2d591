"""masked-attention: dense attention whose mask hides most tiles computes the others only.

    %m = where(le(abs(sub(%i, %j)), 64), 0, -inf)                    →    %p, %t, %w = its tiles, found once
    %a = scaled_dot_product(%q, %k, %v, attn_mask=%m)                →    %a = gossamer::attend_tiles(%q, %k, %v, %p, %t, %w)

A mask that depends on nothing but positions is looked at now, and not made at run time. Of any other, if it says which keys are
seen and not what is added, the tiles are found once for all layers: where it is computed from documents, lengths or other
inputs, when those are new (gossamer::attend_under), else when it is there (gossamer::attend_masked).
"""

import operator
from dataclasses import dataclass
from math import inf, prod
from typing import Any, ClassVar, Self

import torch
from torch import fx

from gossamer.backend.chains.masks import Constants
from gossamer.backend.graph.emit import Emitter, constant, take_place
from gossamer.backend.graph.expressions import Expression, computed_from, cut
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import noticed
from gossamer.backend.graph.names import place_of
from gossamer.backend.graph.nodes import ancestors, hint, same, same_shape, users
from gossamer.backend.graph.patterns import Hole, match, where
from gossamer.backend.graph.refused import Refused
from gossamer.backend.report.report import FAILED, Decision
from gossamer.backend.run import mask_ops
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

_BACKWARDS = cpu_attention_backward, attend_masked_backward
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
        for node in list(graph.nodes):
            if node.target not in (cpu_attention, attend_masked) or not node.args[0].meta["val"].is_cpu:
                continue
            found = _Masked.of(node, constants, tables)
            if found is None:
                continue
            try:
                decisions.append(found.replace(context))
            except Refused as problem:
                decisions.append(found.decision(context, str(problem)))
            except CompileError:
                if context.options.strict:
                    raise
                decisions.append(found.decision(context, FAILED))
        if any(decision.sparse for decision in decisions):
            graph.eliminate_dead_code()
        return decisions


@dataclass(frozen=True)
class _Masked:
    """One attention under a mask.

    mask       what is added to its scores, or says which keys are seen; attention with dropout or a soft cap may have none
    condition  the bools of which the mask is made, None if it is more than these
    tables     its tiles where positions alone say them
    how        the arguments that are a `Scoring`
    backward   the operations for its gradients, and those that compute that of the mask, too
    """

    node: fx.Node
    mask: fx.Node | None
    condition: fx.Node | None
    tables: _Tables | None
    how: tuple[Any, ...]
    backward: tuple[fx.Node, ...]
    of_scores: bool

    @classmethod
    def of(cls, node: fx.Node, constants: Constants, tables: dict[fx.Node, _Tables | None]) -> Self | None:
        """That of an operation; None if it has nothing that ours is for. The `tables` are those of masks seen before."""
        mask: Any = node.kwargs.get("attn_mask") if node.target is cpu_attention else node.args[3]
        if not isinstance(mask, fx.Node) and node.target is cpu_attention:
            return None
        q, k = (argument.meta["val"] for argument in node.args[:2])  # type: ignore[union-attr]
        scale: Any = node.kwargs.get("scale")
        how = node.args[4:] if node.target is attend_masked else (float(scale or q.shape[3] ** -0.5), None, None, 0.0, False)
        readable = mask is not None and not (node.target is cpu_attention and _unsupported(node, mask))
        condition = _condition(mask) if readable else None
        if readable and mask not in tables:
            known = _known(mask if condition is None else condition, constants)
            tables[mask] = None if known is None else _tables(known, q.shape[2], k.shape[2])
        backward, of_scores = (_gradients_of(node, targets) for targets in (_BACKWARDS, (attend_masked_scores,)))
        return cls(node, mask, condition, tables.get(mask), how, backward, bool(of_scores))

    @property
    def ours(self) -> bool:
        """Whether it has what torch's operation does not compute."""
        return self.node.target is attend_masked

    @property
    def sizes(self) -> tuple[int, ...]:
        """Those of its mask, or of its scores."""
        return _sizes(self.mask) if self.mask is not None else (self._extent(0), self._extent(1))

    @property
    def share(self) -> float:
        """Of the tiles that its mask leaves."""
        return 1.0 if self.tables is None else self.tables[0].share(self.sizes[-1])

    def _extent(self, number: int) -> int:
        """The number of queries, or of keys."""
        argument: Any = self.node.args[number]
        return hint(argument.meta["val"].shape[2]) or 0

    def decision(self, context: GraphContext, reason: str, share: float | None = None, **more: Any) -> Decision:
        """What the report says of it; dense where nothing `more` is said."""
        sparse = bool(more)
        named = (
            context.inputs.name(self.mask) if self.mask is not None and self.mask.op == "placeholder" else place_of(self.node)
        )
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
        replaced = Emitter(self.node)(getattr(torch.ops.gossamer, name).default, *self.node.args[:3], *forward)
        for each in self.backward:
            operation = getattr(torch.ops.gossamer, f"{name}_backward").default
            each.replace_all_uses_with(Emitter(each)(operation, *each.args[:6], *gradient))
        take_place(self.node, replaced)
        if self.tables is not None:
            left = f"{self.share:.0%} of the tiles are computed, {self._not_made()}"
            picture = self.tables[0].picture(self.sizes[-1])
            return self.decision(context, left, gain=1 / self.share if self.share else None, picture=picture, kernels=kernels)
        table = self._table_now(expression, forward[-1], context) if expression is not None else None
        when = "when what it is computed from is new" if expression is not None else "at every call"
        left = "" if self.ours else f"; torch's own kernel runs where these are over {MOST_SHARE:.0%}"
        share = None if table is None else table.share(self.sizes[-1])
        picture = "" if table is None else table.picture(self.sizes[-1])
        return self.decision(
            context, f"the tiles that its mask leaves are found {when}{left}", share, picture=picture, kernels=kernels
        )

    def _check(self, expression: Expression | None, context: GraphContext) -> None:
        """Raises Refused for what the operation of ours does not compute, or not faster."""
        may_stay = context.options.min_gain > 0 and not self.ours
        q = self.node.args[0].meta["val"]  # type: ignore[union-attr]
        if self.mask is not None and not self.ours and (reason := _unsupported(self.node, self.mask)):
            raise Refused(reason)
        if self.tables is not None:
            if self.share > MOST_SHARE and may_stay:
                raise Refused(f"its mask leaves {self.share:.0%} of the tiles")
            return
        if self.mask is not None and not self.of_scores and not self.ours and (self.condition or expression) is None:
            raise Refused("its mask adds numbers that are computed with activations")
        if 4 * prod(hint(n) or 0 for n in q.shape) * self._extent(1) < _LEAST and may_stay:
            raise Refused("it is too small: checking its mask at every call takes longer")

    def _expression(self) -> Expression | None:
        """How its mask is computed, where its tiles are to be found when that is new."""
        looked_at = self.mask if self.condition is None else self.condition
        found_late = self.tables is None and looked_at is not None and not self.of_scores
        return _expression(looked_at, self.node.graph) if found_late else None  # type: ignore[arg-type]

    def _kernels(self) -> tuple[str, ...]:
        """The keys of what it calls. Raises CompileError."""
        parts = ("forward", *(("queries", "keys") if self.backward else ()), *(("queries", "scores") if self.of_scores else ()))
        scale, cap, _, dropout, _ = self.how
        added = (ADD,) if self.mask is not None and self.condition is None else ()
        steps: tuple[Step, ...] = (*cap_steps(cap), *(added if self.tables is None else self.tables[0].steps))
        q = self.node.args[0].meta["val"]  # type: ignore[union-attr]
        return tuple(attention_kernel(part, q, scale, steps, dropout).key for part in parts)

    def _arguments(self, expression: Expression | None, context: GraphContext) -> tuple[str, list[Any], list[Any]]:
        """The operation, and the arguments of it and of that for its gradients, besides queries, keys and values."""
        if expression is not None:
            key = mask_ops.attention_mask(expression, noticed(expression.leaves, context.options.verify))
            given = [list(expression.leaves), list(expression.numbers), *self.how, key]
            return "attend_under", given, given
        if self.tables is not None:
            parts = [constant(self.node, part) for each in self.tables for part in each.tensors]
            return "attend_tiles", [parts[:4], *self.how], [parts, *self.how]
        given = [self.mask if self.condition is None else self.condition, *self.how]
        return "attend_masked", given, given

    def _table_now(self, expression: Expression, key: str, context: GraphContext) -> TileTable | None:
        """Its tiles as the inputs are now."""
        q, k = (argument.meta["val"] for argument in self.node.args[:2])  # type: ignore[union-attr]
        now = context.inputs.given_now(expression.leaves, expression.numbers, (q, k))
        return None if now is None else mask_ops.known(key).current(now, ()).table(q, k)

    def _not_made(self) -> str:
        """What takes no memory: the scores of attention that is written out, else the mask, which torch's operation reads."""
        q, k = (argument.meta["val"] for argument in self.node.args[:2])  # type: ignore[union-attr]
        of_scores = self.ours or self.mask is None
        value = q if of_scores else self.mask.meta["val"]  # type: ignore[union-attr]
        shape = (*q.shape[:3], k.shape[2]) if of_scores else value.shape
        megabytes = prod(hint(n) or 0 for n in shape) * value.element_size() / 1e6
        return f"{megabytes:.3g} MB of {'scores' if of_scores else 'mask'} are not made"


def _unsupported(node: fx.Node, mask: fx.Node) -> str | None:
    """Why the operation of ours does not compute what torch's does, whatever its mask hides."""
    q, k, v = (argument.meta["val"] for argument in node.args[:3])  # type: ignore[union-attr]
    given: Any = node.args[3:]
    dropout, causal = given[0] if given else 0.0, given[1] if len(given) > 1 else False
    if dropout or causal:
        return "it has dropout" if dropout else "it is causal beside its mask"
    if not (q.dtype in TYPES and q.dtype == k.dtype == v.dtype):
        types = ", ".join(str(each.dtype).removeprefix("torch.") for each in (q, k, v))
        return f"its queries, keys and values have the types {types}"
    if not (isinstance(q.shape[3], int) and isinstance(v.shape[3], int)):
        return "the size of its heads is dynamic: compile without dynamic=True, then torch finds the sizes that change"
    if not 0 < q.shape[3] <= LARGEST_HEAD or q.shape[3] != v.shape[3]:
        heads = f"its heads have {q.shape[3]} features, and those of values {v.shape[3]}"
        return f"{heads}: they must be equal, at most {LARGEST_HEAD}"
    return None if mask.meta["val"].dim() in (2, 4) else f"its mask has {mask.meta['val'].dim()} dimensions"


def _sizes(value: fx.Node) -> tuple[int, ...]:
    return tuple(hint(n) or 0 for n in value.meta["val"].shape)


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


def _gradients_of(node: fx.Node, targets: tuple[Any, ...]) -> tuple[fx.Node, ...]:
    """The operations for the gradients of attention, in a joint graph. They read its result."""
    results = [user for user in node.users if user.target is operator.getitem]
    found = [user for result in results for user in users(result) if user.target in targets and same(user.args[4]) is result]
    return tuple(dict.fromkeys(found))
