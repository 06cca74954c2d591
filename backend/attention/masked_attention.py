"""masked-attention: dense attention whose mask hides most tiles computes the others only.

    %m = where(le(abs(sub(%i, %j)), 64), 0, -inf)                    →    %p, %t, %w = its tiles, found once
    %a = scaled_dot_product(%q, %k, %v, attn_mask=%m)                →    %a = gossamer::attend_tiles(%q, %k, %v, %p, %t, %w)

A mask that depends on nothing but positions is looked at now, and not made at run time. Of any other, if it says which keys are
seen and not what is added, the tiles are found once for all layers: where it is computed from documents, lengths or other
inputs, when those are new (gossamer::attend_under), else when it is there (gossamer::attend_masked).
"""

import operator
from math import prod
from typing import Any, ClassVar

import torch
from torch import fx

from gossamer.backend.calls import mask_ops
from gossamer.backend.chains.masks import Constants
from gossamer.backend.graph.emit import Emitter, constant, take_place
from gossamer.backend.graph.expressions import Expression, computed_from, cut
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import noticed
from gossamer.backend.graph.names import place_of
from gossamer.backend.graph.nodes import COPIES, ancestors, hint, same
from gossamer.backend.report.report import FAILED, Decision
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
        constants, decisions, tables = Constants(graph), list[Decision](), dict[fx.Node | None, _Tables | None]()
        for node in list(graph.nodes):
            if node.target not in (cpu_attention, attend_masked) or not node.args[0].meta["val"].is_cpu:
                continue
            mask = node.kwargs.get("attn_mask") if node.target is cpu_attention else node.args[3]
            if isinstance(mask, fx.Node) and node.target is cpu_attention and (reason := _unsupported(node, mask)):
                decisions.append(
                    Decision(_named(node, mask, context), "attention", _sizes(mask), 1.0, None, None, False, reason, None)
                )
            elif isinstance(mask, fx.Node) or node.target is attend_masked:
                decisions.append(_replace(node, mask, constants, tables, context))
        if any(decision.sparse for decision in decisions):
            graph.eliminate_dead_code()
        return decisions


def _named(node: fx.Node, mask: fx.Node | None, context: GraphContext) -> str:
    """The mask as the user calls it, or the module that attends."""
    return context.inputs.name(mask) if mask is not None and mask.op == "placeholder" else place_of(node)


def _unsupported(node: fx.Node, mask: fx.Node) -> str | None:
    """Why the operation of ours does not compute this, whatever its mask hides."""
    q, k, v = (argument.meta["val"] for argument in node.args[:3])  # type: ignore[union-attr]
    given: Any = node.args[3:]
    dropout, causal = given[0] if given else 0.0, given[1] if len(given) > 1 else False
    if dropout or causal:
        return "it has dropout" if dropout else "it is causal beside its mask"
    if not (q.dtype in TYPES and q.dtype == k.dtype == v.dtype):
        return f"its queries, keys and values are {', '.join(str(each.dtype).removeprefix('torch.') for each in (q, k, v))}"
    if not (isinstance(q.shape[3], int) and isinstance(v.shape[3], int)):
        return "the size of its heads is open: compile without dynamic=True, and sizes that change are found"
    if not 0 < q.shape[3] <= LARGEST_HEAD or q.shape[3] != v.shape[3]:
        return f"its heads have {q.shape[3]} numbers, of values {v.shape[3]}: equally many, up to {LARGEST_HEAD}, are supported"
    return None if mask.meta["val"].dim() in (2, 4) else f"its mask has {mask.meta['val'].dim()} dimensions"


def _sizes(value: fx.Node) -> tuple[int, ...]:
    return tuple(hint(n) or 0 for n in value.meta["val"].shape)


