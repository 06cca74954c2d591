"""flex-attention: replaces FlexAttention by an operation that computes only the tiles that BlockMask and mask_mod leave.

    %o, %l = flex_attention(%q, %k, %v, @score, (%blocks.., @mask))  →  %o, %l = gossamer::attend_flex(%q, %k, %v, %blocks..)

The operation finds the tiles when the blocks change, or a buffer that mask_mod or score_mod reads. score_mod becomes steps of
the kernel, forward and backward: a soft cap, a factor, or an added value that depends on positions (score_function.py).
Inductor computes FlexAttention that the kernel cannot compute. If Inductor cannot on CPUs either, it is written out
(written_flex.py).
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from gossamer.backend.attention.score_function import function_of_places, score_function, with_constants
from gossamer.backend.attention.written_flex import write_out
from gossamer.backend.graph.attention_calls import gradients_of
from gossamer.backend.graph.emit import Emitter, take_place
from gossamer.backend.graph.expressions import computed_from, cut
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import noticed
from gossamer.backend.graph.names import place_of
from gossamer.backend.graph.nodes import ancestors, arguments, equal_sizes, hint
from gossamer.backend.graph.refused import Refused
from gossamer.backend.report.report import Decision
from gossamer.backend.run.computed import compared_for
from gossamer.backend.run.flex_ops import FlexMask, attend_flex, attend_flex_backward
from gossamer.dialects.attention import TILE_KEYS, TILE_QUERIES
from gossamer.dialects.errors import CompileError
from gossamer.runtime.torch_internals import flex_attention
from gossamer.sparsity.attention.masked_attention import LARGEST_HEAD, TYPES, attention_kernel

_LEAST_QUERIES = 8
"""The fewest queries for the kernel. Its lanes are queries, so that most of them would be idle with fewer."""


class _Unlowered(Refused):
    """Raised for FlexAttention that Inductor cannot compile either."""


class FlexAttention:
    """Gives FlexAttention on CPUs the schedule `blocks`."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Returns a decision for each FlexAttention."""
        if context.options.schedule == "reference":
            return []
        found = [node for node in graph.nodes if node.target is flex_attention and node.args[0].meta["val"].is_cpu]
        decisions = [_replace(node, context) for node in found]
        if found:
            graph.eliminate_dead_code()
        return decisions


def _replace(node: fx.Node, context: GraphContext) -> Decision:
    q, k = (argument.meta["val"] for argument in arguments(node)[:2])
    size = tuple(hint(n) or 0 for n in (q.shape[2], k.shape[2]))

    backward = gradients_of(node)
    try:
        if size[0] < _LEAST_QUERIES and context.options.min_gain > 0:
            raise Refused(f"it has fewer than {_LEAST_QUERIES} queries")
        mask, leaves, numbers = _flex_mask(node, backward, context)
        scale = float(_fixed(node.args[5]))
        parts = ("forward", *(("queries", "keys") if backward else ()))
        kernels = tuple(attention_kernel(part, q, scale, mask.score).key for part in parts)
    except (Refused, CompileError) as problem:
        written = write_out(node, backward, always=isinstance(problem, _Unlowered))
        return Decision.dense(place_of(node), "attention", size, 1.0, context.reason(problem) + written)
    shared = mask.shared(key := mask.key)
    given = leaves, numbers, scale, key
    ours = Emitter(node)(attend_flex, *node.args[:3], *given)
    take_place(node, ours)
    for each in backward:
        upstream, of_logarithms = (each.args[5], each.args[6])
        emit = Emitter(each)
        if upstream is None:
            upstream = emit.zeros(arguments(each)[3])
        each.replace_all_uses_with(emit(attend_flex_backward, upstream, of_logarithms, *each.args[:5], *given))
    now = context.inputs.given_now(leaves, numbers, (q, k))
    table = None if now is None else shared.table(now, (), q, k)
    share, picture = (1.0, "") if table is None else (table.share(size[1]), table.picture(size[1]))
    reason = "the tiles that its mask leaves are found when what it is computed from is new"
    how = f"{TILE_QUERIES}x{TILE_KEYS} tiles", "blocks", True, reason, None
    return Decision(place_of(node), "attention", size, share, *how, picture=picture, kernels=kernels)


