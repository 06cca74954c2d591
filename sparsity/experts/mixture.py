"""`Mixture`: the operands of a mixture-of-experts layer, with its forward and backward computations."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.dialects.errors import ArgumentError
from gossamer.runtime.experts.activations import activated, check_activation, hidden_size
from gossamer.runtime.experts.routes import Routes
from gossamer.sparsity.arrays.sorting import routes_of
from gossamer.sparsity.experts import kernels
from gossamer.sparsity.experts.expert_weights import Weight
from gossamer.sparsity.experts.outer_products import outer_products
from gossamer.sparsity.experts.routed_linear import routed_product

DIFFERENTIABLE = ("x", "scores", "gate_up", "gate_up_bias", "down", "down_bias")


@dataclass(frozen=True)
class Mixture:
    """The operands, in the order of gossamer::routed_mlp. `routed_mlp` describes them."""

    x: Tensor
    experts: Tensor
    scores: Tensor
    gate_up: Tensor
    gate_up_scales: Tensor | None
    gate_up_bias: Tensor | None
    down: Tensor
    down_scales: Tensor | None
    down_bias: Tensor | None
    activation: str
    layout: str

    @cached_property
    def first(self) -> Weight:
        """The weight of gates and up."""
        return Weight(self.gate_up, self.gate_up_scales, self.gate_up_bias)

    @cached_property
    def second(self) -> Weight:
        """The weight of down."""
        return Weight(self.down, self.down_scales, self.down_bias)

    @cached_property
    def routes(self) -> Routes:
        """The slots of each expert."""
        return routes_of(self.experts, self.gate_up.shape[0])

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums."""
        return torch.promote_types(self.x.dtype, torch.float32)

    def check(self) -> None:
        """ArgumentError unless the operands fit."""
        check_activation(self.activation, self.layout)
        self.first.check("gate_up", self.x.shape[1], self.x.dtype)
        if self.layout != "up" and self.first.rows % 2:
            raise ArgumentError(f"gate_up has {self.first.rows} rows, must have an even number: half of them are gates")
        self.second.check("down", hidden_size(self.first.rows, self.layout), self.x.dtype)

    def hidden(self, keep: bool) -> tuple[Tensor, Tensor]:
        """Returns hidden elements [slots, hidden] in the order of the routes, and the sums [slots, rows] before, if `keep`."""
        x, weight, routes = self.x, self.first, self.routes
        if kernels.served(x, weight):
            return kernels.hidden(x, weight, routes, self.activation, self.layout, keep)
        slots = routes.order.numel()
        out = x.new_empty((slots, hidden_size(weight.rows, self.layout)))
        kept = x.new_empty((slots * keep, weight.rows))
        for expert, begin, end in routes.hit():
            sums = F.linear(x.index_select(0, routes.tokens[begin:end]), *weight.of(expert, x.dtype))
            out[begin:end] = activated(sums, self.activation, self.layout)
            if keep:
                kept[begin:end] = sums
        return out, kept

    def result(self, hidden: Tensor) -> Tensor:
        """Returns the layer's result [tokens, outputs] in the dtype of x."""
        return _summed(hidden, self.second, self.routes, self.scores).to(self.x.dtype)

    def composed(self) -> Tensor:
        """Returns the result, computed by operations that can be differentiated any number of times."""
        sums = routed_product(self.x, self.experts, self.gate_up, self.gate_up_scales, self.gate_up_bias)
        hidden = activated(sums, self.activation, self.layout)
        each = routed_product(hidden, self.experts, self.down, self.down_scales, self.down_bias)
        return (each * self.scores.to(each.dtype).unsqueeze(-1)).sum(1)

    def gradients(self, gradient: Tensor, kept: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
        """Returns the gradients of the wanted DIFFERENTIABLE operands, from the gradient of the result.

        kept  the sums from `hidden`; they are computed again if they were not kept
        """
        names = [name for name, want in zip(DIFFERENTIABLE, wanted, strict=True) if want]
        found, routes, gradient = dict[str, Tensor](), self.routes, gradient.to(self.x.dtype)
        if names != ["down_bias"]:
            if kept.shape[0] != routes.order.numel():
                kept = self.hidden(True)[1]
            sums, weighted, shares = self._back(gradient, kept)
            found["scores"] = self._of_scores(gradient, shares)
        if "x" in names:
            turned, ones = self.first.turned(self.x.dtype), torch.ones_like(self.scores, dtype=self.wide)
            found["x"] = _summed(sums, turned, routes, ones).to(self.x.dtype)
        if "gate_up" in names:
            found["gate_up"] = _like(self.gate_up, sums, self.x, routes, (0, routes.top))
        if "gate_up_bias" in names:
            found["gate_up_bias"] = _of_bias(self.gate_up_bias, sums.new_ones(len(sums), 1), sums, routes, (0, 0))
        if "down" in names:
            found["down"] = _like(self.down, gradient, weighted, routes, (routes.top, 0))
        if "down_bias" in names:
            scores = self.scores.reshape(-1, 1).to(gradient.dtype)
            found["down_bias"] = _of_bias(self.down_bias, scores, gradient, routes, (1, routes.top))
        return [found[name] for name in names]

    def _back(self, gradient: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns three values for each slot, in the order of the routes.

        These are the gradient of the sums, the hidden elements times the score, and the score's gradient without the bias.
        """
        routes, weight = self.routes, self.second.turned(self.x.dtype)
        if kernels.served(gradient, weight):
            return kernels.gradient(gradient, weight, routes, self.scores, kept, self.activation, self.layout)
        score = self.scores.reshape(-1).index_select(0, routes.order).to(self.wide).unsqueeze(1)
        back = gradient.new_empty((routes.order.numel(), weight.rows))
        for expert, begin, end in routes.hit():
            rows = gradient.index_select(0, routes.tokens[begin:end])
            back[begin:end] = F.linear(rows, weight.values[expert])
        with torch.enable_grad():
            sums = kept.detach().requires_grad_()
            hidden = activated(sums, self.activation, self.layout)
        (of_sums,) = torch.autograd.grad(hidden, sums, (back * score).to(hidden.dtype))
        hidden = hidden.detach()
        return of_sums, (hidden * score).to(hidden.dtype), (back.to(self.wide) * hidden).sum(1)

    def _of_scores(self, gradient: Tensor, shares: Tensor) -> Tensor:
        order = self.routes.order
        found = torch.empty_like(shares).index_copy_(0, order, shares).view(self.scores.shape)
        if self.down_bias is not None:
            products = gradient.to(found.dtype) @ self.down_bias.to(found.dtype).mT
            found += products.gather(1, self.experts.long())
        return found.to(self.scores.dtype)


PLACES = tuple(number for number, field in enumerate(fields(Mixture)) if field.name in DIFFERENTIABLE)
"""The numbers of the operands that have gradients."""


def _summed(hidden: Tensor, weight: Weight, routes: Routes, scores: Tensor) -> Tensor:
    """Returns the sum over a token's slots of score * (weight[e] h + bias[e]), [tokens, rows] in f32 or f64."""
    if kernels.served(hidden, weight):
        return kernels.summed(hidden, weight, routes, scores)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    sorted_scores = scores.reshape(-1).index_select(0, routes.order).to(wide)
    out = hidden.new_zeros((scores.shape[0], weight.rows), dtype=wide)
    for expert, begin, end in routes.hit():
        each = F.linear(hidden[begin:end], *weight.of(expert, hidden.dtype)).to(wide)
        out.index_add_(0, routes.tokens[begin:end], each * sorted_scores[begin:end].unsqueeze(1))
    return out


def _like(weight: Tensor, left: Tensor, right: Tensor, routes: Routes, tops: tuple[int, int]) -> Tensor:
    """Returns the gradient of a weight, with the layout of the weight."""
    if weight.is_contiguous() or not weight.mT.is_contiguous():
        return outer_products(left, right, routes, tops)
    return outer_products(right, left, routes, tops[::-1]).mT


def _of_bias(bias: Tensor | None, left: Tensor, right: Tensor, routes: Routes, tops: tuple[int, int]) -> Tensor:
    assert bias is not None
    return outer_products(left, right, routes, tops).squeeze(1).to(bias.dtype)