def _replace(
    node: fx.Node,
    mask: fx.Node | None,
    constants: Constants,
    tables: dict[fx.Node | None, _Tables | None],
    context: GraphContext,
) -> Decision:
    q, k = (argument.meta["val"] for argument in node.args[:2])  # type: ignore[union-attr]
    how = _scoring(node, q)
    scale, cap, _, dropout, _ = how
    ours = node.target is attend_masked
    condition = _condition(mask, constants) if mask is not None else None
    backward, of_scores = (_gradient_of(node, targets) for targets in (_BACKWARDS, (attend_masked_scores,)))
    if mask not in tables:
        known = _known(condition if condition is not None else mask, constants) if mask is not None else None
        tables[mask] = None if known is None else _tables(known, q.shape[2], k.shape[2])
    known_tables = tables[mask]
    table = known_tables[0] if known_tables is not None else None
    size = _sizes(mask) if mask is not None else (hint(q.shape[2]) or 0, hint(k.shape[2]) or 0)
    share = 1.0 if table is None else table.share(size[-1])
    work = 4 * prod(hint(n) or 0 for n in q.shape) * (hint(k.shape[2]) or 0)

    kernels: list[str] = []

    def decision(sparse: bool, reason: str, gain: float | None = None) -> Decision:
        kind = f"{TILE_QUERIES}x{TILE_KEYS} tiles" if sparse else None
        picture = table.picture(size[-1]) if sparse and table is not None else ""
        schedule = "blocks" if sparse else None
        keys = tuple(kernels) if sparse else ()
        return Decision(
            _named(node, mask, context),
            "attention",
            size,
            share,
            kind,
            schedule,
            sparse,
            reason,
            gain,
            picture=picture,
            kernels=keys,
        )

    expression = None
    if table is None and mask is not None and not of_scores:
        expression = _expression(mask if condition is None else condition, node.graph)
        if condition is None and expression is None and not ours:
            return decision(False, "its mask adds numbers that are computed with activations")
    may_stay = context.options.min_gain > 0 and not ours
    if table is not None and share > MOST_SHARE and may_stay:
        return decision(False, f"its mask leaves {share:.0%} of the tiles")
    if table is None and work < _LEAST and may_stay:
        return decision(False, "it is too small to look at its mask at every call")
    try:
        wanted = ("forward", *(("queries", "keys") if backward else ()), *(("queries", "scores") if of_scores else ()))
        steps = *cap_steps(cap), *_steps(table, mask if condition is None else None)
        kernels += [attention_kernel(part, q, scale, steps, dropout).key for part in wanted]
    except CompileError:
        if context.options.strict:
            raise
        return decision(False, FAILED)
    ops = torch.ops.gossamer
    forward: list[Any] = [mask if condition is None else condition, *how]
    name, gradient = "attend_masked", forward
    if expression is not None:
        key = mask_ops.attention_mask(expression, noticed(expression.leaves, context.options.verify))
        forward = [list(expression.leaves), list(expression.numbers), *how, key]
        name, gradient = "attend_under", forward
    elif known_tables is not None:
        parts = [constant(node, part) for each in known_tables for part in each.tensors]
        name, forward, gradient = "attend_tiles", [parts[:4], *how], [parts, *how]
    replaced = Emitter(node)(getattr(ops, name).default, *node.args[:3], *forward)
    for each in backward:
        operation = getattr(ops, f"{name}_backward").default
        each.replace_all_uses_with(Emitter(each)(operation, *each.args[:6], *gradient))
    take_place(node, replaced)
    if expression is not None:
        now = context.inputs.given_now(expression.leaves, expression.numbers, (q, k))
        table = None if now is None else mask_ops.known(key).current(now, ()).table(q, k)
        share = share if table is None else table.share(size[-1])
    if known_tables is None:
        when = "when what it is computed from is new" if expression is not None else "at every call"
        left = "" if ours else f"; torch's own kernel runs where these are over {MOST_SHARE:.0%}"
        return decision(True, f"the tiles that its mask leaves are found {when}{left}")
    left = f"{share:.0%} of the tiles are computed, {_not_made(node, mask)}"
    return decision(True, left, 1 / share if share else None)


def _not_made(node: fx.Node, mask: fx.Node | None) -> str:
    """What takes no memory: the scores of attention that is written out, else the mask, which torch's operation reads."""
    q, k = (argument.meta["val"] for argument in node.args[:2])  # type: ignore[union-attr]
    of_scores = node.target is attend_masked or mask is None
    value = q if of_scores else mask.meta["val"]  # type: ignore[union-attr]
    shape = (*q.shape[:3], k.shape[2]) if of_scores else value.shape
    megabytes = prod(hint(n) or 0 for n in shape) * value.element_size() / 1e6
    return f"{megabytes:.3g} MB of {'scores' if of_scores else 'mask'} are not made"


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


def _steps(table: TileTable | None, added: fx.Node | None) -> tuple[Step, ...]:
    """What a mask will probably do to scores."""
    return table.steps if table is not None else () if added is None else (ADD,)


def _scoring(node: fx.Node, q: torch.Tensor) -> tuple[Any, ...]:
    """The arguments that are a `Scoring`."""
    if node.target is attend_masked:
        return node.args[4:]
    given: Any = node.kwargs.get("scale")
    return float(given or q.shape[3] ** -0.5), None, None, 0.0, False


def _gradient_of(node: fx.Node, targets: tuple[Any, ...]) -> list[fx.Node]:
    """The operations for the gradients of attention, in a joint graph."""
    results = {user for user in node.users if user.target is operator.getitem}
    pending = list(results)
    while pending:
        for user in pending.pop().users:
            if user.target in COPIES and user not in results:
                results.add(user)
                pending.append(user)
    found = {user for result in results for user in result.users if user.target in targets and same(user.args[4]) in results}
    return list(found)


def _condition(mask: fx.Node, constants: Constants) -> fx.Node | None:
    """The bools that a mask was made of as 0 and minus infinity."""
    if mask.target is not aten.where.self:
        return None
    condition, shown, hidden = mask.args
    values = [constants.of(n) if isinstance(n, fx.Node) else None for n in (shown, hidden)]
    if any(value is None for value in values) or not isinstance(condition, fx.Node):
        return None
    shown, hidden = values
    same = condition.meta["val"].shape == mask.meta["val"].shape
    return condition if same and bool((shown == 0).all()) and bool(hidden.isneginf().all()) else None  # type: ignore[union-attr]
