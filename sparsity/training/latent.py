"""Parametrizations whose hidden weights train on, and linear layers with another mask in the backward pass.

forward    weight * mask                       the mask is 1 for kept weights, 0 for pruned and between for fading ones
backward   d original = d weight               straight through (Bengio et al., 2013), or
           d original = d weight * mask        the derivative
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.sparsity.operations.autocast import as_autocast
from gossamer.sparsity.pruning.mask import Mask
from gossamer.sparsity.pruning.patterns import NM


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(original: Tensor, mask: Tensor) -> Tensor:
        return original * mask

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class LatentWeight(Mask):
    """A mask that changes. Gradients pass it straight through, or are multiplied by it."""

    def __init__(self, weight: Tensor, straight_through: bool) -> None:
        super().__init__(torch.ones_like(weight))
        self.straight_through = straight_through

    def forward(self, original: Tensor) -> Tensor:
        """Returns original * mask."""
        if self.straight_through:
            product: Tensor = _StraightThrough.apply(original, self.mask)
            return product
        return super().forward(original)


class _TwoMasks(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, back: Tensor) -> Tensor:
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, back = ctx.saved_tensors
        to_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        return gradient @ (weight * back), to_weight, None


class BackwardMask:
    """A linear layer's forward with another N:M mask in the backward pass: Bi-Mask (Zhang et al., 2023, section 3).

    The gradient of the input is dy (weight * back). `back` keeps n of every m rows in a column, in another order of the rows.
    Of `candidates` random orders it takes the one with the most groups that already have at most n nonzeros.
    """

    def __init__(self, layer: nn.Linear, pattern: NM, candidates: int = 100) -> None:
        self.layer, self.pattern, self.candidates = layer, pattern, candidates
        layer.register_buffer("backward_mask", torch.ones_like(layer.weight.detach()), persistent=False)
        layer.forward = self.forward  # type: ignore[method-assign, assignment]

    def forward(self, x: Tensor) -> Tensor:
        """Computes the layer's result."""
        layer: Any = self.layer
        weight, back = layer.weight, layer.backward_mask
        if x.dim() == 1:
            return self.forward(x[None])[0]
        product: Tensor = _TwoMasks.apply(*map(as_autocast, (x, weight, back)))
        return product if layer.bias is None else product + layer.bias.to(product.dtype)

    @torch.no_grad()
    def choose(self, weight: Tensor, generator: torch.Generator) -> None:
        """Computes the backward mask anew, from a weight under its forward mask [outputs, inputs]."""
        sizes, best, order = weight.abs(), -1, torch.arange(len(weight))
        for _ in range(self.candidates):
            tried = torch.randperm(len(weight), generator=generator)
            eligible = self.eligible(sizes[tried.to(weight.device)])
            if eligible > best:
                best, order = eligible, tried.to(weight.device)
        mask = torch.empty_like(sizes, dtype=torch.bool)
        mask[order] = self.pattern.mask(sizes[order].t(), 1).t()
        self.layer.backward_mask.copy_(mask)  # type: ignore[operator]

    def eligible(self, weight: Tensor) -> int:
        """Returns the number of groups of m rows in a column that have at most n nonzeros."""
        groups = F.pad((weight != 0).to(torch.uint8), (0, 0, 0, -len(weight) % self.pattern.m)).unflatten(
            0, (-1, self.pattern.m)
        )
        return int((groups.sum(1) <= self.pattern.n).sum())

    def remove(self) -> None:
        """Restores the layer's own forward."""
        self.layer.__dict__.pop("forward", None)
        self.layer._buffers.pop("backward_mask", None)
        self.layer._non_persistent_buffers_set.discard("backward_mask")


def remove_backward_mask(module: nn.Module) -> None:
    """Restores a module's own forward. The module may be a copy of one that trains with a BackwardMask."""
    own = getattr(vars(module).get("forward"), "__self__", None)
    if isinstance(own, BackwardMask):
        own.remove()
