"""Regions: a contraction and the elementwise work that follows it, cut out of the graph as a function on matrices.

    %mm = addmm(%bias, view(%x), permute(%w))         region(x, w, e0, e1):        [T, K], [M, K], [M], [T, M]
    %v  = view(%mm, [B, S, M])                   →      0 = mm(x, permute(w))
    %g  = gelu(%v)                                      1 = add(0, e0)
    %y  = add(%g, %residual)                            2 = gelu(1);  return add(2, e1)

The largest sub-graph with one output is taken: nothing inside it but its output is used elsewhere. T is always dynamic,
so that one kernel serves every number of tokens.
"""

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from gossamer.backend.contractions import Contraction
from gossamer.backend.detect import DTYPES
from gossamer.backend.elementwise import Kind, constant_of, is_elementwise, is_identity, kind_of

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class Extra:
    """A tensor from outside that the epilogue reads: one number, one number a column, or one an element."""

    node: fx.Node
    kind: Kind


@dataclass(frozen=True)
class Region:
    """A function cut out of a graph, and what it replaces.

    body     (x [T, K], w as stored, *extras) → [T, M]; each node's meta["val"] is a fake tensor with T symbolic
    extras   the values of the large graph that `body` takes after x and w
    members  the nodes of the large graph that it computes; `output` is the only one that others use
    """

    contraction: Contraction
    body: fx.GraphModule
    extras: tuple[Extra, ...]
    members: tuple[fx.Node, ...]
    output: fx.Node

    @property
    def fused(self) -> int:
        """Number of elementwise operations in the epilogue."""
        product = (aten.permute.default, aten.mm.default, aten.full.default)
        return sum(n.op == "call_function" and n.target not in product for n in self.body.graph.nodes)


def grow(contraction: Contraction, claimed: Container[fx.Node]) -> Region:
    """The largest region around a contraction that leaves the `claimed` nodes of other regions alone."""
    members = _members(contraction, claimed)
    builder = _Builder(contraction)
    for node in members[1:]:
        builder.append(node)
    return Region(contraction, builder.finish(members[-1]), tuple(builder.extras), tuple(members), members[-1])


def _members(contraction: Contraction, claimed: Container[fx.Node]) -> list[fx.Node]:
    """The nodes of the region, in order; the last is its output.

    Every fusable node after the contraction knows its ancestors up to it. The last node all of whose ancestors are
    used by each other only is the output.
    """
    start = contraction.node
    if contraction.side == "left":
        return [start]
    ancestors: dict[fx.Node, set[fx.Node]] = {start: {start}}
    best, pending, node = start, set(start.users), start
    while pending:
        node = node.next
        if node not in pending:
            continue
        pending.discard(node)
        if node in claimed or not _fusable(node, contraction, ancestors):
            continue
        ancestors[node] = {node}.union(*(ancestors[n] for n in node.all_input_nodes if n in ancestors))
        pending.update(node.users)
        inside = ancestors[node]
        closed = all(user in inside for n in inside if n is not node for user in n.users)
        if closed and node.meta["val"].dtype in DTYPES:
            best = node
    order = {n: i for i, n in enumerate(start.graph.nodes)} if best is not start else {start: 0}
    return sorted(ancestors[best], key=order.__getitem__)


def _fusable(node: fx.Node, contraction: Contraction, region: Container[fx.Node]) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in (*DTYPES, torch.bool):
        return False
    if is_identity(node):
        return True
    if not is_elementwise(node) or _phase(node) != _phase(contraction.node):
        return False
    for operand in node.all_input_nodes:
        if operand in region:
            if kind_of(operand, value.shape) != "matrix":
                return False
        elif constant_of(operand) is None and (
            kind_of(operand, value.shape) is None or operand.meta["val"].dtype not in DTYPES
        ):
            return False
    return True


def _phase(node: fx.Node) -> tuple[Any, Any]:
    """What the partitioner goes by when it splits forward from backward; a region must not straddle it."""
    return node.meta.get("partitioner_tag"), bool(node.meta.get("autograd_backward"))


