"""`Masked` is a layer and its mask under a recipe. Masks (masks.py) has one for each layer. `take_masks` takes over others."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.dialects.errors import OptionError
from gossamer.runtime.packers.nonzeros import count_nonzeros
from gossamer.sparsity.pruning.choose_layers import is_transposed
from gossamer.sparsity.pruning.layers import Layer
from gossamer.sparsity.pruning.mask import is_masked, kept_by_masks, make_plain_together, original_of, uses_of
from gossamer.sparsity.torch_functions.open_experts import expert_weights
from gossamer.sparsity.training.latent import BackwardMask, LatentWeight


@dataclass(eq=False)
class Masked:
    """A layer and its mask. Tensors have the weight's shape.

    sharers    other layers with the same parameter, and so with the same mask
    parameter  the trained parameter: the weight, or the parameter under its mask
    first      the sparsity of the weight when training starts
    squares    the mean over steps of (w g)^2 or g^2, if the recipe needs it
    dense      the gradient of all elements, also of pruned ones, in steps before nonzeros grow
    came       whether hooks have got a gradient since the last step of the optimizer
    """

    name: str
    module: nn.Module
    parameter: nn.Parameter
    mask: Tensor
    weight_name: str = "weight"
    first: float = 0.0
    squares: Tensor | None = None
    dense: Tensor | None = None
    came: bool = False
    latent: LatentWeight | None = None
    back: BackwardMask | None = None
    sharers: Sequence[Layer] = ()

    @property
    def holders(self) -> list[tuple[nn.Module, str]]:
        """The modules that have the parameter, and its name in each."""
        return [(self.module, self.weight_name), *((each.module, each.weight_name) for each in self.sharers)]

    @property
    def names(self) -> list[str]:
        """The names of the layer and of its sharers."""
        return [self.name, *(each.name for each in self.sharers)]

    @property
    def density(self) -> float:
        """The share of elements that the mask keeps."""
        return count_nonzeros(self.mask) / self.mask.numel()

    def matrix(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of the weight's shape as a matrix [outputs, inputs], or [experts x outputs, inputs] for experts."""
        if expert_weights(self.module):
            return (tensor.mT if self.module.is_transposed else tensor).flatten(0, 1)
        return tensor.t() if is_transposed(self.module) else tensor.flatten(1)

    def unfolded(self, matrix: Tensor) -> Tensor:
        """Returns a matrix as a tensor of the weight's shape, the inverse of `matrix`."""
        if expert_weights(self.module) and self.module.is_transposed:
            return matrix.view(len(self.parameter), -1, matrix.shape[1]).mT
        return matrix.t() if is_transposed(self.module) else matrix.view(self.parameter.shape)

    def weight(self) -> Tensor:
        """Returns the weight with its pruned elements."""
        return self.parameter.detach()

    def whole(self, tensor: Tensor) -> Tensor:
        """Returns the whole of a tensor, of which this process may have only a part."""
        return tensor

    def set_to_zero(self) -> None:
        """Sets pruned weights to zero."""
        self.restrict(self.parameter)

    @property
    def own_mask(self) -> Tensor:
        """The part of the mask that this process has."""
        return self.mask

    def restrict(self, tensor: Tensor, pruned: float = 0.0) -> None:
        """Sets a tensor of the weight's shape to a number where the weight is pruned."""
        tensor.mul_(self.own_mask)
        if pruned:
            tensor.add_(self.own_mask.logical_not().to(tensor.dtype), alpha=pruned)

    def keep(self, squares: Tensor | None) -> None:
        """Takes over saved squares."""
        self.squares = squares

    def see(self, gradient: Tensor) -> None:
        """Adds a gradient of all elements to the others of the same step, before it is added to `parameter.grad`."""
        self.forget_discarded()
        self.add(gradient)

    def add(self, gradient: Tensor) -> None:
        """Adds a gradient of all elements to those that were not discarded."""
        self.dense = gradient.detach().clone() if self.dense is None else self.dense.add_(gradient.detach())

    def forget_discarded(self) -> None:
        """Forgets the gradients of earlier backward passes if the loop has discarded them since, or if they are not finite."""
        if self.dense is not None and (self._is_discarded(self.dense) or not bool(self.whole(self.dense).isfinite().all())):
            self.dense = None

    def _is_discarded(self, dense: Tensor) -> bool:
        """Whether `parameter.grad` is gone, or zero although it had nonzeros, before the next gradient is added to it."""
        gradient = self.parameter.grad
        return gradient is None or (not self._has_nonzeros(gradient) and bool(dense[self.mask].any()))

    def _has_nonzeros(self, gradient: Tensor) -> bool:
        return bool(gradient.any())

    @torch.no_grad()
    def take_assigned(self, grows: bool) -> None:
        """Does what hooks do, for a gradient that came without them: the loop has computed it by torch.func and assigned it.

        grows  whether nonzeros grow after this step. A gradient that is zero at all pruned elements does not say where
        """
        gradient, came = self.parameter.grad, self.came
        self.came = False
        if gradient is None or came:
            return
        if 0 in gradient.stride():  # an expanded tensor, which nobody can write to
            gradient = self.parameter.grad = gradient.contiguous()
        if grows and bool(self.whole(gradient)[~self.mask].any()):
            self.dense = gradient.clone()
        self.restrict(gradient)

    def seen(self) -> Tensor:
        """Returns the sum of the gradients that `see` got; zeros if it got none."""
        return torch.zeros_like(self.mask, dtype=self.parameter.dtype) if self.dense is None else self.dense

    @property
    def sizes(self) -> tuple[int, ...]:
        """Outputs x inputs x sides of the kernel."""
        shape = tuple(self.parameter.shape)
        return shape[::-1] if is_transposed(self.module) else shape


def take_masks(model: nn.Module, layers: Sequence[Layer]) -> dict[str, Tensor]:
    """Makes masked weights plain. Returns the elements that their masks keep, by the names of layers.

    OptionError for layers that share a weight with another one or with another module, but not its mask.
    """
    found, uses = dict[str, Tensor](), uses_of(model.modules())
    for layer in layers:
        kept = [kept_by_masks(*holder) if is_masked(*holder) else None for holder in layer.holders]
        first = kept[0]
        if all(each is None for each in kept):
            continue
        outside = uses[id(original_of(*layer.holders[0]))] > len(kept)
        if first is None or outside or not all(each is not None and torch.equal(each, first) for each in kept):
            others = ", ".join(f"'{each.name}'" for each in layer.sharers) if not outside else "another module"
            raise OptionError(
                f"'{layer.name}' shares its weight with {others}, but not its mask: `skip` these layers, or call "
                "gossamer.finalize(model) first, which gives each its own weight"
            )
        found[layer.name] = first
    for layer in layers:
        if layer.name in found:
            make_plain_together(layer.holders)
    return found
