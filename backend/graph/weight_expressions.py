"""Weight expressions: sub-graphs computed from static inputs alone.

A masked weight is not a tensor anyone holds; it is `mul(weight, mask)` in the graph. Here such an expression is cut out
as a small FX graph of its own, evaluated once on the real values to see its zeros, and kept so that it can be evaluated
again when one of its leaves changes.

    %t = permute(mul(%weight, %mask), [1, 0])   →   evaluator(weight, mask) = mul(weight, mask), transposed
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from gossamer.backend.graph.zero_pattern import Pattern
from gossamer.runtime.torch_internals import OpOverload
from gossamer.runtime.weight_store import only_reading

aten = torch.ops.aten


@dataclass(frozen=True)
class Weight:
    """A matrix that depends on static inputs only.

    leaves      the placeholders and constants it is computed from, in the order `evaluate` takes their values
    main        the leaf that gives the weight its name: a parameter if there is one, the largest
    evaluate    leaf values → the matrix as it is stored, rows first
    transposed  whether the graph uses the transpose of the stored matrix
    key         content hash of the expression and of its leaves' types
    pattern     where its nonzeros lie, at compile time
    """

    leaves: tuple[fx.Node, ...]
    main: fx.Node
    evaluate: Callable[..., torch.Tensor]
    transposed: bool
    key: str
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    pattern: Pattern

    @property
    def density(self) -> float:
        """Share of its elements that are not zero."""
        return self.pattern.density


def static_nodes(graph: fx.Graph, leaves: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes of `graph` that are computed from `leaves` alone, by operations without side effects or chance."""
    found = set(leaves)
    for node in graph.nodes:
        if _is_pure_tensor_op(node) and all(n in found or _fixed_size(n) is not None for n in node.all_input_nodes):
            found.add(node)
    return found


def cut(operand: fx.Node, leaf_values: dict[fx.Node, torch.Tensor]) -> Weight | None:
    """The weight behind a matrix operand whose node is static.

    `leaf_values` holds the real value of every static leaf. A batch of equal matrices counts as one; None for anything
    that is not a matrix, or whose evaluation fails.
    """
    graph, leaves = _copy(operand, leaf_values)
    if not leaves:
        return None
    evaluate = fx.GraphModule({}, graph)
    values = [leaf_values[leaf] for leaf in leaves]
    try:
        value = run(evaluate, values)
    except RuntimeError:
        return None
    output = graph.output_node()
    node = output.args[0]
    with graph.inserting_before(output):
        while value.dim() > 2 and (value.shape[0] == 1 or value.stride(0) == 0):
            node, value = graph.call_function(aten.select.int, (node, 0, 0)), value[0]
        if value.dim() != 2:
            return None
        transposed = value.stride(0) == 1 and value.stride(1) >= max(2, value.shape[0])
        if transposed:
            node, value = graph.call_function(aten.permute.default, (node, [1, 0])), value.t()
    output.args = (node,)
    evaluate.recompile()
    types = [(tuple(v.shape), v.stride(), v.dtype) for v in values]
    key = hashlib.sha256(f"{evaluate.code}{types}".encode()).hexdigest()[:16]
    main = max(leaves, key=lambda n: _prominence(leaf_values[n]))
    shape = (value.shape[0], value.shape[1])
    return Weight(tuple(leaves), main, evaluate, transposed, key, shape, value.dtype, value.device, Pattern.of(value))


def run(evaluate: Callable[..., torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Evaluates a weight expression on real values, out of reach of autograd and autocast."""
    with torch.no_grad(), torch.autocast(values[0].device.type, enabled=False), only_reading():
        return evaluate(*values)


def _copy(operand: fx.Node, leaf_values: dict[fx.Node, torch.Tensor]) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    leaves: list[fx.Node] = []
    copies: dict[fx.Node, fx.Node] = {}
    order = _ancestors(operand, leaf_values)
    for node in (n for n in order if n in leaf_values):
        copies[node] = graph.placeholder(f"leaf{len(leaves)}")
        leaves.append(node)
    for node in (n for n in order if n not in leaf_values):
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: copies[n] if n in copies else _fixed_size(n))
        copies[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    graph.output(copies[operand])
    return graph, leaves


def _ancestors(node: fx.Node, leaves: dict[fx.Node, torch.Tensor]) -> list[fx.Node]:
    """`node` and all it is computed from, producers first."""
    seen: dict[fx.Node, None] = {}
    stack = [(node, False)]
    while stack:
        current, done = stack.pop()
        if done:
            seen[current] = None
        elif current not in seen:
            stack.append((current, True))
            if current not in leaves:
                stack += [(n, False) for n in reversed(current.all_input_nodes) if _fixed_size(n) is None]
    return list(seen)


def _is_pure_tensor_op(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and not node.target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in node.target.tags
        and isinstance(node.meta.get("val"), torch.Tensor)
    )


def _fixed_size(node: fx.Node) -> int | None:
    """The value of a symbolic size that guards have fixed."""
    value = node.meta.get("val")
    return value.node.maybe_as_int() if isinstance(value, torch.SymInt) else None


def _prominence(leaf: torch.Tensor) -> tuple[bool, bool, int]:
    return isinstance(leaf, torch.nn.Parameter), leaf.is_floating_point(), leaf.numel()
