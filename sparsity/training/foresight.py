"""Decides when compiled code treats the layers of a recipe as sparse, and for which mask it is planned: the final one.

all layers together 50 %, 25 %, 12.5 %, … dense, or the schedule ends     →    layers of at most 50 % density become ripe

Before that, a layer is compiled as a dense one. Once it is ripe it is compiled anew, for its final mask as far as that can be
predicted. It needs no other code when it becomes sparser. So a training has only a few compilations.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from math import log2
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.runtime.foreseen import at_work
from gossamer.sparsity.pruning.stored_layers import DENSEST
from gossamer.sparsity.training.masked import Masked
from gossamer.sparsity.training.recipe import Recipe
from gossamer.sparsity.training.sharded_weight import ShardedWeight
from gossamer.sparsity.training.stored_weight import StoredWeight


class Foresight:
    """Which layers of a recipe are ripe, and their predicted final weights.

    densities  a function of a step and the elements' scores that returns the density of each layer
    """

    def __init__(
        self, recipe: Recipe, layers: Sequence[Masked], densities: Callable[[int, Sequence[Tensor]], list[float]]
    ) -> None:
        self._recipe, self._layers, self._densities = recipe, layers, densities
        self._ripe: set[Masked] = set()  # the plain layers, also of layers that are stored meanwhile
        self._halvings, self._step = 0, 0
        self._final: list[float] | None = None  # final densities, computed once per step
        self.advance(0, changed=True, anew=False)
        at_work.add(self)

    def is_ripe(self, layer: Masked) -> bool:
        """Whether compiled code treats a layer as sparse."""
        return _plain(layer) in self._ripe

    def advance(self, step: int, changed: bool, anew: bool = True) -> None:
        """Finds layers that have become ripe after a step. `changed`: masks are new; `anew`: compile the ripe layers again."""
        self._step, self._final = step, None
        ends = step >= self._recipe.schedule.end
        is_dense = self._recipe.sparsifier.pruned in ("fade", "return") and not ends  # its weights are not zero yet
        if is_dense or not changed:
            return
        elements = sum(layer.mask.numel() for layer in self._layers)
        density = sum(layer.density * layer.mask.numel() for layer in self._layers) / max(1, elements)
        halvings = int(min(-log2(density), 64)) if density else 64
        if halvings > self._halvings or ends:
            self._halvings = halvings
            self._ripen((layer for layer in self._layers if layer.density <= DENSEST), anew)

    def _ripen(self, layers: Iterable[Masked], anew: bool) -> None:
        for layer in {_plain(layer) for layer in layers} - self._ripe:
            self._ripe.add(layer)
            if anew and not isinstance(layer, StoredWeight):
                _compile_anew(layer.parameter if layer.latent is None else layer.latent.mask)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for `load_state_dict`."""
        return {"ripe": [layer.name for layer in self._layers if self.is_ripe(layer)], "halvings": self._halvings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the layers ripe that were ripe in the state."""
        self._ripe, self._halvings, self._final = set(), state["halvings"], None
        self._ripen((layer for layer in self._layers if layer.name in state["ripe"]), anew=True)

    def end(self) -> None:
        """Ends it: later plans are made for the tensors as they are."""
        at_work.discard(self)

    def foresee(self, tensor: Tensor) -> Tensor | None:
        """Returns the tensor to plan for in place of a layer's tensor, None for other tensors. See `foreseen`."""
        for layer in self._layers:
            if tensor is (layer.parameter if layer.latent is None else layer.latent.mask):
                falls = self._step < self._recipe.schedule.end and self._recipe.sparsifier.grows is None
                known = not any(isinstance(each, ShardedWeight) for each in self._layers)  # no compiler gathers their parts
                return self._at_the_end(layer) if falls and known and self.is_ripe(layer) else tensor
        return None

    def _at_the_end(self, layer: Masked) -> Tensor:
        """Returns the predicted final weight of a layer, or its final mask if the mask is a parametrization."""
        if self._final is None:
            scores = [_sizes(each) for each in self._layers] if self._recipe.distribution == "global" else ()
            self._final = self._densities(self._recipe.schedule.end, scores)
        final = self._final[self._layers.index(layer)]
        mask = layer.unfolded(self._recipe.at(self._recipe.schedule.end).mask(_sizes(layer), final))
        if layer.latent is not None:
            return mask.to(layer.latent.mask.dtype)
        made = layer.kept(mask) if isinstance(layer, StoredWeight) else layer.parameter.detach() * mask
        return nn.Parameter(made, layer.parameter.requires_grad)


def _plain(layer: Masked) -> Masked:
    return layer.plain or layer if isinstance(layer, StoredWeight) else layer


def _sizes(layer: Masked) -> Tensor:
    return torch.where(layer.matrix(layer.mask), layer.matrix(layer.weight()).abs(), -1.0)


def _compile_anew(tensor: Tensor) -> None:
    """Makes Dynamo compile code that uses a tensor again. It guards on the marks of tensors, so a new mark is enough."""
    if "torch._dynamo" in sys.modules:
        from gossamer.runtime.torch_internals import mark_static

        mark_static(tensor, 0)
