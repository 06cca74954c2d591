"""masked-attention: replaces dense attention by an operation that computes only the tiles that the mask leaves.

    %m = where(le(abs(sub(%i, %j)), 64), 0, -inf)
    %a = scaled_dot_product(%q, %k, %v, attn_mask=%m)     →     %a = gossamer::attend_under(%q, %k, %v, [], ..., "3f2a…")

| the mask is computed from                       | its tiles are found                      | operation                |
|-------------------------------------------------|------------------------------------------|--------------------------|
| inputs of the graph, such as lengths, documents | when these change, once for all layers   | gossamer::attend_under   |
| activations                                     | at every call                            | gossamer::attend_masked  |

A mask of activations must be made of bools. If a mask depends on positions alone, the pass computes it while compiling, and
leaves dense attention alone if the mask leaves most tiles.
"""

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod
from typing import Any, Self

import torch
from torch import fx

from gossamer.backend.graph.attention_calls import AttentionCall, calls, gradients_of
from gossamer.backend.graph.emit import Emitter, take_place
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
from gossamer.sparsity.attention.tile_table import TileTable

aten = torch.ops.aten

_LEAST = 2e8
"""Arithmetic operations of dense attention below which looking at the mask, some 50 µs a call, takes longer than is gained."""
_LONGEST = 64  # the most nodes that compute a mask; a larger expression is a part of the model

_MASK_AT: dict[Any, int] = {attend_masked: 3, attend_masked_backward: 6, attend_masked_scores: 6}
"""The index of the mask among the arguments of an operation."""


class MaskedAttention:
    """Gives attention the schedule `blocks` if its mask leaves few tiles."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Returns a decision for each attention with a mask, a soft cap or dropout."""
        if context.options.schedule == "reference":
            return []
        decisions, inputs = list[Decision](), {node for node in graph.nodes if node.op == "placeholder"}
        pure = computed_from(graph, inputs)
        for call in calls(graph):
            if not call.values[0].is_cpu or (call.mask is None and not call.ours):
                continue
            found = _Masked.of(call, inputs, pure, context)
            try:
                decisions.append(found.replace(context))
            except (Refused, CompileError) as problem:
                decisions.append(found.decision(context, context.reason(problem)))
        if any(decision.sparse for decision in decisions):
            graph.eliminate_dead_code()
        return decisions


