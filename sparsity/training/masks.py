"""Computes the masks of a model's layers by a recipe, step after step. `train_sparse` calls it from hooks of the optimizer."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.dialects.errors import OptionError
from gossamer.runtime.packers.nonzeros import count_nonzeros, nonzero_mask
from gossamer.sparsity.pruning.layers import Layer
from gossamer.sparsity.pruning.mask import is_masked, make_plain
from gossamer.sparsity.pruning.parametrizations import register_parametrization
from gossamer.sparsity.pruning.patterns import Unstructured
from gossamer.sparsity.training.distributions import densities
from gossamer.sparsity.training.foresight import Foresight
from gossamer.sparsity.training.latent import BackwardMask, LatentWeight
from gossamer.sparsity.training.masked import Masked
from gossamer.sparsity.training.recipe import Recipe
from gossamer.sparsity.training.schedules import Exchange
from gossamer.sparsity.training.sharded_weight import ShardedWeight
from gossamer.sparsity.training.stored_weight import StoredWeight

_MEMORY = 0.9
"""The factor of the old mean of squared gradients at each step; the new squares get the rest."""


class Masks:
    """The masks of a recipe. `advance` computes them anew at due steps, and `apply` sets pruned weights to zero.

    together  a function that sums a tensor over all processes that train the model, so that all make the same masks. Stored
              weights have their own
    kept      by the name of a layer, the elements that its masks kept before; other layers keep their nonzeros
    """

    def __init__(
        self, layers: Sequence[Layer | ShardedWeight | StoredWeight], recipe: Recipe, seed: int = 0,
        together: Callable[[Tensor], Any] | None = None, kept: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.recipe, self.together, self._kept = recipe, together, kept
        for layer in layers if recipe.sparsifier.backward_mask else ():
            _check_backward(layer)
        self.generator = torch.Generator().manual_seed(seed)
        self.layers = [layer if isinstance(layer, StoredWeight) else self._masked(layer) for layer in layers]
        self.foresight = Foresight(recipe, self.layers, self._densities)

    def _masked(self, layer: Layer | ShardedWeight) -> Masked:
        sparsifier = self.recipe.sparsifier
        if isinstance(layer, ShardedWeight):
            masked: Masked = layer
        else:
            kept = self._kept.get(layer.name)
            mask = nonzero_mask(layer.parameter) if kept is None else kept
            masked = Masked(layer.name, layer.module, layer.parameter, mask, layer.weight_name, sharers=layer.sharers)
        if sparsifier.pruned != "stay" or sparsifier.grows or not count_nonzeros(masked.mask):
            masked.mask = torch.ones_like(masked.mask)
        masked.first = 1 - masked.density
        if sparsifier.backward_mask:
            masked.back = BackwardMask(layer.module, self.recipe.rule)  # type: ignore[arg-type]
        if sparsifier.is_latent:
            masked.latent = LatentWeight(masked.parameter.detach(), sparsifier.pruned == "train")
            for module, name in masked.holders:
                register_parametrization(module, name, masked.latent)
        return masked

    @torch.no_grad()
    def advance(self, step: int) -> bool:
        """Computes new masks if a step is due. Returns whether it was."""
        schedule, sparsifier = self.recipe.schedule, self.recipe.sparsifier
        due = schedule.is_due(step) and sparsifier.saliency != "zeros"
        if due and (moved := schedule.exchanged(step)):
            for layer, density in zip(self.layers, self._densities(step), strict=True):
                self._exchange(layer, density, moved, step)
        elif due:
            scores = [self._scores(layer, step) for layer in self.layers]
            for layer, score, density in zip(self.layers, scores, self._densities(step, scores), strict=True):
                layer.mask = layer.unfolded(self._new_mask(layer, score, density, step)).contiguous()
        fading = schedule.fading(step) if sparsifier.pruned == "fade" else 0.0
        for layer in self.layers:
            layer.dense = None
            if layer.latent is not None:
                layer.latent.mask.copy_(layer.mask)
                if fading:
                    layer.latent.mask.masked_fill_(~layer.mask, fading)
            if layer.back is not None and step % sparsifier.backward_mask == 0:
                layer.back.choose(layer.matrix(layer.parameter * layer.mask), self.generator)
        self.foresight.advance(step, due)
        return due

    def _new_mask(self, layer: Masked, scores: Tensor, density: float, step: int) -> Tensor:
        if isinstance(layer, StoredWeight) and isinstance(self.recipe.schedule, Exchange):
            return layer.matrix(layer.mask)  # only stored elements have values
        mask = self.recipe.at(step).mask(scores, density)
        return mask & layer.matrix(layer.mask) if self._stays else mask

    def _exchange(self, layer: Masked, density: float, moved: float, step: int) -> None:
        """Moves a share of a layer's nonzeros; none if the layer is frozen or got no gradient."""
        pattern = self.recipe.at(step)
        if not layer.parameter.requires_grad:
            return
        if self.recipe.sparsifier.grows == "random":
            grown = self._random(layer)
        else:
            gradient = layer.seen()
            self._sum_up(layer, gradient)
            grown = layer.matrix(layer.whole(gradient)).abs()
            if not grown.any():
                return
        if isinstance(layer, StoredWeight) and isinstance(pattern, Unstructured):
            layer.exchange(density * (1 - moved), grown)
            return
        kept = pattern.mask(self._scores(layer, step), density * (1 - moved))
        layer.mask = layer.unfolded(pattern.mask(torch.where(kept, torch.inf, grown), density)).contiguous()

    def _sum_up(self, layer: Masked, tensor: Tensor) -> None:
        """Sums a tensor over all processes that train the layer."""
        if isinstance(layer, StoredWeight):
            layer.sum_up(tensor)
        elif self.together is not None:
            self.together(tensor)

    @property
    def _stays(self) -> bool:
        """Whether a zero stays zero for ever."""
        return self.recipe.sparsifier.pruned == "stay" and self.recipe.sparsifier.grows is None

    def _scores(self, layer: Masked, step: int) -> Tensor:
        """Returns the scores of all elements [outputs, inputs], below 0 for elements that cannot be kept."""
        saliency, grows = self.recipe.sparsifier.saliency, self.recipe.sparsifier.grows
        weight = layer.matrix(layer.weight())
        if saliency == "random" or (grows and not step):
            return self._random(layer)
        if saliency == "magnitude":
            scores = weight.abs()
        else:
            if layer.squares is None:
                raise OptionError(
                    f"no gradient has come to '{layer.name}' by step {step}, and saliency '{saliency}' is one of gradients: "
                    "begin later, or `skip` it"
                )
            squares = layer.whole(layer.squares).clone()
            self._sum_up(layer, squares)
            scores = layer.matrix(squares)
            scores = scores if saliency == "first-order" else 0.5 * weight.square() * scores
        return torch.where(layer.matrix(layer.mask), scores, -1.0) if self._stays or grows else scores

    def _random(self, layer: Masked) -> Tensor:
        scores = torch.rand(layer.matrix(layer.mask).shape, generator=self.generator)
        return scores.to(layer.parameter.device)

    def _densities(self, step: int, scores: Sequence[Tensor] = ()) -> list[float]:
        """Returns the density that each layer shall have at a step."""
        recipe = self.recipe
        final = 0.0 if recipe.sparsity is None else recipe.sparsity
        if recipe.distribution == "global":
            total = sum(layer.parameter.numel() for layer in self.layers)
            first = sum(layer.first * layer.parameter.numel() for layer in self.layers) / total
            sparsity = max(first, recipe.schedule.sparsity(step, first, final))
            return densities("global", [layer.sizes for layer in self.layers], 1 - sparsity, scores)
        wanted = densities(recipe.distribution, [layer.sizes for layer in self.layers], 1 - final)
        if isinstance(recipe.schedule, Exchange):  # the number of nonzeros of a stored weight is fixed
            wanted = [
                layer.density if isinstance(layer, StoredWeight) and layer.plain is None else each
                for layer, each in zip(self.layers, wanted, strict=True)
            ]
        return [
            1 - recipe.schedule.sparsity(step, layer.first, max(layer.first, 1 - each))
            for layer, each in zip(self.layers, wanted, strict=True)
        ]

    @torch.no_grad()
    def apply(self, step: int) -> None:
        """Sets pruned weights to zero, if they shall be zero after this step."""
        pruned, schedule = self.recipe.sparsifier.pruned, self.recipe.schedule
        if pruned == "stay" or (pruned == "return" and (schedule.is_due(step) or step >= schedule.end)):
            for layer in self.layers:
                layer.set_to_zero()

    @torch.no_grad()
    def observe(self, scale: float) -> None:
        """Updates the saliencies by the gradients of a step, divided by `scale`."""
        saliency = self.recipe.sparsifier.saliency
        if saliency not in ("first-order", "second-order"):
            return
        for layer in self.layers:
            if layer.parameter.grad is None:
                continue
            gradient = layer.parameter.grad / scale
            squares = (gradient * layer.parameter if saliency == "first-order" else gradient).square()
            layer.squares = squares if layer.squares is None else layer.squares.lerp(squares, 1 - _MEMORY)

    def remove(self) -> None:
        """Removes all masks, and leaves plain weights with zeros."""
        self.foresight.end()
        for layer in self.layers:
            if layer.latent is not None:
                with torch.no_grad():
                    layer.latent.mask.copy_(layer.mask)
                for module, name in layer.holders:
                    if is_masked(module, name):  # else somebody has made it plain
                        make_plain(module, name)
            else:
                with torch.no_grad():
                    layer.set_to_zero()
            if layer.back is not None:
                layer.back.remove()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that training needs to go on, besides those of the model and the optimizer."""
        layers = {
            layer.name: {
                "mask": layer.mask.clone(),
                "first": layer.first,
                "squares": None if layer.squares is None else layer.whole(layer.squares).clone(),
                "backward": None if layer.back is None else layer.module.backward_mask.clone(),  # type: ignore[operator]
            }
            for layer in self.layers
        }
        foresight = self.foresight.state_dict()
        return {"layers": layers, "generator": self.generator.get_state(), "recipe": repr(self.recipe), "foresight": foresight}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state. OptionError if it is of another recipe or of other layers."""
        if state["recipe"] != repr(self.recipe):
            raise OptionError(f"the state is of {state['recipe']}, this is {self.recipe!r}: attach the same recipe")
        shapes = {layer.name: layer.mask.shape for layer in self.layers}
        if {name: each["mask"].shape for name, each in state["layers"].items()} != shapes:
            raise OptionError(f"the state is of layers {', '.join(state['layers'])}, these are {', '.join(shapes)}")
        self.generator.set_state(state["generator"])
        for layer in self.layers:
            saved = state["layers"][layer.name]
            layer.mask = saved["mask"].to(layer.parameter.device)
            layer.first, layer.dense = saved["first"], None
            layer.keep(saved["squares"])
            if layer.back is not None:
                layer.module.backward_mask.copy_(saved["backward"])  # type: ignore[operator]
        self.foresight.load_state_dict(state["foresight"])


def _check_backward(layer: Layer | Masked) -> None:
    """OptionError for a layer that cannot have a BackwardMask."""
    kind, names = type(layer.module).__name__, ", ".join(f"'{each.name}'" for each in layer.sharers)
    if not isinstance(layer.module, nn.Linear):
        raise OptionError(f"'{layer.name}' is a {kind}: Bi-Mask is for linear layers, `skip` it")
    if names:
        raise OptionError(f"'{layer.name}' shares its weight with {names}: Bi-Mask has a mask for one layer, `skip` the others")
