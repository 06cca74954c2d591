"""The layer of a mixture of experts as one operation.

gossamer::routed_mlp(x, experts, scores, gate_up, …, down, …) -> (Tensor, Tensor)    y[t] = the sum over the experts of t of
                                                                                     score * down(activation(gate x) * up x)
gossamer::routed_mlp_backward(gradient, …) -> Tensor[]                               its gradients, as many as are asked for

The second result of the former is what the first products of all slots gave, for the gradients; it is empty unless `keep` asks
for it, and the gradients compute it again then. Where gradients are to be differentiated themselves, they come from the
products of routed_linear.py instead.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.dialects.errors import ArgumentError
from gossamer.runtime.operations import Operation
from gossamer.runtime.torch_internals import transforms_active
from gossamer.sparsity.experts import kernels
from gossamer.sparsity.experts.activations import activated, check_activation, hidden_size
from gossamer.sparsity.experts.expert_weights import Weight
from gossamer.sparsity.experts.routed_linear import routed_product
from gossamer.sparsity.experts.routes import Routes
from gossamer.sparsity.operations.derivatives import Derivative


def routed_mlp(
    x: Tensor,
    experts: Tensor,
    scores: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    activation: str = "silu",
    layout: str = "halves",
) -> Tensor:
    """y[t] = sum over the experts e of token t of scores[t, e] * (down[e] h + down_bias[e]), h = activation(gate x) * up x.

    x             [tokens, columns]
    experts       [tokens, top], integers from 0 to experts - 1
    scores        [tokens, top], floats
    gate_up       [experts, 2 hidden, columns]: by `layout` "halves" the rows of gates, then those of up; "interleaved", in
                  turns; "up" [experts, hidden, columns] without gates, h = activation(up x)
    down          [experts, outputs, hidden]
    biases        [experts, rows]
    scales        of weights that are int8, or uint8 with two integers of 4 bits: floats [experts, rows, groups]
    activation    identity, relu, relu2, sigmoid, tanh, silu, gelu, gelu_tanh or clamped_swiglu (gpt-oss)
    returns       [tokens, outputs] of the type of x; sums are those of float32 at least

    Weights stored the other way round come as transposed views. Experts that nobody chose cost nothing.
    ArgumentError for shapes that do not fit and for an expert that does not exist.
    """
    inputs = x, experts, scores, gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias, activation, layout
    if not torch.compiler.is_compiling() and transforms_active():
        return composed(*inputs)
    floats = (x, scores, gate_up, gate_up_bias, down, down_bias)
    keep = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in floats)
    y: Tensor = mixture(*inputs, keep)[0]
    return y


def composed(
    x: Tensor,
    experts: Tensor,
    scores: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    layout: str,
) -> Tensor:
    """The same of operations that can be differentiated any number of times."""
    sums = routed_product(x, experts, gate_up, gate_up_scales, gate_up_bias)
    each = routed_product(activated(sums, activation, layout), experts, down, down_scales, down_bias)
    return (each * scores.to(each.dtype).unsqueeze(-1)).sum(1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check(x: Tensor, gate_up: Weight, down: Weight, activation: str, layout: str) -> None:
    check_activation(activation, layout)
    gate_up.check("gate_up", x.shape[1], x.dtype)
    if layout != "up" and gate_up.rows % 2:
        raise ArgumentError(f"gate_up has {gate_up.rows} rows, which are no gates and as many rows of up")
    down.check("down", hidden_size(gate_up.rows, layout), x.dtype)


# How it runs


def _mixture(
    x: Tensor,
    experts: Tensor,
    scores: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    layout: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    first, second = Weight(gate_up, gate_up_scales, gate_up_bias), Weight(down, down_scales, down_bias)
    _check(x, first, second, activation, layout)
    routes = Routes.of(experts, gate_up.shape[0])
    hidden, kept = _hidden(x, first, routes, activation, layout, keep)
    return _summed(hidden, second, routes, scores).to(x.dtype), kept


def _hidden(x: Tensor, weight: Weight, routes: Routes, activation: str, layout: str, keep: bool) -> tuple[Tensor, Tensor]:
    """[slots, hidden] and the sums [slots, rows] that they are of, in the order of the routes; no sums unless they are kept."""
    if kernels.served(x, weight):
        return kernels.hidden(x, weight, routes, activation, layout, keep)
    slots = routes.order.numel()
    out, kept = (x.new_empty((n, m)) for n, m in ((slots, hidden_size(weight.rows, layout)), (slots * keep, weight.rows)))
    for expert, begin, end in routes.hit():
        sums = F.linear(x.index_select(0, routes.tokens[begin:end]), *weight.of(expert, x.dtype))
        out[begin:end] = activated(sums, activation, layout)
        if keep:
            kept[begin:end] = sums
    return out, kept


def _summed(hidden: Tensor, weight: Weight, routes: Routes, scores: Tensor) -> Tensor:
    """[tokens, rows]: the sum over a token's slots of score * (weight[e] h + bias[e]), in f32 at least."""
    if kernels.served(hidden, weight):
        return kernels.summed(hidden, weight, routes, scores)
    wide = _wide(hidden.dtype)
    sorted_scores = scores.reshape(-1).index_select(0, routes.order).to(wide)
    out = hidden.new_zeros((scores.shape[0], weight.rows), dtype=wide)
    for expert, begin, end in routes.hit():
        each = F.linear(hidden[begin:end], *weight.of(expert, hidden.dtype)).to(wide)
        out.index_add_(0, routes.tokens[begin:end], each * sorted_scores[begin:end].unsqueeze(1))
    return out