@dataclass(frozen=True)
class _Masked:
    """One attention under a mask. If it has dropout or a soft cap, it may have no mask.

    condition   the bools that the mask is made of (0 or minus infinity); None if it is not
    expression  how the mask, or `condition`, is computed from inputs of the graph, and the key under which that is registered.
                None if it is computed with activations, or has a gradient
    now         the values of these inputs, if known while compiling
    backward    the operations for its gradients
    of_scores   whether there are others that also compute the gradient of the mask
    """

    call: AttentionCall
    condition: fx.Node | None
    expression: tuple[Expression, str] | None
    now: list[torch.Tensor] | None
    backward: tuple[fx.Node, ...]
    of_scores: bool

    @classmethod
    def of(cls, call: AttentionCall, inputs: Container[fx.Node], pure: Container[fx.Node], context: GraphContext) -> Self:
        """Analyses a call in a graph with these inputs. `pure` nodes are computed from inputs alone."""
        found, mask, (q, k, _) = gradients_of(call.node), call.mask, call.values
        backward = tuple(each for each in found if each.target is not attend_masked_scores)
        of_scores, condition, expression, now = len(found) > len(backward), None, None, None
        if mask is not None and not _unsupported(call, mask):
            condition = _condition(mask)
            made = None if of_scores else _expression(mask if condition is None else condition, inputs, pure)
            if made is not None:
                key = mask_ops.attention_mask(made, noticed(made.leaves, context.options.verify))
                now = context.inputs.given_now(made.leaves, made.numbers, (q, k))
                expression = made, key
        return cls(call, condition, expression, now, backward, of_scores)

    @cached_property
    def table(self) -> TileTable | None:
        """The tiles that the mask leaves with the inputs of this compilation; None if these are unknown."""
        q, k, _ = self.call.values
        if self.expression is None or self.now is None:
            return None
        found: TileTable = computed.known(self.expression[1]).current(self.now, ()).table(q, k)
        return found

    @property
    def of_positions(self) -> TileTable | None:
        """The tiles of a mask that depends on positions alone; None for others."""
        given = self.expression is None or self.expression[0].leaves or self.expression[0].numbers
        return None if given else self.table

    @property
    def mask(self) -> fx.Node | None:
        """The mask of the call."""
        return self.call.mask

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the mask, or of the scores if there is none."""
        q, k, _ = self.call.values
        return tuple(hint(n) or 0 for n in (self.mask.meta["val"].shape if self.mask is not None else (q.shape[2], k.shape[2])))

    def decision(self, context: GraphContext, reason: str, sparse: bool = False, **more: Any) -> Decision:
        """Returns the decision for the report."""
        given, share, gain = self.mask is not None and self.mask.op == "placeholder", 1.0, None
        named = context.inputs.name(self.mask) if given and self.mask is not None else place_of(self.call.node)
        if (table := self.table if sparse else self.of_positions) is not None:
            share = table.share(self.sizes[-1])
            gain = 1 / share if sparse and share and self.of_positions is not None else None
            more["picture"] = table.picture(self.sizes[-1]) if sparse else ""
        kind, schedule = (f"{TILE_QUERIES}x{TILE_KEYS} tiles", "blocks") if sparse else (None, None)
        return Decision(named, "attention", self.sizes, share, kind, schedule, sparse, reason, gain, **more)

    def replace(self, context: GraphContext) -> Decision:
        """Replaces the call and its gradients by Gossamer's operation. Raises Refused."""
        self._check(context)
        kernels = self._kernels()
        name, given = self._arguments()
        replaced = Emitter(self.call.node)(getattr(torch.ops.gossamer, name).default, *self.call.operands, *given)
        for each in self.backward:
            operation = getattr(torch.ops.gossamer, f"{name}_backward").default
            each.replace_all_uses_with(Emitter(each)(operation, *each.args[:6], *given))
        take_place(self.call.node, replaced)
        if self.of_positions is not None:
            reason = f"{self.of_positions.share(self.sizes[-1]):.0%} of the tiles are computed, {self._not_made()}"
        else:
            when = "when what it is computed from is new" if self.expression is not None else "at every call"
            left = "" if self.call.ours else f"; torch's own kernel runs where these are over {MOST_SHARE:.0%}"
            reason = f"the tiles that its mask leaves are found {when}{left}"
        return self.decision(context, reason, sparse=True, kernels=kernels)

    def _check(self, context: GraphContext) -> None:
        """Raises Refused if Gossamer's operation cannot compute this call, or not faster."""
        may_stay, (q, k, _) = context.options.min_gain > 0 and not self.call.ours, self.call.values
        if self.mask is not None and (reason := _unsupported(self.call, self.mask)):
            raise Refused(reason)
        if self.of_positions is not None:
            share = self.of_positions.share(self.sizes[-1])
            if share > MOST_SHARE and may_stay:
                raise Refused(f"its mask leaves {share:.0%} of the tiles")
            return
        if self.mask is not None and not self.of_scores and not self.call.ours and (self.condition or self.expression) is None:
            raise Refused("its mask adds numbers that are computed with activations")
        if 4 * prod(hint(n) or 0 for n in q.shape) * (hint(k.shape[2]) or 0) < _LEAST and may_stay:
            raise Refused("it is too small: checking its mask at every call takes longer")

    def _kernels(self) -> tuple[str, ...]:
        """Compiles the kernels that it needs and returns their keys. Raises CompileError."""
        parts = ("forward", *(("queries", "keys") if self.backward else ()), *(("queries", "scores") if self.of_scores else ()))
        added: tuple[Step, ...] = (ADD,) if self.mask is not None and self.condition is None else ()
        steps = *cap_steps(self.call.cap), *(added if self.of_positions is None else self.of_positions.steps)
        q = self.call.values[0]
        return tuple(attention_kernel(part, q, self.call.scale, steps, self.call.dropout).key for part in parts)

    def _arguments(self) -> tuple[str, list[Any]]:
        """Returns the name of the operation, and its arguments (and those of its gradients) after queries, keys and values."""
        if self.expression is not None:
            expression, key = self.expression
            return "attend_under", [list(expression.leaves), list(expression.numbers), *self.call.scoring, key]
        return "attend_masked", [self.mask if self.condition is None else self.condition, *self.call.scoring]

    def _not_made(self) -> str:
        """Says which memory is saved: the scores if attention was written out, else the mask that torch's operation reads."""
        q, k, _ = self.call.values
        what, value, shape = "scores", q, (*q.shape[:3], k.shape[2])
        if self.mask is not None and not self.call.ours:
            what, value, shape = "mask", self.mask.meta["val"], self.mask.meta["val"].shape
        return f"{prod(hint(n) or 0 for n in shape) * value.element_size() / 1e6:.3g} MB of {what} need not be made"


