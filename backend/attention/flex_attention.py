"""flex-attention: FlexAttention computes the tiles that its BlockMask and mask_mod leave, with score_mod in the kernel.

    %o = flex_attention(%q, %k, %v, @score, (%blocks.., @mask))     →    %o = gossamer::attend_flex(%q, %k, %v, %blocks.., key)

The tiles are found when what they are computed from is new: the blocks and the buffers that the functions read. The function of
a score becomes steps of the kernel, as far as it is a soft cap, a factor, or something added that depends on places. On CPUs
torch refuses to trace gradients of FlexAttention, so forward is all there is to replace.
"""

from typing import Any, ClassVar

import torch
from torch import fx

from gossamer.backend.attention.score_function import Refused, ScoreFunction, function_of_places, score_function
from gossamer.backend.calls.flex_ops import FlexMask, attend_flex
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.expressions import computed_from, cut
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.nodes import ancestors, equal_sizes, hint
from gossamer.backend.report.report import FAILED, Decision
from gossamer.dialects.attention import TILE_KEYS, TILE_QUERIES
from gossamer.dialects.errors import CompileError
from gossamer.runtime.remembered import Compared
from gossamer.runtime.torch_internals import flex_attention
from gossamer.sparsity.attention.masked_attention import LARGEST_HEAD, TYPES, attention_kernel
from gossamer.sparsity.attention.tile_table import TileTable


class FlexAttention:
    """FlexAttention on CPUs takes the schedule `blocks`."""

    name: ClassVar[str] = "flex-attention"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """A decision for each."""
        if context.options.schedule == "reference":
            return []
        found = [node for node in graph.nodes if node.target is flex_attention and node.args[0].meta["val"].is_cpu]
        decisions = [_replace(node, context) for node in found]
        if any(decision.sparse for decision in decisions):
            graph.eliminate_dead_code()
        return decisions


def _replace(node: fx.Node, context: GraphContext) -> Decision:
    q, k = (argument.meta["val"] for argument in node.args[:2])  # type: ignore[union-attr]
    size = tuple(hint(n) or 0 for n in (q.shape[2], k.shape[2]))

    kernels: list[str] = []

    def decision(sparse: bool, reason: str, table: TileTable | None = None) -> Decision:
        kind = f"{TILE_QUERIES}x{TILE_KEYS} tiles" if sparse else None
        share, picture = (1.0, "") if table is None else (table.share(size[1]), table.picture(size[1]))
        schedule = "blocks" if sparse else None
        return Decision(
            node.name, "attention", size, share, kind, schedule, sparse, reason, None, picture=picture, kernels=tuple(kernels)
        )

    try:
        used = _only_output(node)
        mask, leaves, numbers = _flex_mask(node, context)
        scale = float(node.args[5])  # type: ignore[arg-type]
        kernels.append(attention_kernel("forward", q.shape[3], scale, mask.score).key)
    except Refused as problem:
        return decision(False, str(problem))
    except CompileError:
        if context.options.strict:
            raise
        return decision(False, FAILED)
    shared = mask.shared(key := mask.key)
    ours = Emitter(used)(attend_flex, *node.args[:3], leaves, numbers, scale, key)
    used.replace_all_uses_with(ours)
    given = context.inputs.given_now(leaves, numbers, (q, k))
    table = None if given is None else shared.table(given, (), q, k)
    return decision(True, "the tiles that its mask leaves are found when what it is computed from is new", table)


def _only_output(node: fx.Node) -> fx.Node:
    """The node of the weighted values, if nothing else of the result is used."""
    used = [user for user in node.users if user.users]
    if len(used) != 1 or used[0].args[1] != 0:
        raise Refused("its statistics are used")
    return used[0]


def _flex_mask(node: fx.Node, context: GraphContext) -> tuple[FlexMask, list[fx.Node], list[fx.Node]]:
    """What it does with scores, and what that is computed from. Raises Refused."""
    arguments: Any = node.args
    q, k, v, score, blocks, scale, _options, of_score, of_mask, *_ = arguments
    _check_sizes(*(argument.meta["val"] for argument in (q, k, v)))
    *_, query_block, key_block, mask = blocks
    lists = blocks[2:6]
    if any(isinstance(number, fx.Node) for number in (query_block, key_block, scale)):
        raise Refused("its scale or the size of its blocks is not fixed")
    if query_block % TILE_QUERIES or key_block % TILE_KEYS:
        raise Refused(f"its blocks of {query_block}x{key_block} are none of whole tiles")
    module: Any = node.graph.owning_module
    function = score_function(getattr(module, score.target))
    visible = function_of_places(getattr(module, mask.target))
    sees, mask_buffers = _with(visible, list(of_mask), function, list(of_score))
    buffers = [*mask_buffers, *(of_score if function.added is not None else ())]
    places = [*lists, *buffers]
    if any(place is not None and not isinstance(place, fx.Node) for place in places):
        raise Refused("its functions take numbers that are no tensors")
    inputs = {each for each in node.graph.nodes if each.op == "placeholder"}
    behind = ancestors([place for place in places if place is not None], lambda each: each in inputs)
    if not computed_from(node.graph, inputs, of_several=True).issuperset(behind):
        raise Refused("what its functions read is computed with chance, or in place")
    own = set(ancestors([q, k, v], lambda each: each in inputs))
    if any(each in own and each in inputs and each.meta["val"].is_floating_point() for each in behind):
        raise Refused("what its functions read is computed with activations")
    expression = cut(places, inputs)
    compared: Compared = "all" if context.options.verify == "full" else "uncounted"
    block = query_block, key_block
    made = FlexMask(
        expression.evaluate, len(mask_buffers), sees, function.added, function.hides, function.steps, block, compared
    )
    return made, list(expression.leaves), list(expression.numbers)


def _check_sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if not (q.dtype in TYPES and q.dtype == k.dtype == v.dtype):
        raise Refused(f"it is of {q.dtype}")
    if not (isinstance(q.shape[3], int) and 0 < q.shape[3] <= LARGEST_HEAD and equal_sizes(q.shape[3:], v.shape[3:])):
        raise Refused(f"heads of {q.shape[3]} elements, and values of {v.shape[3]}")
    if not equal_sizes(q.shape[:1], k.shape[:1]):
        raise Refused("a batch shares keys")


def _with(
    mask: fx.GraphModule, buffers: list[Any], function: ScoreFunction, more: list[Any]
) -> tuple[fx.GraphModule, list[Any]]:
    """The mask, and what the function of a score hides."""
    if function.sees is None:
        return mask, buffers
    graph = fx.Graph()
    places = [graph.placeholder(name) for name in "bhqk"]
    own, of_score = (
        [graph.placeholder(f"{name}{i}") for i in range(len(given))] for name, given in (("m", buffers), ("s", more))
    )
    parts = []
    for part, given in ((mask, own), (function.sees, of_score)):
        copies = dict(zip((n for n in part.graph.nodes if n.op == "placeholder"), [*places, *given], strict=True))
        parts.append(graph.graph_copy(part.graph, copies))
    graph.output(graph.call_function(torch.bitwise_and, tuple(parts)))
    return fx.GraphModule({}, graph), [*buffers, *more]
