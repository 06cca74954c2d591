"""Chooses how dense each layer becomes, so that the model as a whole loses least.

- The loss of a layer at a density is estimated from its Hessian: the sum of w_ij^2 / (H^-1)_jj over the dropped elements, each
  of which is the loss if only that element is dropped (Hassibi and Stork, 1992).
- The effect on the model is measured: one layer at a time is pruned, and the model's output compared.
- A Lagrange multiplier then chooses the densities: each layer minimises loss + price * cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from gossamer.dialects.errors import OptionError
from gossamer.sparsity.pruning.batches import Call
from gossamer.sparsity.pruning.layer_problem import LayerProblem
from gossamer.sparsity.pruning.layers import Layer
from gossamer.sparsity.pruning.patterns import Pattern, mask_of

DENSITIES = tuple(round(0.02 * step, 2) for step in range(1, 51))
"""The densities to choose from; `scaled_to` corrects the choice."""


@dataclass
class Sensitivity:
    """Measures the relative squared change of the model's output for each layer at each of DENSITIES.

    `visit` is for a walk over the dense model, which it leaves unchanged.
    """

    model: nn.Module
    call: Call
    pattern: Pattern
    density: float
    loss: dict[Layer, list[float]] = field(default_factory=dict)
    _output: Tensor | None = None

    def visit(self, layer: Layer, problem: LayerProblem) -> None:
        """Measures one layer."""
        if self._output is None:
            self._output = output_of(self.call.of(self.model))
        scores = problem.weight.square() / problem.curvature.inverse_diagonal.unsqueeze(-2)
        own = [float(scores[~mask_of(self.pattern, scores, density)].sum()) / (problem.power or 1) for density in DENSITIES]
        tried = problem.weight * mask_of(self.pattern, scores, self.density)
        dense = layer.parameters()
        layer.write(tried, problem.bias(tried, layer.bias))
        try:
            changed = output_of(self.call.of(self.model)) - self._output
        finally:
            layer.restore(*dense)
        error = problem.error(tried)
        effect = float(changed.square().sum() / self._output.square().sum().clamp(min=1e-30)) / error if error > 0 else 0.0
        self.loss[layer] = [effect * each for each in own]


def allocate(
    losses: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], *, cost: float = 0, loss: float = 0
) -> list[int]:
    """Returns the index in DENSITIES for each layer.

    All layers together cost at most `cost`, at the smallest loss; or lose at most `loss`, at the smallest cost. OptionError if
    no choice reaches it.
    """

    def chosen(price: float) -> list[int]:
        return [
            min(range(len(layer)), key=lambda i: (layer[i] + price * own[i], own[i]))
            for layer, own in zip(losses, costs, strict=True)
        ]

    def fits(choice: list[int]) -> bool:
        if cost:
            return sum(own[i] for own, i in zip(costs, choice, strict=True)) <= cost
        return sum(own[i] for own, i in zip(losses, choice, strict=True)) <= loss

    cheapest, best = 1e12, 0.0
    if not fits(chosen(cheapest if cost else best)):
        wanted = f"latency of {cost:g}" if cost else f"loss of {loss:g}"
        raise OptionError(f"no choice of densities reaches a {wanted}: give a larger one")
    # as the price rises, costs fall and losses rise
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        inside = fits(chosen(10**middle))
        if bool(cost) == inside:
            high = middle
        else:
            low = middle
    return chosen(10**high if cost else 10**low)


def scaled_to(densities: dict[Layer, float], share: float) -> dict[Layer, float]:
    """Returns the densities times a factor, so that the layers together have exactly this share of nonzeros."""
    sizes = {layer: layer.weight.numel() for layer in densities}
    total = sum(sizes.values())
    low, high = 0.0, 4.0 / share
    for _ in range(60):
        factor = (low + high) / 2
        now = sum(min(1.0, factor * d) * sizes[layer] for layer, d in densities.items()) / total
        low, high = (low, factor) if now > share else (factor, high)
    return {layer: min(1.0, high * d) for layer, d in densities.items()}


def output_of(result: Any) -> Tensor:
    """Returns the first tensor of floats in a model's result, such as logits or hidden states."""
    if isinstance(result, Tensor):
        return result.float()
    values = result.values() if isinstance(result, dict) else result if isinstance(result, tuple | list) else ()
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0:
            return value.float()
    raise OptionError(
        f"the model gives a {type(result).__name__} without a tensor of floats, "
        "which a measurement of sensitivity needs: use budget='uniform' with sparsity"
    )
