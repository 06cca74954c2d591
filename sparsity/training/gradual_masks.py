"""`GradualMasks` keeps and adds zeros in training loops that call each of its steps (Zhu and Gupta, 2017)."""

from typing import Any

from torch import nn

from gossamer.dialects.option_check import check_least, check_share
from gossamer.sparsity.pruning.choose_layers import Layers
from gossamer.sparsity.pruning.layers import layers_of, once_each
from gossamer.sparsity.pruning.stored_layers import is_stored
from gossamer.sparsity.training.masks import Masks
from gossamer.sparsity.training.recipe import Recipe, Sparsifier
from gossamer.sparsity.training.recipes import recipe_of
from gossamer.sparsity.training.schedules import once


class GradualMasks:
    """Masks that keep the zeros of a model's layers, for a training loop that calls `step()` after each step of the optimizer.

    `train_sparse` does the same without such calls. Prefer it if you can pass it the optimizer.

    model      its zeros stay. Weights of `store_sparse` need no mask and are left out
    sparsity   None keeps the zeros as they are. Otherwise each layer goes to this share of zeros by magnitude, over the first
               70 % of `steps`, every `every` steps (the recipe "gradual"). A sparser layer stays as it is
    only, skip which layers, as for `sparsify`
    """

    def __init__(
        self, model: nn.Module, sparsity: float | None = None, *, steps: int = 1, every: int = 10, only: Layers | None = None,
        skip: Layers = (),
    ) -> None:  # fmt: skip
        if sparsity is not None:
            check_share("sparsity", sparsity)
        check_least("steps", steps, 1, integer=True)
        check_least("every", every, 1, integer=True)
        kept = Recipe(Sparsifier("zeros"), once())
        recipe = kept if sparsity is None else recipe_of("gradual", steps, sparsity=sparsity, every=every)
        layers = layers_of(model, only, skip, (nn.MultiheadAttention,), stored=sparsity is None, experts=True)
        self._masks, self._step = Masks(once_each(layer for layer in layers if not is_stored(layer.module)), recipe), 0

    def step(self) -> None:
        """Computes sparser masks if the step is due, and applies the masks to the weights."""
        self._step += 1
        self._masks.advance(self._step)
        self._masks.apply(self._step)

    def callback(self) -> Any:
        """Returns a `transformers.TrainerCallback` that calls `step()` after each step of the optimizer."""
        from transformers import TrainerCallback

        masks = self

        class KeepsSparse(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                masks.step()

        return KeepsSparse()