class _Builder:
    """Builds a region's body, node by node."""

    def __init__(self, contraction: Contraction) -> None:
        weight, x = contraction.weight, contraction.x.meta["val"]
        self.graph = fx.Graph()
        self.extras: list[Extra] = []
        self._mode = FakeTensorMode(shape_env=ShapeEnv())
        self._m = contraction.m
        any_rows = torch.empty(8, contraction.k, dtype=x.dtype)
        rows_dynamic: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
        fake_x = self._mode.from_tensor(any_rows, symbolic_context=rows_dynamic)
        self._rows = fake_x.shape[0]
        x_node = self._placeholder("x", fake_x)
        w_node = self._placeholder("w", self._empty(weight.shape, weight.dtype))
        needs_transpose = weight.transposed == (contraction.side == "right")
        factor = self._call(aten.permute.default, (w_node, [1, 0])) if needs_transpose else w_node
        y = self._call(aten.mm.default, (x_node, factor))
        self._copies: dict[fx.Node, fx.Node] = {}
        if contraction.alpha != 1:
            y = self._call(aten.mul.Tensor, (y, contraction.alpha))
        if contraction.addend is not None:
            addend = self._operand(contraction.addend, contraction.node.meta["val"].shape)
            y = self._call(aten.add.Tensor, (y, addend), {"alpha": contraction.beta} if contraction.beta != 1 else {})
        self._copies[contraction.node] = y

    def append(self, node: fx.Node) -> None:
        """Adds the copy of a fusable node of the large graph; views vanish, since all is [T, M] here."""
        if is_identity(node):
            self._copies[node] = self._copies[node.args[0]]  # type: ignore[index]
            return
        shape = node.meta["val"].shape
        args: Any
        kwargs: Any
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: self._operand(n, shape))
        target: Any = node.target
        if target is aten.pow.Tensor_Scalar:
            base, exponent = args
            result = base
            for _ in range(int(exponent) - 1):
                result = self._call(aten.mul.Tensor, (result, base))
            self._copies[node] = result
        elif target is aten.gelu.default and kwargs.get("approximate") == "tanh":
            self._copies[node] = self._tanh_gelu(args[0])
        elif target is aten._to_copy.default:
            self._copies[node] = self._call(prims.convert_element_type.default, (args[0], kwargs["dtype"]))
        else:
            self._copies[node] = self._call(target, args, kwargs)

    def _tanh_gelu(self, x: fx.Node) -> fx.Node:
        """x / 2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); torch-mlir's own has sqrt(2/pi) to three digits only."""
        mul, add = aten.mul.Tensor, aten.add.Tensor
        cube = self._call(mul, (self._call(mul, (x, x)), x))
        inner = self._call(add, (x, self._call(mul, (cube, 0.044715))))
        tanh = self._call(aten.tanh.default, (self._call(mul, (inner, math.sqrt(2 / math.pi))),))
        return self._call(mul, (self._call(mul, (x, 0.5)), self._call(add, (tanh, 1.0))))

    def finish(self, output: fx.Node) -> fx.GraphModule:
        """The body that returns the copy of `output`."""
        self.graph.output(self._copies[output])
        return fx.GraphModule({}, self.graph, "Region")

    def _operand(self, node: fx.Node, shape: torch.Size) -> fx.Node:
        if node in self._copies:
            return self._copies[node]
        value = node.meta["val"]
        constant = constant_of(node)
        if constant is not None:
            self._copies[node] = self._call(aten.full.default, ([], constant), {"dtype": value.dtype})
            return self._copies[node]
        kind = kind_of(node, shape)
        assert kind is not None, f"{node} is no operand of a region"
        size = {"scalar": (), "vector": (self._m,), "matrix": (self._rows, self._m)}[kind]
        self._copies[node] = self._placeholder(f"e{len(self.extras)}", self._empty(size, value.dtype))
        self.extras.append(Extra(node, kind))
        return self._copies[node]

    def _empty(self, size: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
        with self._mode:
            return torch.empty(size, dtype=dtype)

    def _placeholder(self, name: str, value: torch.Tensor) -> fx.Node:
        last = next((n for n in reversed(self.graph.nodes) if n.op == "placeholder"), None)
        with self.graph.inserting_after(last) if last else self.graph.inserting_before():
            node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs or {})
        with self._mode:
            values = fx.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
            node.meta["val"] = target(*values[0], **values[1])
        return node
