"""`Mask`: a parametrization that multiplies a weight by a fixed mask; which ones are such, and what they keep."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class Mask(nn.Module):
    """A parametrization that multiplies a tensor by a fixed mask (a buffer of the same shape)."""

    mask: torch.Tensor

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, original: torch.Tensor) -> torch.Tensor:
        """original * mask"""
        return original * self.mask


def is_mask(parametrization: nn.Module) -> bool:
    """Whether a parametrization is a mask: ours, or that of torch.ao.pruning, which holds it before `squash_mask`."""
    kind = type(parametrization)  # torch.ao takes a second to import, and is where such a module is
    return kind is Mask or (kind.__name__ == "FakeSparsity" and kind.__module__.startswith("torch.ao.pruning"))


def is_masked(layer: nn.Module) -> bool:
    """Whether there are masks between the parameter and the weight of a layer, and nothing else."""
    return parametrize.is_parametrized(layer, "weight") and all(map(is_mask, layer.parametrizations["weight"].children()))  # type: ignore[index, union-attr]


def original_of(layer: nn.Module) -> Tensor:
    """The parameter of a weight, under masks or not."""
    if not parametrize.is_parametrized(layer, "weight"):
        return layer.weight  # type: ignore[return-value]
    original: Tensor = layer.parametrizations["weight"].original  # type: ignore[index, union-attr]
    return original


def kept_by_masks(layer: nn.Module) -> Tensor:
    """Where the masks of a weight are not zero."""
    kept, *others = (each.mask != 0 for each in layer.parametrizations["weight"].children())  # type: ignore[index, union-attr]
    for mask in others:
        kept = kept & mask
    return kept


def make_plain(layer: nn.Module) -> None:
    """Multiplies the parametrizations of a weight into it: a plain parameter, the same object, in front of a bias as before."""
    parametrize.remove_parametrizations(layer, "weight")
    parameters = layer._parameters
    layer._parameters = {"weight": parameters["weight"], **parameters}
