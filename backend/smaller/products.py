"""Rules for products with static weights. The rows of a weight make new channels, and its columns sum over channels of x.

y = x W^T + b    channel m of y is constant if x is constant in all columns in which row m of W has nonzeros
                 channel k of x is needed if column k has nonzeros and x[k] is not constant
                 constant channels c of x add W[:, c] x[c] to the bias
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gossamer.backend.graph.nodes import argument
from gossamer.backend.smaller.analysis import Analysis, Product, Rule, Step
from gossamer.backend.smaller.channels import Channels
from gossamer.backend.smaller.recipe import Known, Recipe
from gossamer.runtime.elements import WEIGHTS

if TYPE_CHECKING:
    from gossamer.backend.smaller.build import Builder

Make = Callable[["Builder", fx.Node, fx.Node, fx.Node | None], fx.Node]
"""A builder, the smaller x, weight [M, K] and bias → the node of their product."""


def linear(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for linear(x, weight, bias)."""
    x, weight, bias = argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")
    return _product(analysis, node, x, analysis.recipe.of(weight), bias, _linear)


def addmm(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for addmm(bias, x, weight), with a weight [K, M]."""
    if len(node.args) != 3 or node.kwargs:
        return None
    bias, x, weight = node.args
    known = analysis.recipe.of(weight)
    turned = None if known is None or known.value.dim() != 2 else analysis.recipe(torch.t, known)
    return _product(analysis, node, x, turned, bias, _linear)


def _linear(builder: "Builder", x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
    return builder.graph.call_function(F.linear, (x, weight, bias))


def _product(analysis: Analysis, node: fx.Node, x: object, weight: Known | None, bias: object, make: Make) -> Step | None:
    value = x.meta.get("example_value") if isinstance(x, fx.Node) else None
    added = _static_or_none(analysis, bias)
    if (
        weight is None
        or weight.value.dim() != 2
        or value is None
        or added is False
        or (isinstance(added, Known) and added.value.shape != weight.value.shape[:1])  # which is broadcast
        or value.dim() < 2
        or weight.value.dtype not in WEIGHTS
    ):
        return None
    assert isinstance(x, fx.Node)
    leading = list(value.shape[:-1])
    tokens = prod(leading) if all(isinstance(n, int) for n in leading) else None
    return _summed(analysis, node, x, value.dim() - 1, weight, added, make, "linear", tokens, False)


def convolution(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for conv1d, conv2d and conv3d of a batch. They have no groups, or are depthwise."""
    x, bias = argument(node, 0, "input"), argument(node, 2, "bias")
    weight = analysis.recipe.of(argument(node, 1, "weight"))
    value = x.meta.get("example_value") if isinstance(x, fx.Node) else None
    added = _static_or_none(analysis, bias)
    if (
        weight is None
        or value is None
        or added is False
        or value.dim() != weight.value.dim()
        or weight.value.dtype not in WEIGHTS
    ):
        return None
    assert isinstance(x, fx.Node)
    padding, groups = argument(node, 4, "padding", 0), argument(node, 6, "groups", 1)
    sides = [padding] if isinstance(padding, int | str) else [*padding]
    padded = any(side not in (0, "valid") for side in sides)
    if groups != 1:
        depthwise = groups == value.shape[1] == weight.value.shape[0]
        return _depthwise(analysis, node, x, weight, added, padded) if depthwise else None
    results = [node.meta["example_value"].shape[n] for n in (0, *range(2, value.dim()))]
    pixels = prod(results) if all(isinstance(n, int) for n in results) else None

    def make(builder: "Builder", x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
        return _called(builder, node, x, weight, bias)

    return _summed(analysis, node, x, 1, weight, added, make, "convolution", pixels, padded)


def transposed(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for conv_transpose1d, 2d, 3d of a batch, without groups, with a weight [K, M, ...].

    Pixels at the border sum fewer taps, as with padding.
    """
    x, weight = argument(node, 0, "input"), analysis.recipe.of(argument(node, 1, "weight"))
    value = x.meta.get("example_value") if isinstance(x, fx.Node) else None
    added = _static_or_none(analysis, argument(node, 2, "bias"))
    if weight is None or value is None or added is False or value.dim() != weight.value.dim():
        return None
    if weight.value.dtype not in WEIGHTS or argument(node, 6, "groups", 1) != 1:
        return None
    assert isinstance(x, fx.Node)
    sizes = [value.shape[n] for n in (0, *range(2, value.dim()))]
    pixels = prod(sizes) if all(isinstance(n, int) for n in sizes) else None

    def make(builder: "Builder", x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
        turned = builder.graph.call_function(torch.transpose, (weight, 0, 1))
        return _called(builder, node, x, turned, bias)

    turned = analysis.recipe(torch.transpose, weight, 0, 1)
    return _summed(analysis, node, x, 1, turned, added, make, "convolution", pixels, True)


def _called(builder: "Builder", node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
    """Emits the convolution of `node` with smaller operands."""
    kwargs = {name: each for name, each in node.kwargs.items() if name not in ("input", "weight", "bias")}
    target: Any = node.target
    return builder.graph.call_function(target, (x, weight, bias, *builder.mapped(node.args[3:])), builder.mapped(kwargs))


def _static_or_none(analysis: Analysis, bias: object) -> Known | bool | None:
    """Returns the bias; None if there is none, False if it is not static."""
    return None if bias is None else analysis.recipe.of(bias) or False


def _summed(
    analysis: Analysis, node: fx.Node, x: fx.Node, dim: int, weight: Known, bias: Any, make: Make, op: str,
    tokens: int | None, padded: bool,
) -> Step | None:  # fmt: skip
    """Returns the step of a product that sums over dimension `dim` of x, with a weight [M, K, ...]."""
    recipe, atoms = analysis.recipe, analysis.atoms
    m, k = weight.value.shape[:2]
    given = analysis.channels(x)
    inside = given is not None and given.dims == (dim,)
    if given is None or not inside:
        given = analysis.entry(x, dim, k)
    nonzero = nonzeros(analysis, weight).flatten(2).any(2) if weight.value.dim() > 2 else nonzeros(analysis, weight)
    moving = nonzero & ~given.const
    if padded:  # a channel is not constant at the border, where zeros are padded
        moving |= nonzero & (given.const & ~analysis.is_zero(given.fill, given.const))
    const = ~moving.any(1)
    fill = bias if padded else _total(analysis, _folded(analysis, weight, given, given.const), bias)
    result = Channels((dim,), atoms.new(m), 0, const, fill)
    columns = nonzero.any(0)
    stand_in = _stand_in(analysis, given, columns) if padded else torch.zeros(k, dtype=torch.bool)

    def back(_: Tensor) -> None:
        mask = (columns & ~given.const) | stand_in
        if inside:
            analysis.want(x, mask)
        else:
            atoms.need(given.ids, mask)

    def build(builder: "Builder") -> fx.Node:
        rows, kept = builder.kept(result), builder.kept(given)
        left_out = given.const & ~kept
        # Other nodes may rely on constants even if they are computed, because they are added to other values.
        settled = given.const & analysis.is_zero(given.fill, given.const) if padded else given.const
        builder.zeros(builder.taken(builder.taken(weight, {0: const}), {1: ~settled}))
        if padded:
            builder.zero_constants(given, settled & (nonzero & const[:, None]).any(0))
        if bool(rows.all()) and bool(kept.all()):
            return builder.same(node)
        taken = builder.taken(weight, {0: rows})
        builder.zeros(builder.taken(taken, {1: ~kept & ~given.const}))
        small, added = builder.taken(taken, {1: kept}), None if bias is None else builder.taken(bias, {0: rows})
        if padded and given.fill is not None and bool(left_out.any()):
            small = _with_stand_in(builder, taken, small, given, left_out, stand_in, kept)
        elif not padded:
            added = _total(analysis, _folded(analysis, taken, given, left_out), added)
        source = builder.small(x) if inside else builder.gathered(x, given)
        inputs = [builder.input(_laid_out(recipe, small, weight))]
        if added is not None:
            inputs.append(builder.input(added))
        return make(builder, source, inputs[0], inputs[1] if len(inputs) == 2 else None)

    main = recipe.main_leaf(weight)
    name = analysis.names[main] if main is not None else node.name
    taps = prod(weight.value.shape[2:])
    product = Product(name, op, weight.value.detach(), result, given, tokens, taps)
    return Step(result, [x] if inside else [], back, build, product=product)


def _laid_out(recipe: Recipe, small: Known, weight: Known) -> Known:
    """Returns a smaller weight in the memory format of the weight, by which torch chooses that of a convolution's result."""
    value, last = weight.value, {4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.value.dim())
    if last is not None and value.stride() == torch.empty_like(value, device="meta", memory_format=last).stride():
        return recipe(torch.clone, small, memory_format=last)
    return recipe(Tensor.contiguous, small)


def _total(analysis: Analysis, summed: Known | None, bias: Known | None) -> Known | None:
    """Returns the sum of those that are not None."""
    return bias if summed is None else summed if bias is None else analysis.recipe(torch.add, summed, bias)


def _folded(analysis: Analysis, weight: Known, given: Channels, which: Tensor) -> Known | None:
    """Returns what some constant channels of x add to the product, computed in f32 at least; None for zeros."""
    if given.fill is None or not bool(which.any()):
        return None
    recipe, index = analysis.recipe, which.nonzero().flatten()
    wide = torch.promote_types(weight.value.dtype, torch.float32)
    columns = recipe(torch.index_select, weight, 1, index)
    if weight.value.dim() > 2:
        columns = recipe(torch.sum, recipe(torch.flatten, columns, 2), 2)
    constants = recipe(torch.index_select, given.fill, 0, index)
    summed = recipe(torch.mv, recipe(Tensor.to, columns, wide), recipe(Tensor.to, constants, wide))
    return recipe(Tensor.to, summed, weight.value.dtype)


def _stand_in(analysis: Analysis, given: Channels, columns: Tensor) -> Tensor:
    """Returns the constant channels of x that must stay in a padded convolution, because zeros are padded around them.

    One channel stands in for the others, because they are its multiples. In training, all of them stay.
    """
    constant = given.const & columns & ~analysis.is_zero(given.fill, given.const)
    if given.fill is None or not bool(constant.any()) or (analysis.training and given.fill.value.requires_grad):
        return constant
    sizes = given.fill.value.detach().abs().where(constant, torch.zeros(()))
    return (torch.arange(len(constant)) == sizes.argmax()) & constant


def _with_stand_in(
    builder: "Builder", weight: Known, small: Known, given: Channels, left_out: Tensor, stand_in: Tensor, kept: Tensor
) -> Known:
    """Returns the smaller weight. One of its columns also adds what the columns that are left out added."""
    assert given.fill is not None
    recipe, index = builder.recipe, left_out.nonzero().flatten()
    constants = recipe(torch.index_select, given.fill, 0, index)
    if not bool(stand_in.any()):
        builder.zeros(constants)
        return small
    chosen = stand_in.nonzero().flatten()[:1]
    shares = recipe(torch.div, constants, recipe(torch.index_select, given.fill, 0, chosen))
    shares = recipe(torch.reshape, shares, (1, -1, *[1] * (weight.value.dim() - 2)))
    others = recipe(torch.sum, recipe(torch.mul, recipe(torch.index_select, weight, 1, index), shares), 1, keepdim=True)
    place = kept[: int(chosen)].sum().reshape(1)
    builder.finite(others)
    return recipe(torch.index_add, small, 1, place, others)


def _depthwise(analysis: Analysis, node: fx.Node, x: fx.Node, weight: Known, bias: Any, padded: bool) -> Step | None:
    given = analysis.channels(x)
    if given is None or given.dims != (1,):
        return None
    empty = ~nonzeros(analysis, weight).flatten(1).any(1)
    settled = given.const & (analysis.is_zero(given.fill, given.const) if padded else torch.ones_like(given.const))
    fill = bias
    if not padded and given.fill is not None:
        sums = analysis.recipe(torch.sum, analysis.recipe(torch.flatten, weight, 1), 1)
        sums = analysis.recipe(torch.mul, sums, given.fill)
        fill = sums if bias is None else analysis.recipe(torch.add, sums, bias)
    const = empty | settled
    result = Channels((1,), given.ids, 0, const, fill)

    def build(builder: "Builder") -> fx.Node:
        kept = builder.kept(result)
        builder.zeros(builder.taken(weight, {0: const & ~settled}))
        if bool(kept.all()):
            return builder.same(node)
        small = _laid_out(builder.recipe, builder.taken(weight, {0: kept}), weight)
        inputs: list[Any] = [builder.input(each) for each in (small, bias and builder.taken(bias, {0: kept})) if each]
        how = (argument(node, 3, "stride", 1), argument(node, 4, "padding", 0), argument(node, 5, "dilation", 1))
        added = inputs[1] if len(inputs) == 2 else None
        target: Any = node.target
        return builder.graph.call_function(target, (builder.small(x), inputs[0], added, *builder.mapped(how), int(kept.sum())))

    return Step(result, [x], build=build, zeros=[(given, settled)] if padded else [])


def nonzeros(analysis: Analysis, weight: Known) -> Tensor:
    """Returns which elements of a weight are nonzero, or have a gradient that is needed."""
    value = weight.value
    found = value.detach() != 0
    if not analysis.training or not value.requires_grad:
        return found
    leaves = [leaf for each in analysis.recipe.leaves_of(weight) if (leaf := analysis.recipe.value(each)).requires_grad]
    if any(leaf is value for leaf in leaves):
        return torch.ones_like(found)
    for leaf, gradient in zip(leaves, _gradients(value, leaves, ~found), strict=True):
        if gradient is not None and leaf.shape == value.shape:
            found = found | (gradient != 0)
    # An element of a leaf need not be at the place of the element of the weight that is computed from it.
    hidden = any(gradient is not None and bool((gradient != 0).any()) for gradient in _gradients(value, leaves, ~found))
    return torch.ones_like(found) if hidden else found


def _gradients(value: Tensor, leaves: Sequence[Tensor], where: Tensor) -> Sequence[Tensor | None]:
    """Returns the gradients of leaves, if only these elements of a value computed from them have gradients."""
    asked = torch.randn_like(value).masked_fill(~where, 0)
    return torch.autograd.grad(value, leaves, asked, allow_unused=True, retain_graph=True)


RULES: dict[Any, Rule] = {
    F.linear: linear,
    torch.addmm: addmm,
    **dict.fromkeys([torch.conv1d, torch.conv2d, torch.conv3d], convolution),
    **dict.fromkeys([torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d], transposed),
}