def _fake(x: Tensor, experts: Tensor, scores: Tensor, gate_up: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _, _, down, _, _, activation, layout, keep = rest
    check_activation(activation, layout)
    slots = experts.shape[0] * experts.shape[1] if keep else 0
    return x.new_empty((x.shape[0], down.shape[1])), x.new_empty((slots, gate_up.shape[1]))


# How it is differentiated

_FLOATS = (0, 2, 3, 5, 6, 8)
"""Its arguments that have gradients: x, scores, gate_up, gate_up_bias, down, down_bias."""


def _backward(gradient: Tensor, kept: Tensor, *given: Any) -> list[Tensor]:
    x, experts, scores, gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias, activation, layout, wanted = given
    first, second = Weight(gate_up, gate_up_scales, gate_up_bias), Weight(down, down_scales, down_bias)
    of_x, of_scores, of_gate_up, of_gate_up_bias, of_down, of_down_bias = wanted
    routes = Routes.of(experts, gate_up.shape[0])
    if kept.shape[0] != experts.numel():
        kept = _hidden(x, first, routes, activation, layout, True)[1]
    found = dict[str, Tensor]()
    incoming = gradient.to(x.dtype).index_select(0, routes.tokens)
    score = scores.reshape(-1).index_select(0, routes.order).to(_wide(x.dtype)).unsqueeze(1)
    with torch.enable_grad():
        sums = kept.detach().requires_grad_()
        hidden = activated(sums, activation, layout)
    weighted = (incoming * score).to(x.dtype)
    if of_down:
        found["down"] = _outer(weighted, hidden.detach(), routes, down)
    if of_down_bias:
        found["down_bias"] = _by_expert(weighted, routes, down_bias)
    if of_x or of_scores or of_gate_up or of_gate_up_bias:
        back = _back(incoming, second, routes)
        if of_scores:
            each = (back.to(score.dtype) * hidden.detach()).sum(1)
            if down_bias is not None:
                own = down_bias.index_select(0, routes.experts).to(score.dtype)
                each += (incoming * own).sum(1)
            found["scores"] = each.new_empty(each.shape).index_copy_(0, routes.order, each).view(scores.shape).to(scores.dtype)
        (of_sums,) = torch.autograd.grad(hidden, sums, (back * score).to(x.dtype))
        if of_gate_up:
            found["gate_up"] = _outer(of_sums, x.index_select(0, routes.tokens), routes, gate_up)
        if of_gate_up_bias:
            found["gate_up_bias"] = _by_expert(of_sums, routes, gate_up_bias)
        if of_x:
            each = _back(of_sums, first, routes)
            found["x"] = torch.empty_like(each).index_copy_(0, routes.order, each).view(*experts.shape, each.shape[1]).sum(1)
    names = ("x", "scores", "gate_up", "gate_up_bias", "down", "down_bias")
    return [found[name] for name, want in zip(names, wanted, strict=True) if want]


def _back(gradient: Tensor, weight: Weight, routes: Routes) -> Tensor:
    """[slots, columns]: gradient weight[e], in the order of the routes."""
    out = gradient.new_empty((gradient.shape[0], weight.columns))
    for expert, begin, end in routes.hit():
        torch.mm(gradient[begin:end], weight.of(expert, gradient.dtype)[0], out=out[begin:end])
    return out


def _outer(gradient: Tensor, x: Tensor, routes: Routes, weight: Tensor) -> Tensor:
    """The gradient of a weight, from rows in the order of the routes; laid out as the weight is."""
    out = torch.empty_like(weight)
    hit = set[int]()
    for expert, begin, end in routes.hit():
        torch.mm(gradient[begin:end].mT, x[begin:end], out=out[expert])
        hit.add(expert)
    for expert in set(range(len(weight))) - hit:
        out[expert].zero_()
    return out


def _by_expert(gradient: Tensor, routes: Routes, bias: Tensor) -> Tensor:
    """The gradient of a bias."""
    out = torch.zeros_like(bias, dtype=_wide(gradient.dtype))
    return out.index_add_(0, routes.experts, gradient.to(out.dtype)).to(bias.dtype)


def _fake_backward(gradient: Tensor, kept: Tensor, *given: Any) -> list[Tensor]:
    *inputs, wanted = given
    return [torch.empty_like(inputs[place]) for place, want in zip(_FLOATS, wanted, strict=True) if want]


def _setup(ctx: Any, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    ctx.given = [None if isinstance(each, Tensor) else each for each in inputs[:-1]]
    ctx.places = [place for place, each in enumerate(inputs) if isinstance(each, Tensor)]
    return *(inputs[place] for place in ctx.places), outputs[1]


def _inputs(ctx: Any) -> tuple[list[Any], Tensor]:
    """Those of the call, and what was kept of it."""
    *tensors, kept = ctx.saved_tensors
    inputs = list(ctx.given)
    for place, tensor in zip(ctx.places, tensors, strict=True):
        inputs[place] = tensor
    return inputs, kept


def _gradients(ctx: Any, gradient: Tensor) -> Sequence[Tensor | None]:
    inputs, kept = _inputs(ctx)
    needed = dict(zip(ctx.places, ctx.needs_input_grad[2:], strict=True))
    wanted = [needed.get(place, False) for place in _FLOATS]
    if torch.is_grad_enabled():
        asked = [inputs[place] for place, want in zip(_FLOATS, wanted, strict=True) if want]
        found = torch.autograd.grad(composed(*inputs), asked, gradient, create_graph=True)
    else:
        found = mixture_backward(gradient, kept, *inputs, wanted)
    of = dict(zip((place for place, want in zip(_FLOATS, wanted, strict=True) if want), found, strict=True))
    return [of.get(place) for place in ctx.places]


def _tangent(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    inputs, _ = _inputs(ctx)
    given = [(place, tangent) for place, tangent in zip(ctx.places, tangents, strict=True) if tangent is not None]
    if not given:
        return None

    primals, tangents = [inputs[place].detach().requires_grad_() for place, _ in given], [each for _, each in given]
    for (place, _), primal in zip(given, primals, strict=True):
        inputs[place] = primal
    with torch.enable_grad():
        y = composed(*inputs)
        weights = torch.zeros_like(y, requires_grad=True)
        gradients = torch.autograd.grad(y, primals, weights, create_graph=True)  # linear in the weights
    return torch.autograd.grad(gradients, weights, tangents)[0]


_GIVEN = (
    "Tensor x: F[tokens columns], Tensor experts: i[tokens top], Tensor scores: f[tokens top],"
    " Tensor gate_up: t[count rows any], Tensor? gate_up_scales, Tensor? gate_up_bias: f[count rows],"
    " Tensor down: t[count outputs any], Tensor? down_scales, Tensor? down_bias: f[count outputs], str activation, str layout"
)
mixture = Operation(
    f"routed_mlp({_GIVEN}, bool keep) -> (Tensor, Tensor)",
    _mixture,
    _mixture,
    _fake,
    derivative=Derivative(_setup, _gradients, _tangent),
).register()
mixture_backward = Operation(
    f"routed_mlp_backward(Tensor gradient: f[tokens outputs], Tensor kept, {_GIVEN}, bool[] wanted) -> Tensor[]",
    _backward,
    _backward,
    _fake_backward,
).register()
