"""Builds bodies: copies of a part of a graph as a function on matrices, which `importer.py` imports.

    %mm = addmm(%bias, view(%x), permute(%w))         body(x, w, e0, e1):          [T, K], [M, K], [M], [T, M]
    %v  = view(%mm, [B, S, M])                   →      0 = mm(x, permute(w))
    %g  = gelu(%v)                                      1 = add(0, e0)
    %y  = add(%g, %residual)                            2 = gelu(1);  return add(2, e1)

T is always dynamic, so that one kernel serves every number of tokens. Placeholders have shape (None for T) and type in
meta["shape"] and meta["dtype"]. `with_values` adds the fake values that the importer needs.

ProductBody  begins with a contraction
GatherBody   begins with a product of a sparse tensor
RowsBody     computes operations between contractions: elementwise operations and sums of rows, such as a layer norm
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.fusable import Kind, constant_of, is_elementwise, is_identity, is_row_reduction, kind_of
from gossamer.backend.graph.nodes import arguments
from gossamer.backend.regions.contractions import Contraction
from gossamer.backend.regions.low_rank import Inner, inner_at
from gossamer.runtime.int8_product import int8_product
from gossamer.runtime.torch_internals import DimDynamic, FakeTensorMode, ShapeEnv, StatelessSymbolicContext

aten = torch.ops.aten
prims = torch.ops.prims

_BOUNDED: dict[Any, Callable[..., tuple[Any, tuple[Any, ...]]]] = {
    aten.hardtanh.default: lambda x, low=-1.0, high=1.0: (aten.clamp.default, (x, low, high)),
    aten.maximum.default: lambda x, low: (aten.clamp.Tensor, (x, low)),
    aten.minimum.default: lambda x, high: (aten.clamp.Tensor, (x, None, high)),
}
_COMPARISONS = (aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar)
_CONVERSIONS = (aten._to_copy.default, prims.convert_element_type.default)

Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class Extra:
    """A tensor from outside that a body reads.

    kind  "scalar": one number; "vector": one for each column; "column": one for each token; "matrix": one for each element;
          "factor": a dense matrix that tokens are multiplied by
    """

    node: fx.Node
    kind: Kind


class _Body:
    """Builds a body node by node. `axis` is the dimension of the features in the graph."""

    axis = -1

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.extras: list[Extra] = []
        self._copies: dict[fx.Node, fx.Node] = {}
        self._numbers: set[fx.Node] = set()  # nodes whose copies have no dimensions, though they may have some

    def append(self, node: fx.Node) -> None:
        """Adds the copy of a node of the graph. Leaves out views, because all values of a body are [T, M]."""
        if is_identity(node, self.axis):
            self.keep(node)
        elif (inner := inner_at(node)) is not None:
            self._multiply(inner)
        else:
            self._compute(node, node.meta["val"].shape)

    def _compute(self, node: fx.Node, shape: torch.Size) -> None:
        """Adds the copy of an elementwise node, whose operands broadcast to this shape."""
        args: Any
        kwargs: Any
        operands = {n: self._operand(n, shape) for n in node.all_input_nodes}
        self._promote(node, operands)
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
        target: Any = node.target
        args = self._numbers_as_torch(node, args)
        if target is aten.pow.Tensor_Scalar:
            base, exponent = args
            result = base
            for _ in range(int(exponent) - 1):
                result = self._call(aten.mul.Tensor, (result, base))
            self._copies[node] = result
        elif target is aten.gelu.default and kwargs.get("approximate") == "tanh":
            self._copies[node] = self._tanh_gelu(args[0])
        elif target in _BOUNDED:  # as clamp, because torch-mlir's lowering of these returns the bound for a NaN
            self._copies[node] = self._call(*_BOUNDED[target](*args))
        elif target in _CONVERSIONS:
            self._copies[node] = self._converted(args[0], node)
        else:
            self._copies[node] = self._call(target, args, kwargs)

    def _numbers_as_torch(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments of a node, with numbers of the types that torch gives them.

        comparisons     Torch rounds the number to the type of the other operand. torch-mlir compares in f64.
        a number first  torch-mlir would give it torch's default type.
        an integer      torch-mlir would round it to a narrow float.
        """
        dtype = node.meta["val"].dtype
        first, *others = args
        if node.target in _COMPARISONS and (given := node.all_input_nodes[0].meta["val"].dtype).is_floating_point:
            others = [torch.tensor(number, dtype=given).item() for number in others]
        elif isinstance(first, int | float):
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            first = self._call(aten.full.default, ([], first), {"dtype": wide})
        elif dtype in (torch.bfloat16, torch.float16):
            others = [float(each) if isinstance(each, int) else each for each in others]
        return (first, *others)

    def _promote(self, node: fx.Node, operands: dict[fx.Node, fx.Node]) -> None:
        """Converts operands to the type of a node, where torch's rules would give its copy another type, and for clamp.

        For these rules, a tensor without dimensions counts less than a tensor of shape [1].
        """
        wide = node.meta["val"].dtype
        others = [n for n in operands if n.meta["val"].is_floating_point() and n.meta["val"].dtype != wide]
        known = any(n.meta["val"].dtype == wide and n not in self._numbers for n in operands)
        if node.target in _CONVERSIONS or not wide.is_floating_point:
            return
        if node.target not in _BOUNDED:
            others = [] if known else [n for n in others if n not in self._numbers]
        operands.update({n: self._call(prims.convert_element_type.default, (operands[n], wide)) for n in others})

    def _multiply(self, inner: Inner) -> None:
        """Adds a product with a dense matrix."""
        x, value = self._operand(inner.x, inner.x.meta["val"].shape), inner.stored.meta["val"]
        w = self._outside(inner.stored, "factor", tuple(value.shape))
        y = self._call(aten.mm.default, (x, self._call(aten.permute.default, (w, [1, 0])) if inner.transposed else w))
        if inner.addend is not None:
            y = self._call(aten.add.Tensor, (y, self._operand(inner.addend, inner.node.meta["val"].shape)))
        self._copies[inner.node] = y

    def keep(self, node: fx.Node) -> None:
        """Adds a view or copy, whose values are those of its source."""
        source = arguments(node)[0]
        self._copies[node] = self._operand(source, source.meta["val"].shape)

    def finish(self, output: fx.Node, *others: fx.Node) -> fx.GraphModule:
        """Returns the body, which returns the copy of `output`, or of several nodes."""
        found = tuple(self._copies[node] for node in (output, *others))
        self.graph.output(found if others else found[0])
        return fx.GraphModule({}, self.graph, "Region")

    def _converted(self, x: fx.Node, node: fx.Node) -> fx.Node:
        """Converts `x` to the type of a node. Converts integers to narrow floats through f32, as torch does."""
        (source,), dtype = node.all_input_nodes, node.meta["val"].dtype
        if not source.meta["val"].is_floating_point() and dtype in (torch.bfloat16, torch.float16):
            x = self._call(prims.convert_element_type.default, (x, torch.float32))
        return self._call(prims.convert_element_type.default, (x, dtype))

    def _tanh_gelu(self, x: fx.Node) -> fx.Node:
        """x / 2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). torch-mlir's lowering has only three digits of sqrt(2/pi)."""
        mul, add = aten.mul.Tensor, aten.add.Tensor
        cube = self._call(mul, (self._call(mul, (x, x)), x))
        inner = self._call(add, (x, self._call(mul, (cube, 0.044715))))
        tanh = self._call(aten.tanh.default, (self._call(mul, (inner, math.sqrt(2 / math.pi))),))
        return self._call(mul, (self._call(mul, (x, 0.5)), self._call(add, (tanh, 1.0))))

    def _operand(self, node: fx.Node, shape: torch.Size) -> fx.Node:
        if node in self._copies:
            return self._copies[node]
        value = node.meta["val"]
        constant = constant_of(node)
        if constant is not None:
            self._copies[node] = self._call(aten.full.default, ([], constant), {"dtype": value.dtype})
            self._numbers.add(node)
            return self._copies[node]
        kind = kind_of(node, shape, self.axis)
        assert kind is not None, f"{node} is no operand of a region"
        if kind == "scalar":
            self._numbers.add(node)
        if kind == "scalar" and _of_scalars(node, shape):
            self._compute(node, shape)  # faster than a separate kernel call for one number
            return self._copies[node]
        width = shape[self.axis] if kind in ("vector", "matrix") else 1
        shapes: dict[str, Shape] = {"scalar": (), "vector": (width,), "column": (None, 1), "matrix": (None, width)}
        return self._outside(node, kind, shapes[kind])

    def _outside(self, node: fx.Node, kind: Kind, shape: Shape) -> fx.Node:
        """Returns the placeholder for a tensor from outside. Adds it if necessary."""
        if node not in self._copies:
            self._copies[node] = self._placeholder(f"e{len(self.extras)}", shape, node.meta["val"].dtype)
            self.extras.append(Extra(node, kind))
        return self._copies[node]

    def _placeholder(self, name: str, shape: Shape, dtype: torch.dtype) -> fx.Node:
        last = next((n for n in reversed(self.graph.nodes) if n.op == "placeholder"), None)
        with self.graph.inserting_after(last) if last else self.graph.inserting_before():
            node = self.graph.placeholder(name)
        node.meta.update(shape=shape, dtype=dtype)
        return node

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        return self.graph.call_function(target, args, kwargs or {})


