"""Finds attention that a chain can compute: heads are cut out of matrices, attend, and are put together again.

    %q  = permute(view(%mq, [B, S, H, D]), [0, 2, 1, 3])       likewise %k and %v; %mq is [.., H D], or a slice of columns
    %k  = view(clone(expand(unsqueeze(%k', 2), ...)), ...)     fewer heads of keys and values, repeated (layout.py)
    %qn = %w * %q * rsqrt(mean(%q ** 2) + 1e-6)                each head over its norm (head_norm.py)
    %qr = %qn * %cos + cat([-%qn[D/2:], %qn[:D/2]]) * %sin     rotated by position (rotary.py)
    %a  = getitem(scaled_dot_product(%qr, %k, %v, attn_mask=%mask, scale=0.125), 0), or gossamer::attend_masked with a soft cap
    %y  = view(permute(%a, [0, 2, 1, 3]), [B, S, H D])

One `Attention` stands for all these nodes: a function of three matrices with one row for each token. Their rows come sequence
by sequence, [B, S], or position by position, [S, B], as in layers with batch_first=False. find_chains.py makes stages of it.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import torch
from torch import fx

from gossamer.backend.chains.head_norm import find_head_norm
from gossamer.backend.chains.heads import ROLES, Heads, PerHead, cut_from, matrix_behind, row_strides
from gossamer.backend.chains.masks import Constants, FirstAlike, hides_later_keys, is_causal, same_for_queries
from gossamer.backend.chains.rotary import find_rotation
from gossamer.backend.graph.attention_calls import AttentionCall, calls
from gossamer.backend.graph.layout import Layout, follow, is_view, path, spans
from gossamer.backend.graph.nodes import Size, equal, only_user


@dataclass(frozen=True)
class Attention:
    """Attention on matrices [T, columns] of T = sequences x length tokens.

    call         the call of scaled dot-product attention in the graph
    operands     heads of queries, keys and values
    per_head     norms and rotations of queries and keys, if any
    sizes        batch and length: numbers, or nodes that compute them
    mask         added to the scores: [B or 1, any, S or 1, S], the same for all heads, or [S, S]
    output       the node with the heads side by side
    by_position  whether the rows of `output` come position by position
    members      the nodes between the matrices and `output`, which is one of them
    """

    operation: ClassVar[str] = "attend"

    call: AttentionCall
    operands: tuple[Heads, ...]
    per_head: tuple[PerHead, ...]
    sizes: tuple[Any, Any]
    causal: bool
    mask: fx.Node | None
    output: fx.Node
    by_position: bool
    members: tuple[fx.Node, ...]

    @property
    def node(self) -> fx.Node:
        """The node of the call."""
        return self.call.node

    @cached_property
    def key_mask(self) -> bool:
        """Whether the mask is the same for all queries of a sequence."""
        return self.mask is not None and same_for_queries(self.mask)

    @property
    def numbers(self) -> dict[str, Any]:
        """The attributes of `kernel.attend`, by name."""
        q, k, _ = self.operands
        sizes = {"heads": q.count, "kv_heads": k.count, "head_size": self.call.values[0].shape[3]}
        scores = {"scale": self.call.scale, "cap": self.call.cap or 0.0, "causal": self.causal, "key_mask": self.key_mask}
        return {**sizes, **scores, "offsets": tuple(operand.offset for operand in self.operands)}

    @property
    def outside(self) -> list[fx.Node]:
        """What it reads besides matrices of tokens: masks (also one that is not needed), tables, and weights of norms."""
        found = [mask for mask in (self.call.mask, self.mask) if mask is not None]
        for step in self.per_head:
            found += [extra.node for extra in step.extras]
        return found


def find_attention(graph: fx.Graph) -> list[Attention]:
    """Returns all attention of the graph that a chain can compute."""
    constants, first = Constants(graph), FirstAlike()
    return [found for call in calls(graph) if (found := _match(call, constants, first)) is not None]


def _match(call: AttentionCall, constants: Constants, first: FirstAlike) -> Attention | None:
    (q, k, _), joined = call.values, _joined(call.node)
    found = [source for operand in call.operands if (source := _heads_of(operand)) is not None]
    alike = equal(q.shape[2], k.shape[2]) and isinstance(q.shape[3], int)
    if call.dropout or not alike or joined is None or len(found) < 3:
        return None
    before = dict.fromkeys(n for _, _, nodes in found for n in nodes)
    sizes = _spelled(q.shape[0], before), _spelled(q.shape[2], before)
    operands = tuple(heads for heads, _, _ in found)
    if None in sizes or operands[0].count != q.shape[1] or operands[1].count != operands[2].count:
        return None
    mask, causal = call.mask, bool(call.causal)
    if mask is not None and not _readable(mask, q):
        return None
    if mask is not None and is_causal(constants.of(mask)):
        mask, causal = None, True
    if mask is not None:
        mask = first.of(mask)
        causal = causal or hides_later_keys(mask, constants)
    output, by_position, after = joined
    return Attention(
        call,
        operands,
        tuple(step for _, steps, _ in found for step in steps),
        sizes,
        causal=causal,
        mask=mask,
        output=output,
        by_position=by_position,
        members=(*before, call.node, *after),
    )


def _heads_of(node: fx.Node) -> tuple[Heads, list[PerHead], list[fx.Node]] | None:
    """Returns the heads that a node [B, H, S, D] was cut from, the norm and rotation on the way, and the nodes passed."""
    source = path(node)[0]
    rotation = find_rotation(source)
    norm = rotation.norm if rotation is not None else find_head_norm(source)
    steps: list[PerHead] = [step for step in (norm, rotation) if step is not None]
    cut = cut_from(steps[-1], node, ROLES[0]) if steps else matrix_behind(node, ROLES[0])
    return None if cut is None else (cut[0], steps, [*(n for step in steps for n in step.members), *cut[1]])


def _joined(node: fx.Node) -> tuple[fx.Node, bool, list[fx.Node]] | None:
    """Returns the node that has the heads of each token side by side; None if there is none.

    Also returns whether its rows come position by position, and the nodes from the result of attention to it.
    """
    result = only_user(node)
    if result is None or result.args[1] != 0:
        return None
    nodes = [result]
    while (user := only_user(nodes[-1])) is not None and is_view(user):
        nodes.append(user)
    batch, heads, length, size = nodes[0].meta["val"].shape
    width = heads * size
    for by_position in (False, True):
        outer, inner = row_strides(batch, length, width, by_position)
        layout: Layout | None = Layout.strided((batch, heads, length, size), (outer, size, inner, 1))
        last = 0
        for number, view in enumerate(nodes[1:], 1):
            layout = follow(layout, [view])
            if layout is None:
                break
            if _is_matrix(layout, view.meta["val"].shape, width):
                last = number
        if last:
            return nodes[last], by_position, nodes[: last + 1]
    return None


def _is_matrix(layout: Layout, shape: torch.Size, width: Size) -> bool:
    """Whether a value has the elements of a matrix with `width` columns in order."""
    everything = tuple(axis for dim in layout.dims for axis in dim)
    return len(shape) in (2, 3) and spans(layout.dims[-1], width, 1) and spans(everything, prod(shape), 1)


def _spelled(size: Size, nodes: Any) -> Any:
    """Returns a size, or the node among the arguments of `nodes` that computes it; None if there is no such node."""
    if isinstance(size, int):
        return size
    for node in nodes:
        for argument in node.all_input_nodes:
            value = argument.meta.get("val")
            if isinstance(value, torch.SymInt) and equal(value, size):
                return argument
    return None


def _readable(mask: fx.Node, q: torch.Tensor) -> bool:
    """Whether a mask of floats is [S, S], or [B or 1, 1, S or 1, S], perhaps repeated for all heads."""
    value = mask.meta["val"]
    if value.dim() not in (2, 4) or not value.is_floating_point():
        return False
    batch, _, length, _ = q.shape
    if value.dim() == 2:
        return all(equal(size, length) for size in value.shape)
    return (
        (equal(value.shape[0], batch) or equal(value.shape[0], 1))
        and (equal(value.shape[1], 1) or _repeats(mask))
        and (equal(value.shape[2], length) or equal(value.shape[2], 1))
        and equal(value.shape[3], length)
    )


def _repeats(mask: fx.Node) -> bool:
    """Whether a mask was expanded to all heads."""
    nodes = path(mask)
    layout = follow(Layout.contiguous(tuple(nodes[0].meta["val"].shape)), nodes[1:])
    return layout is not None and all(equal(axis.stride, 0) for axis in layout.dims[1])
