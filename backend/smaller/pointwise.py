"""Rules for elementwise work. Constants stay constant, and the channels of two operands are tied."""

import operator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gossamer.backend.graph.nodes import argument
from gossamer.backend.graph.writes import places
from gossamer.backend.smaller.analysis import Analysis, Rule, Step
from gossamer.backend.smaller.channels import Channels
from gossamer.backend.smaller.recipe import Known

_FUNCTIONS = [
    F.relu, F.relu6, F.gelu, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.hardtanh, F.leaky_relu, F.elu, F.celu, F.selu,
    F.softplus, F.logsigmoid, F.softsign, F.tanhshrink, F.sigmoid, F.tanh, torch.relu, torch.relu_, torch.sigmoid, torch.tanh,
    torch.erf, torch.exp, torch.abs, torch.neg, torch.square, torch.clamp, torch.sin, torch.cos, operator.neg,
]  # fmt: skip
_METHODS = [
    "relu", "relu_", "sigmoid", "sigmoid_", "tanh", "tanh_", "erf", "exp", "abs", "neg", "square", "clamp", "clamp_", "float",
    "to", "sin", "cos",
]  # fmt: skip
_TWO: dict[Any, Any] = {
    torch.add: torch.add, torch.sub: torch.sub, torch.mul: torch.mul, torch.div: torch.div, operator.add: torch.add,
    operator.sub: torch.sub, operator.mul: torch.mul, operator.truediv: torch.div, operator.iadd: torch.add,
    operator.isub: torch.sub, operator.imul: torch.mul, operator.itruediv: torch.div, operator.pow: torch.pow,
    torch.pow: torch.pow, torch.maximum: torch.maximum, torch.minimum: torch.minimum, "add": torch.add, "add_": torch.add,
    "sub": torch.sub, "sub_": torch.sub, "mul": torch.mul, "mul_": torch.mul, "div": torch.div, "div_": torch.div,
    "pow": torch.pow,
}  # fmt: skip
"""Functions of two operands, each with the function that computes the same out of place."""