def _of_scalars(node: fx.Node, shape: torch.Size) -> bool:
    """Whether an operand is a number that an elementwise operation computes from other readable numbers."""

    def readable(operand: fx.Node) -> bool:
        own, given = node.meta["val"], operand.meta["val"]
        number = constant_of(operand) is not None or (kind_of(operand, shape) == "scalar" and given.device == own.device)
        return number and given.dtype == own.dtype

    return is_elementwise(node) and all(readable(operand) for operand in node.all_input_nodes)


class ProductBody(_Body):
    """(x [T, K], w as stored, *extras) → [T, M], to which elementwise nodes are appended."""

    def __init__(self, contraction: Contraction) -> None:
        super().__init__()
        self.axis = contraction.axis
        weight = contraction.weight
        x_node = self._placeholder("x", (None, contraction.k), contraction.x.meta["val"].dtype)
        w_node = self._placeholder("w", weight.shape, weight.dtype)
        needs_transpose = weight.transposed == (contraction.side == "right")
        wanted = torch.int32 if contraction.quantized else contraction.given
        x_node, stored = (
            node if dtype == wanted else self._call(prims.convert_element_type.default, (node, wanted))
            for node, dtype in ((x_node, contraction.given), (w_node, weight.dtype))
        )
        factor = self._call(aten.permute.default, (stored, [1, 0])) if needs_transpose else stored
        y = self._call(aten.mm.default, (x_node, factor))
        if contraction.alpha != 1:
            y = self._call(aten.mul.Tensor, (y, contraction.alpha))
        if contraction.addend is not None:
            addend = self._operand(contraction.addend, contraction.node.meta["val"].shape)
            y = self._call(aten.add.Tensor, (y, addend), {"alpha": contraction.beta} if contraction.beta != 1 else {})
        self._copies[contraction.node] = y