def _unsupported(call: AttentionCall, mask: fx.Node) -> str | None:
    """Returns why Gossamer's operation cannot compute a call of torch's, whatever its mask hides; None if it can."""
    q, k, v = call.values
    if call.ours:
        return None
    if call.dropout or call.causal:
        return "it has dropout" if call.dropout else "it is causal beside its mask"
    if not (q.dtype in TYPES and q.dtype == k.dtype == v.dtype):
        types = ", ".join(str(each.dtype).removeprefix("torch.") for each in (q, k, v))
        return f"its queries, keys and values have the types {types}"
    if not (isinstance(q.shape[3], int) and isinstance(v.shape[3], int)):
        return "the size of its heads is dynamic: compile without dynamic=True, then torch finds the sizes that change"
    if not 0 < q.shape[3] <= LARGEST_HEAD or q.shape[3] != v.shape[3]:
        heads = f"its heads have {q.shape[3]} features, and those of values {v.shape[3]}"
        return f"{heads}: they must be equal, at most {LARGEST_HEAD}"
    return None if mask.meta["val"].dim() in (2, 4) else f"its mask has {mask.meta['val'].dim()} dimensions"


def _expression(mask: fx.Node, inputs: Container[fx.Node], pure: Container[fx.Node]) -> Expression | None:
    """Returns how a mask is computed from inputs of the graph; None if it depends on activations or is too long."""
    nodes = ancestors([mask], inputs.__contains__)
    given = [node for node in nodes if node in inputs]
    if (given and len(nodes) > _LONGEST) or any(node not in pure for node in nodes) or any(map(_of_activations, given)):
        return None
    return cut([mask], inputs)


def _of_activations(given: fx.Node) -> bool:
    """Whether an input of the graph has floats that are used for more than masks and comparisons.

    Written-out attention compares its mask once more, because a query that sees nothing gives NaN:

        torch.where((mask != -inf).any(-1, keepdim=True), attended, nan)
    """
    value = given.meta["val"]
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    seen, pending = {given}, [given]
    while pending:
        node = pending.pop()
        for user in node.users:
            if user.target in (cpu_attention, cpu_attention_backward, *_MASK_AT, *mask_ops.OPERATIONS):
                if node in user.args[: _MASK_AT.get(user.target)]:  # as an operand, not as the mask or a leaf of it
                    return True
            elif user.op == "output":
                return True
            elif user not in seen and not _is_bool(user):
                seen.add(user)
                pending.append(user)
    return False


def _is_bool(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _condition(mask: fx.Node) -> fx.Node | None:
    """Returns the bools that a mask of 0 and minus infinity was made of; None if it was not."""
    found = match(where(Hole("seen"), 0, -inf), mask)
    return found["seen"] if found is not None and same_shape(found["seen"], mask) else None
