"""When what is compiled takes the layers of a recipe as sparse, and what for: for what they will be when it is through.

all layers 50 %, 25 %, 12.5 %, … dense, or the schedule at its end     →    layers at most 50 % dense by then are ripe

Until then a layer is compiled as the dense one that it is. Once it is ripe it is compiled anew, for its last mask as far as
that can be told: what becomes sparser still needs no other code. So there are a few compilations in a training.
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
    """Of the layers under a recipe.

    densities  what layers are to have at a step, by the scores of their elements
    """

    def __init__(
        self, recipe: Recipe, layers: Sequence[Masked], densities: Callable[[int, Sequence[Tensor]], list[float]]
    ) -> None:
        self._recipe, self._layers, self._densities = recipe, layers, densities
        self._ripe: set[Masked] = set()  # as they are, or were before they were stored
        self._halvings, self._step = 0, 0
        self._final: list[float] | None = None  # for plans of this step
        self.advance(0, changed=True, anew=False)
        at_work.add(self)

    def is_ripe(self, layer: Masked) -> bool:
        """Whether it is taken as sparse."""
        return _plain(layer) in self._ripe

    def advance(self, step: int, changed: bool, anew: bool = True) -> None:
        """After masks were made for a step, or not; `anew` where what is compiled has seen them denser."""
        self._step, self._final = step, None
        ends = step >= self._recipe.schedule.end
        is_dense = self._recipe.sparsifier.pruned in ("fade", "return") and not ends  # whatever its mask is
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
        """What `load_state_dict` goes on from."""
        return {"ripe": [layer.name for layer in self._layers if self.is_ripe(layer)], "halvings": self._halvings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the layers for ripe that were so then."""
        self._ripe, self._halvings, self._final = set(), state["halvings"], None
        self._ripen((layer for layer in self._layers if layer.name in state["ripe"]), anew=True)

    def end(self) -> None:
        """Plans are made for tensors as they are."""
        at_work.discard(self)

    def foresee(self, tensor: Tensor) -> Tensor | None:
        """See `foreseen`."""
        for layer in self._layers:
            if tensor is (layer.parameter if layer.latent is None else layer.latent.mask):
                falls = self._step < self._recipe.schedule.end and self._recipe.sparsifier.grows is None
                known = not any(isinstance(each, ShardedWeight) for each in self._layers)  # whose parts no compiler gathers
                return self._at_the_end(layer) if falls and known and self.is_ripe(layer) else tensor
        return None

    def _at_the_end(self, layer: Masked) -> Tensor:
        """The weight of a layer then, or what multiplies it."""
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
    """Has Dynamo compile what uses a tensor once more: it goes by the marks that it has."""
    if "torch._dynamo" in sys.modules:
        from gossamer.runtime.torch_internals import mark_static

        mark_static(tensor, 0)