class GatherBody(_Body):
    """(a [T, K] sparse, x [K, N], *extras) → [T, N], a @ x, to which elementwise nodes are appended; K is any size, as T is."""

    def __init__(self, product: fx.Node) -> None:
        super().__init__()
        value = product.meta["val"]
        a, x = (self._placeholder(name, (None, size), value.dtype) for name, size in (("a", None), ("x", value.shape[1])))
        self._copies[product] = self._call(aten.mm.default, (a, x))


class RowsBody(_Body):
    """(*extras) → [T, N]: elementwise nodes, and sums, means, variances, maxima and minima along the last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self._tuples: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._given = torch.float32  # type of the rows that are reduced

    def append(self, node: fx.Node) -> None:
        """Adds the copy of a node. Decomposes means, variances and layer norms into sums, in f32 for narrow floats."""
        if node.target is operator.getitem:
            source, number = arguments(node)
            if source not in self._tuples:  # another body computes its other result
                self.append(source)
            self._copies[node] = self._tuples[source][number]
        elif not is_row_reduction(node):
            super().append(node)
        else:
            source, *affine = arguments(node)
            given = source.meta["val"]
            self._given, size = given.dtype, given.shape[-1]
            x = self._wide(self._operand(source, given.shape))
            if node.target is aten.sum.dim_IntList:
                self._copies[node] = self._rounded(self._sum(x))
            elif node.target is aten.amax.default:
                self._copies[node] = self._rounded(self._greatest(x))
            elif node.target is aten.amin.default:
                negative = self._call(aten.neg.default, (self._greatest(self._call(aten.neg.default, (x,))),))
                self._copies[node] = self._rounded(negative)
            elif node.target is aten.mean.dim:
                self._copies[node] = self._rounded(self._mean(x, size))
            elif node.target is aten.var_mean.correction:
                given_correction = node.kwargs.get("correction")
                count = size - (1 if given_correction is None else given_correction)
                mean, _, mean_square = self._centred(x, size)
                variance = self._call(aten.mul.Tensor, (mean_square, size / count if count > 0 else math.inf))
                self._tuples[node] = self._rounded(variance), self._rounded(mean)
            else:
                self._tuples[node] = (self._rounded(self._layer_norm(x, size, *affine[1:])),)

    def _wide(self, x: fx.Node) -> fx.Node:
        if self._given not in (torch.bfloat16, torch.float16):
            return x
        return self._call(prims.convert_element_type.default, (x, torch.float32))

    def _rounded(self, y: fx.Node) -> fx.Node:
        if self._given not in (torch.bfloat16, torch.float16):
            return y
        return self._call(prims.convert_element_type.default, (y, self._given))

    def _sum(self, x: fx.Node) -> fx.Node:
        return self._call(aten.sum.dim_IntList, (x, [-1], True))

    def _greatest(self, x: fx.Node) -> fx.Node:
        return self._call(aten.amax.default, (x, [-1], True))

    def _mean(self, x: fx.Node, size: int) -> fx.Node:
        return self._call(aten.mul.Tensor, (self._sum(x), 1 / size))

    def _square(self, x: fx.Node) -> fx.Node:
        return self._call(aten.mul.Tensor, (x, x))

    def _centred(self, x: fx.Node, size: int) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Returns the mean of rows, their differences from it, and the mean square of these.

        A sum of many numbers is rounded often. The differences from its mean have a mean, too, which is subtracted. It comes
        from the sweep that adds the squares. Without it, the layer norm of a row of equal numbers would not be 0.
        """
        sub = aten.sub.Tensor
        first = self._mean(x, size)
        about = self._call(sub, (x, first))
        rest = self._mean(about, size)
        squares = self._call(sub, (self._mean(self._square(about), size), self._square(rest)))
        mean_square = self._call(aten.relu.default, (squares,))
        return self._call(aten.add.Tensor, (first, rest)), self._call(sub, (about, rest)), mean_square

    def _layer_norm(self, x: fx.Node, size: int, weight: Any, bias: Any, eps: float) -> fx.Node:
        _, centred, variance = self._centred(x, size)
        y = self._call(
            aten.mul.Tensor, (centred, self._call(aten.rsqrt.default, (self._call(aten.add.Tensor, (variance, eps)),)))
        )
        for operation, operand in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
            if operand is not None:
                y = self._call(operation, (y, self._wide(self._operand(operand, torch.Size([2, size])))))
        return y


