"""Gradual magnitude pruning (Zhu and Gupta, 2017), as steps beside an optimizer.

sparsity(step) = final + (first - final) (1 - step / last)^3
"""

from typing import Any

import torch
from torch import nn

from gossamer.dialects.errors import OptionError
from gossamer.runtime.nonzeros import nonzero_mask
from gossamer.sparsity.pruning.choose_layers import Layers
from gossamer.sparsity.pruning.layers import layers_of
from gossamer.sparsity.pruning.patterns import Unstructured

_RISES = 0.7
"""The share of the steps in which sparsity rises; the rest is for recovery."""


class GradualMasks:
    """Masks of a model's layers; call `step` after each step of an optimizer.

    Zeros stay zeros. With a `sparsity`, each layer goes from its own to that one over the first 70 % of `steps`, by magnitude,
    every `every` steps. A layer that is sparser already stays as it is.
    """

    def __init__(
        self, model: nn.Module, sparsity: float | None = None, *, steps: int = 1, every: int = 10, only: Layers | None = None,
        skip: Layers = (),
    ) -> None:  # fmt: skip
        if sparsity is not None and not 0 < sparsity < 1:
            raise OptionError(f"sparsity is {sparsity}, must be above 0 and below 1")
        if min(steps, every) < 1:
            raise OptionError(f"steps is {steps} and every {every}, must be at least 1")
        self._weights = [layer.module.weight for layer in layers_of(model, only, skip)]
        self._masks = [nonzero_mask(weight) for weight in self._weights]  # type: ignore[arg-type]
        self._first = [1 - float(mask.float().mean()) for mask in self._masks]
        self._final, self._last, self._every = sparsity, max(1, round(_RISES * steps)), every
        self._step = 0

    @torch.no_grad()
    def step(self) -> None:
        """Puts the masks on the weights, after they have become sparser where it is time."""
        self._step += 1
        at = min(self._step, self._last)
        if self._final is not None and self._step <= self._last and (at % self._every == 0 or at == self._last):
            left = (1 - at / self._last) ** 3
            for i, weight in enumerate(self._weights):
                wanted = self._final + (self._first[i] - self._final) * left
                if wanted > self._first[i]:
                    scores = weight.abs() * self._masks[i]  # type: ignore[operator]
                    self._masks[i] = Unstructured().mask(scores, 1 - wanted) & self._masks[i]
        for weight, mask in zip(self._weights, self._masks, strict=True):
            weight.mul_(mask)  # type: ignore[operator]

    def callback(self) -> Any:
        """A `transformers.TrainerCallback` that steps after each step of the optimizer."""
        from transformers import TrainerCallback

        masks = self

        class KeepsSparse(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                masks.step()

        return KeepsSparse()