def unary(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for functions of one operand."""
    x = argument(node, 0, "input")
    given = analysis.channels(x)
    if given is None or node.all_input_nodes != [x]:
        return None
    return _elementwise(node, x, given, _pure(analysis, node, given))


def _elementwise(node: fx.Node, x: fx.Node, given: Channels, fill: Known | None) -> Step:
    """Returns a step that keeps channels where they are, and has the constants `fill`."""
    return Step(replace(given, fill=fill), [x], alias=node.target in _ALIASES)


_ALIASES = {"to", "float"}


def _pure(analysis: Analysis, node: fx.Node, given: Channels) -> Known | None:
    """Returns the constants after a function; None for zeros."""
    target: Any = node.target
    kwargs = {name: each for name, each in node.kwargs.items() if name not in ("inplace", "input", "memory_format")}
    arguments = node.args[1 : places(target).get("inplace")]
    if node.op == "call_method":
        name = str(target).rstrip("_")
        function: Any = getattr(Tensor, name)
    else:
        function = torch.relu if target is torch.relu_ else target
    numbers = constants(argument(node, 0, "input"), given)
    if isinstance(numbers, Tensor) and not bool((function(numbers, *arguments, **kwargs) != 0).any()):
        return None
    return analysis.recipe(function, numbers, *arguments, **kwargs)


def constants(node: fx.Node, given: Channels) -> Known | Tensor:
    """Returns the constants of a value, as a tensor even if they are zeros."""
    return torch.zeros(given.ids.shape, dtype=node.meta["example_value"].dtype) if given.fill is None else given.fill


def dropout(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for dropout. It does nothing in evaluation, and zeros stay zeros in training."""
    x = argument(node, 0, "input")
    given, training = analysis.channels(x), argument(node, 2, "training", True)
    if given is None:
        return None
    zero = given.const if not training else analysis.is_zero(given.fill, given.const)
    result = replace(given, const=zero, fill=given.fill if not training else None)
    return Step(result, [x], zeros=[(given, zero)] if training else [], alias=True)


def binary(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for functions of two operands. At least one operand has channels."""
    if len(node.args) != 2 or node.kwargs:
        return None
    function, (a, b) = _TWO[node.target], node.args
    one, two = analysis.channels(a), analysis.channels(b)
    if one is not None and two is not None:
        return _both(analysis, node, function, one, two)
    given, x, other = (one, a, b) if one is not None else (two, b, a)
    if given is None or not isinstance(x, fx.Node):
        return None
    if isinstance(other, int | float):
        numbers = [constants(x, given), other]
        fill: Known | None = analysis.recipe(function, *(numbers if x is a else numbers[::-1]))
        if given.fill is None and function in (torch.mul, torch.div) and x is a:
            fill = None
        return _elementwise(node, x, given, fill)
    known = analysis.recipe.of(other)
    dims = node.meta["example_value"].dim()
    if x.meta["example_value"].dim() != dims:
        return None
    if known is not None:
        return _with_static(analysis, node, function, x, given, known, x is a)
    sizes = _sizes(other, dims)
    if sizes is None or any(sizes[dim] != 1 for dim in given.dims):
        return None
    return _with_scales(analysis, x, given, function is torch.mul)


def _with_scales(analysis: Analysis, x: fx.Node, given: Channels, product: bool) -> Step:
    """The rule if the other operand has no channels. Zeros stay zeros in a product; no other constant stays one."""
    const = analysis.is_zero(given.fill, given.const) if product else torch.zeros_like(given.const)
    return Step(replace(given, const=const, fill=None), [x], zeros=[(given, const)])


def _with_static(
    analysis: Analysis, node: fx.Node, function: Any, x: fx.Node, given: Channels, known: Known, first: bool
) -> Step | None:
    """The rule if the other operand is static, such as a scale for each channel."""
    dims = node.meta["example_value"].dim()
    shape = [1] * (dims - known.value.dim()) + list(known.value.shape)
    alone = all(size == 1 for dim, size in enumerate(shape) if dim not in given.dims)
    whole = {dim: size for dim, size in enumerate(shape) if dim in given.dims}
    if any(
        size not in (1, channels) for size, channels in zip((whole[dim] for dim in given.dims), given.ids.shape, strict=True)
    ):
        return None  # the operand repeats one channel
    other = node.args[1] if first else node.args[0]
    assert isinstance(other, fx.Node)
    if alone:
        numbers = constants(x, given)
        along = analysis.recipe(torch.reshape, known, [whole[dim] for dim in sorted(given.dims)])
        if sorted(given.dims) != list(given.dims):
            along = analysis.recipe(torch.permute, along, [sorted(given.dims).index(dim) for dim in given.dims])
        fill: Known | None = analysis.recipe(function, *((numbers, along) if first else (along, numbers)))
        if given.fill is None and function is torch.mul:
            fill = None
        step = _elementwise(node, x, given, fill)
    else:
        step = _with_scales(analysis, x, given, function is torch.mul)

    def build(builder: Any) -> fx.Node:
        lines = builder.kept(given)
        place = given.dim - (dims - known.value.dim())
        if bool(lines.all()) or whole[given.dim] == 1:
            return builder.same(node)
        small, source = builder.input(builder.taken(known, {place: lines})), builder.small(x)
        target: Any = node.target
        args = (source, small) if first else (small, source)
        make = builder.graph.call_method if node.op == "call_method" else builder.graph.call_function
        return make(target, args)

    return replace(step, build=build, alias=False)


def _both(analysis: Analysis, node: fx.Node, function: Any, one: Channels, two: Channels) -> Step | None:
    """The rule if both operands have channels, in the same dimensions."""
    a, b = node.args
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    same = one.dims == two.dims and one.ids.shape == two.ids.shape and one.along == two.along
    if not same or a.meta["example_value"].dim() != b.meta["example_value"].dim():
        return None
    analysis.atoms.tie(one.ids, two.ids)
    const, fill = one.const & two.const, None
    if one.fill is not None or two.fill is not None or function not in (torch.add, torch.sub, torch.mul):
        fills = [constants(a, one), constants(b, two)]
        fill = analysis.recipe(function, *fills)
    # A product with zeros is zeros, even if the other factor is not constant.
    zeros = [analysis.is_zero(each.fill, each.const) & ~const for each in (one, two)]
    zero = zeros[0] | zeros[1]
    if function is torch.mul and bool(zero.any()):
        const, fill = const | zero, None if fill is None else analysis.recipe(torch.where, zero, 0.0, fill)

    def back(need: Tensor) -> None:
        for operand, given in ((a, one), (b, two)):
            analysis.want(operand, need & ~const & ~given.const)

    depends = [(one, zeros[0]), (two, zeros[1])] if function is torch.mul else []
    return Step(replace(one, const=const, fill=fill), [a, b], back, zeros=depends)


def batch_norm(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for batch_norm in evaluation, a scale and a shift for each channel. With scale zero, a channel is its shift."""
    x = argument(node, 0, "input")
    given = analysis.channels(x)
    statics = [argument(node, 1 + n, name) for n, name in enumerate(("running_mean", "running_var", "weight", "bias"))]
    known = [None if each is None else analysis.recipe.of(each) for each in statics]
    missing = any(each is not None and found is None for each, found in zip(statics, known, strict=True))
    fixed = isinstance(argument(node, 7, "eps", 1e-5), float)  # with dynamic=True it may be a symbol
    if given is None or not fixed or given.dims != (1,) or argument(node, 5, "training", False) or missing or known[0] is None:
        return None
    mean, var, weight, bias = known
    recipe, eps = analysis.recipe, argument(node, 7, "eps", 1e-5)
    assert mean is not None and var is not None
    numbers: Any = torch.zeros(given.ids.shape, dtype=mean.value.dtype) if given.fill is None else given.fill
    fill = recipe(torch.div, recipe(torch.sub, numbers, mean), recipe(torch.sqrt, recipe(torch.add, var, eps)))
    fill = fill if weight is None else recipe(torch.mul, fill, weight)
    fill = fill if bias is None else recipe(torch.add, fill, bias)
    const = given.const if weight is None else given.const | analysis.is_zero(weight, torch.ones_like(given.const))

    def build(builder: Any) -> fx.Node:
        lines = builder.kept(given)
        if weight is not None:
            builder.zeros(builder.taken(weight, {0: const & ~given.const}))
        if bool(lines.all()):
            return builder.same(node)
        small = [None if each is None else builder.input(builder.taken(each, {0: lines})) for each in known]
        momentum = builder.mapped(argument(node, 6, "momentum", 0.1))
        args = (builder.small(x), *small, False, momentum, eps)
        return builder.graph.call_function(F.batch_norm, args)

    return Step(replace(given, const=const, fill=fill), [x], build=build)


def _sizes(node: object, dims: int) -> list[Any] | None:
    """Returns the sizes of a value, padded with ones in front to `dims` dimensions."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return [1] * (dims - value.dim()) + list(value.shape) if isinstance(value, Tensor) and value.dim() <= dims else None


RULES: dict[Any, Rule] = {
    **dict.fromkeys(_FUNCTIONS, unary),
    **dict.fromkeys(_METHODS, unary),
    **dict.fromkeys(_TWO, binary),
    **dict.fromkeys([F.dropout, F.dropout1d, F.dropout2d, F.dropout3d], dropout),
    F.batch_norm: batch_norm,
}
