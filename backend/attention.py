"""Scaled dot-product attention in a graph: heads cut out of matrices, and put together again.

    %q  = permute(view(%mq, [B, S, H, D]), [0, 2, 1, 3])       likewise %k and %v; %mq is [.., H D], or a slice of columns
    %a  = getitem(scaled_dot_product(%q, %k, %v, attn_mask=%mask, scale=0.125), 0)
    %y  = view(permute(%a, [0, 2, 1, 3]), [B, S, H D])

An `Attention` is all of it: a function of three matrices with a token a row, B sequences of S one after the other.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from gossamer.backend.elementwise import VIEWS

aten = torch.ops.aten

_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
_COPIES = (aten.clone.default, aten.alias.default)


@dataclass(frozen=True)
class Attention:
    """Attention on matrices [T, columns] of T = sequences x length tokens.

    operands  the matrices of q, k and v, with the column at which the first head begins
    sizes     batch and length as the graph spells them: numbers or nodes
    mask      added to the scores: [B or 1, 1, S or 1, S]
    output    the node with the heads side by side
    members   the nodes from heads to output
    """

    node: fx.Node
    operands: tuple[tuple[fx.Node, int], ...]
    sizes: tuple[Any, Any]
    heads: int
    kv_heads: int
    head_size: int
    scale: float
    causal: bool
    mask: fx.Node | None
    output: fx.Node
    members: tuple[fx.Node, ...]

    @property
    def key_mask(self) -> bool:
        """Whether the mask is the same for all queries of a sequence."""
        return self.mask is not None and statically_known_true(self.mask.meta["val"].shape[2] == 1)


def find_attention(graph: fx.Graph) -> list[Attention]:
    """All attention of the graph that can be computed on matrices."""
    return [found for node in graph.nodes if node.target is _ATTENTION and (found := _match(node)) is not None]


def _match(node: fx.Node) -> Attention | None:
    q = node.args[0].meta["val"]  # type: ignore[union-attr]
    k = node.args[1].meta["val"]  # type: ignore[union-attr]
    dropout = node.args[3] if len(node.args) > 3 else node.kwargs.get("dropout_p", 0.0)
    causal = node.args[4] if len(node.args) > 4 else node.kwargs.get("is_causal", False)
    mask, scale = node.kwargs.get("attn_mask"), node.kwargs.get("scale")
    if dropout != 0 or not statically_known_true(q.shape[2] == k.shape[2]) or not isinstance(q.shape[3], int):
        return None
    sources = [_heads_of(argument) for argument in node.args[:3]]  # type: ignore[arg-type]
    joined = _joined(node)
    if joined is None or any(s is None for s in sources) or not (mask is None or _readable(mask, q)):  # type: ignore[arg-type]
        return None
    output, after = joined
    found = [s for s in sources if s is not None]
    before = dict.fromkeys(n for _, _, _, nodes in found for n in nodes)
    return Attention(
        node,
        tuple((matrix, offset) for matrix, offset, _, _ in found),
        found[0][2],
        q.shape[1],
        k.shape[1],
        q.shape[3],
        float(scale) if scale is not None else q.shape[3] ** -0.5,  # type: ignore[arg-type]
        bool(causal),
        mask,  # type: ignore[arg-type]
        output,
        (*before, node, *after),
    )


def _heads_of(node: fx.Node) -> tuple[fx.Node, int, tuple[Any, Any], list[fx.Node]] | None:
    """The matrix that [B, H, S, D] was cut from, its first column, batch and length, and the nodes in between."""
    nodes: list[fx.Node] = []
    while node.target in _COPIES:
        nodes.append(node)
        node = node.all_input_nodes[0]
    if not _swaps_heads(node):
        return None
    view = node.args[0]
    assert isinstance(view, fx.Node)
    if view.target not in VIEWS or view.meta["val"].dim() != 4:
        return None
    matrix, offset, between = view.args[0], 0, [node, view]
    assert isinstance(matrix, fx.Node)
    _, _, heads, size = view.meta["val"].shape
    width = matrix.meta["val"].shape[-1]
    if not (isinstance(heads, int) and isinstance(width, int) and heads * size == width):
        return None
    part = _columns(matrix)
    if part is not None:
        between += [matrix] if matrix.target is aten.slice.Tensor else [matrix, matrix.args[0]]  # type: ignore[list-item]
        matrix, offset = part
    written: Any = view.args[1]
    sizes = [known if isinstance(known, int) else given for known, given in zip(view.meta["val"].shape, written, strict=True)]
    if -1 in sizes[:2]:
        return None  # a batch that only the view knows could not be spelled for the mask
    return matrix, offset, (sizes[0], sizes[1]), nodes + between


def _columns(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The matrix and the first column of a slice or a split of its columns."""
    if node.target is aten.slice.Tensor:
        arguments: Any = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
        source, dim, start, _, step = arguments
        if dim in (-1, source.meta["val"].dim() - 1) and isinstance(start, int) and start >= 0 and step == 1:
            return source, start
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        split, number = node.args[0], node.args[1]
        if split.target in (aten.split_with_sizes.default, aten.split.Tensor):
            whole: Any = split.args[0]
            along = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
            if along in (-1, whole.meta["val"].dim() - 1):
                widths = [part.shape[-1] for part in split.meta["val"]]
                return whole, sum(widths[: int(number)])  # type: ignore[arg-type]
    return None


def _joined(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The node in which the heads lie side by side again, and the nodes up to it."""
    users = [user for user in node.users if user.target is operator.getitem]
    if len(users) != 1 or len(node.users) != 1 or users[0].args[1] != 0:
        return None
    nodes = [users[0]]
    swapped = False
    while len(nodes[-1].users) == 1:
        last = nodes[-1]
        user = next(iter(last.users))
        same = isinstance(user.meta.get("val"), torch.Tensor) and _same_shape(user, last)
        if not swapped and _swaps_heads(user):
            swapped = True
        elif user.target in VIEWS and swapped and not same:
            value, heads = user.meta["val"], last.meta["val"]
            joins = value.dim() in (2, 3) and statically_known_true(value.shape[-1] == heads.shape[2] * heads.shape[3])
            return (user, [*nodes, user]) if joins else None
        elif not (user.target in _COPIES or (user.target in VIEWS and same)):
            return None
        nodes.append(user)
    return None


def _swaps_heads(node: fx.Node) -> bool:
    """Whether a node turns [B, S, H, D] into [B, H, S, D] or back."""
    if node.target is aten.permute.default:
        return list(node.args[1]) == [0, 2, 1, 3]  # type: ignore[arg-type]
    return node.target is aten.transpose.int and set(node.args[1:]) == {1, 2}


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"].shape, b.meta["val"].shape
    return len(x) == len(y) and all(statically_known_true(p == q) for p, q in zip(x, y, strict=True))


def _readable(mask: fx.Node, q: torch.Tensor) -> bool:
    """Whether a mask is [B or 1, 1, S, S] or [B or 1, 1, 1, S] of floats."""
    value = mask.meta["val"]
    if value.dim() != 4 or not value.is_floating_point() or not statically_known_true(value.shape[1] == 1):
        return False
    batch, _, length, _ = q.shape
    return (
        (statically_known_true(value.shape[0] == batch) or statically_known_true(value.shape[0] == 1))
        and (statically_known_true(value.shape[2] == length) or statically_known_true(value.shape[2] == 1))
        and statically_known_true(value.shape[3] == length)
    )
