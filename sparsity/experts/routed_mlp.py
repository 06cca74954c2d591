"""Computes a mixture-of-experts layer as one operation.

gossamer::routed_mlp(x, experts, scores, gate_up, …, down, …) -> (Tensor, Tensor)    y[t] = sum over the experts of t of
                                                                                     score * down(activation(gate x) * up x)
gossamer::routed_mlp_backward(gradient, …) -> Tensor[]                               its gradients, those that are wanted

With `keep`, the second result of the former has the first products of all slots, for the gradients. Otherwise it is empty, and
the gradients compute these products again. Gradients that are differentiated themselves use the products of routed_linear.py
instead.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.runtime.experts.activations import check_activation
from gossamer.runtime.operations import Operation
from gossamer.runtime.torch_internals import transforms_active
from gossamer.sparsity.experts.mixture import PLACES, Mixture
from gossamer.sparsity.experts.routed_linear import as_signed
from gossamer.sparsity.operations.autocast import as_autocast
from gossamer.sparsity.operations.batches import batched_one_by_one
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
    """Computes y[t] = sum of scores[t, e] * (down[e] h + down_bias[e]) over t's experts e, with h = activation(gate x) * up x.

    x             [tokens, columns]
    experts       [tokens, top], integers from 0 to experts - 1
    scores        [tokens, top], floats
    gate_up       [experts, 2 hidden, columns]. With `layout` "halves" it has the rows of gates, then those of up; with
                  "interleaved" it has them in turns; with "up" it is [experts, hidden, columns], and h = activation(up x)
    down          [experts, outputs, hidden]
    biases        [experts, rows]
    scales        for weights of int8, or of uint8 with two integers of 4 bits: floats [experts, rows, groups]
    activation    identity, relu, relu2, sigmoid, tanh, silu, gelu, gelu_tanh or clamped_swiglu (gpt-oss)
    returns       [tokens, outputs] of the type of x; sums are in float32 or float64

    If your weights are stored transposed, pass transposed views. Experts that no token chose cost nothing. Under
    torch.autocast, float tokens, weights and biases get its lower precision, as in nn.Linear.
    ArgumentError for shapes that do not fit and for an expert that does not exist.
    """
    x, experts, gate_up, down = as_autocast(x), as_signed(experts), as_autocast(gate_up), as_autocast(down)
    gate_up_bias, down_bias = (None if each is None else as_autocast(each) for each in (gate_up_bias, down_bias))
    inputs = x, experts, scores, gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias, activation, layout
    if not torch.compiler.is_compiling() and transforms_active():
        return Mixture(*inputs).composed()
    floats = (x, scores, gate_up, gate_up_bias, down, down_bias)
    keep = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in floats)
    y: Tensor = mixture(*inputs, keep)[0]
    return y


# Computation


def _mixture(*given: Any) -> tuple[Tensor, Tensor]:
    *operands, keep = given
    layer = Mixture(*operands)
    layer.check()
    hidden, kept = layer.hidden(keep)
    return layer.result(hidden), kept


def _fake(x: Tensor, experts: Tensor, scores: Tensor, gate_up: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _, _, down, _, _, activation, layout, keep = rest
    check_activation(activation, layout)
    slots = experts.shape[0] * experts.shape[1] if keep else 0
    return x.new_empty((x.shape[0], down.shape[1])), x.new_empty((slots, gate_up.shape[1]))


# Derivatives


def _backward(gradient: Tensor, kept: Tensor, *given: Any) -> list[Tensor]:
    *operands, wanted = given
    return Mixture(*operands).gradients(gradient, kept, wanted)


def _fake_backward(gradient: Tensor, kept: Tensor, *given: Any) -> list[Tensor]:
    *inputs, wanted = given
    return [torch.empty_like(inputs[place]) for place, want in zip(PLACES, wanted, strict=True) if want]


def _setup(ctx: Any, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    ctx.given = [None if isinstance(each, Tensor) else each for each in inputs[:-1]]
    ctx.places = [place for place, each in enumerate(inputs) if isinstance(each, Tensor)]
    return *(inputs[place] for place in ctx.places), outputs[1]


def _inputs(ctx: Any) -> tuple[list[Any], Tensor]:
    """Returns the inputs of the call, and the sums that it kept."""
    *tensors, kept = ctx.saved_tensors
    inputs = list(ctx.given)
    for place, tensor in zip(ctx.places, tensors, strict=True):
        inputs[place] = tensor
    return inputs, kept


def _gradients(ctx: Any, gradient: Tensor) -> Sequence[Tensor | None]:
    inputs, kept = _inputs(ctx)
    needed = dict(zip(ctx.places, ctx.needs_input_grad[2:], strict=True))
    wanted = [needed.get(place, False) for place in PLACES]
    if torch.is_grad_enabled():
        asked = [inputs[place] for place, want in zip(PLACES, wanted, strict=True) if want]
        found = torch.autograd.grad(Mixture(*inputs).composed(), asked, gradient, create_graph=True)
    else:
        found = mixture_backward(gradient, kept, *inputs, wanted)
    of = dict(zip((place for place, want in zip(PLACES, wanted, strict=True) if want), found, strict=True))
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
        y = Mixture(*inputs).composed()
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
    batched=batched_one_by_one,
).register()
mixture_backward = Operation(
    f"routed_mlp_backward(Tensor gradient: f[tokens outputs], Tensor kept, {_GIVEN}, bool[] wanted) -> Tensor[]",
    _backward,
    _backward,
    _fake_backward,
    batched=batched_one_by_one,
).register()