def with_values(body: fx.GraphModule) -> fx.GraphModule:
    """Returns the body, after adding fake values to meta["val"] of its nodes. T is one symbol."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    tokens = mode.from_tensor(torch.empty(8, 2), symbolic_context=dynamic).shape[0]
    with mode:
        for node in body.graph.nodes:
            if node.op == "placeholder":
                shape = [tokens if size is None else size for size in node.meta["shape"]]
                node.meta["val"] = torch.empty(shape, dtype=node.meta["dtype"])
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)
    return body


def with_narrow_product(body: fx.GraphModule) -> fx.GraphModule:
    """Returns the body of a quantized product for plain torch. The imported body has a product of int32, which GPUs lack.

    mm(int32(x), permute(int32(w)))      →      int8_product(x, permute(w))
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    product = next(node for node in graph.nodes if node.target is aten.mm.default)
    x, factor = product.args
    with graph.inserting_before(product):
        if factor.target is aten.permute.default:
            weight = graph.call_function(aten.permute.default, (factor.args[0].args[0], [1, 0]))
        else:
            weight = factor.args[0]
        product.replace_all_uses_with(graph.call_function(int8_product, (x.args[0], weight)))
    graph.eliminate_dead_code()
    return fx.GraphModule({}, graph, "Region")


def signature(body: fx.GraphModule) -> str:
    """Returns a text of all that a body computes. Equal signatures mean equal functions."""
    arguments = [(n.meta["shape"], n.meta["dtype"]) for n in body.graph.nodes if n.op == "placeholder"]
    return f"{body.code}{arguments}"