def _flex_mask(
    node: fx.Node, backward: Sequence[fx.Node], context: GraphContext
) -> tuple[FlexMask, list[fx.Node], list[fx.Node]]:
    """Returns what a call does with scores, and the tensors and numbers from which that is computed. Raises Refused."""
    arguments: Any = node.args
    q, k, v, score, blocks, scale, _options, of_score, of_mask, *_ = arguments
    _check_sizes(*(argument.meta["val"] for argument in (q, k, v)))
    *_, query_block, key_block, mask = blocks
    query_block, key_block, scale = (_fixed(number) for number in (query_block, key_block, scale))
    lists = blocks[2:6]
    if any(isinstance(number, fx.Node) for number in (query_block, key_block, scale)):
        raise Refused("its scale or the size of its blocks is not fixed")
    edge = max(TILE_QUERIES, TILE_KEYS)
    if query_block % edge or key_block % edge:
        raise Refused(f"its blocks of {query_block}x{key_block} are not made of whole tiles")
    if any(user.users for each in backward for user in _results(each, 3)):
        raise Refused("a tensor that its functions read has a gradient")
    if any(user.users for user in _results(node, 2)):
        raise Refused("its largest scores are used")
    module: Any = node.graph.owning_module
    scored, of_score = with_constants(getattr(module, score.target), 5, of_score)
    masked, of_mask = with_constants(getattr(module, mask.target), 4, of_mask)
    function = score_function(scored)
    visible = function_of_places(masked)
    reads = function.added is not None or function.sees is not None
    places = [*lists, *of_mask, *(of_score if reads else ())]
    inputs = {each for each in node.graph.nodes if each.op == "placeholder"}
    behind = ancestors([place for place in places if place is not None], lambda each: each in inputs)
    if not computed_from(node.graph, inputs).issuperset(behind):
        raise Refused("its functions read a tensor that is random or changed in place")
    own = set(ancestors([q, k, v], lambda each: each in inputs))
    if any(each in own and each in inputs and each.meta["val"].is_floating_point() for each in behind if _is_tensor(each)):
        raise _Unlowered("what its functions read is computed with activations")
    expression = cut(places, inputs)
    compared = compared_for(noticed(expression.leaves, context.options.verify))
    block = query_block, key_block
    scoring = function.sees, function.added, function.hides, function.steps
    made = FlexMask(expression.evaluate, compared, len(of_mask), visible, *scoring, block)
    return made, list(expression.leaves), list(expression.numbers)


def _fixed(number: Any) -> Any:
    """Returns the value of a number that a graph with dynamic sizes takes as an argument. Guards on it, as Inductor does."""
    value = number.meta.get("val") if isinstance(number, fx.Node) else number
    if isinstance(value, torch.SymInt | torch.SymFloat) and value.node.hint is not None:
        return int(value) if isinstance(value, torch.SymInt) else float(value)
    return number


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _results(node: fx.Node, number: int) -> list[fx.Node]:
    """Returns the nodes that take one result of a call, or its parts if the result is a tuple."""
    found = [user for user in node.users if user.target is operator.getitem and user.args[1] == number]
    several = [part for each in found for part in each.users if part.target is operator.getitem]
    return several or found


def _check_sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if not (q.dtype in TYPES and q.dtype == k.dtype == v.dtype):
        raise Refused(f"its type is {q.dtype}")
    if not (isinstance(q.shape[3], int) and 0 < q.shape[3] <= LARGEST_HEAD and equal_sizes(q.shape[3:], v.shape[3:])):
        raise Refused(f"its heads have {q.shape[3]} features, and those of values {v.shape[3]}")
    if not equal_sizes(q.shape[:1], k.shape[:1]):
        raise Refused("a batch shares keys")
