"""`Mask`: a parametrization that multiplies a weight by a fixed mask; which others do so too, and what they keep.

A parametrization that somebody else has written is a mask if it makes elements zero that were none: `weight * mask`,
`torch.where(mask, weight, 0)`, the largest elements of a row.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.parametrize import ParametrizationList

from gossamer.sparsity.pruning.parametrizations import register_parametrization, remove_parametrizations
from gossamer.sparsity.torch_functions.check_model import check_model
from gossamer.sparsity.torch_functions.plain_model import evaluating


class Mask(nn.Module):
    """A parametrization that multiplies a tensor by a fixed mask (a buffer of the same shape)."""

    mask: torch.Tensor

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, original: torch.Tensor) -> torch.Tensor:
        """original * mask"""
        return original * self.mask


def is_of_torch_ao(parametrization: nn.Module) -> bool:
    """Whether it is the mask of a sparsifier of torch.ao.pruning, before `squash_mask`."""
    kind = type(parametrization)  # torch.ao takes a second to import, and is where such a module is
    return kind.__name__ == "FakeSparsity" and kind.__module__.startswith("torch.ao.pruning")


def is_masked(layer: nn.Module, name: str = "weight") -> bool:
    """Whether the parametrizations of a tensor make elements zero."""
    return parametrize.is_parametrized(layer, name) and _kept(_chain(layer, name)) is not None


def masked_tensors(module: nn.Module) -> list[str]:
    """The names of the tensors of a module that have a mask as a parametrization."""
    chains: Any = module.parametrizations if parametrize.is_parametrized(module) else {}
    return [name for name in chains if is_masked(module, name)]


def has_mask(module: nn.Module) -> bool:
    """Whether a mask is on any of its tensors: a parametrization, or what torch.nn.utils.prune puts there."""
    return bool(masked_tensors(module) or _pruning_hooks(module))


def is_pruned_by_hook(module: nn.Module, name: str = "weight") -> bool:
    """Whether torch.nn.utils.prune has put a hook on a tensor."""
    return name in _pruning_hooks(module).values()


def parametrize_pruned(model: nn.Module) -> None:
    """Replace the hooks of torch.nn.utils.prune by masks, in place."""
    check_model(model)
    for module in list(model.modules()):
        for hook_id, name in _pruning_hooks(module).items():
            del module._forward_pre_hooks[hook_id]
            _parametrize(module, name)


def _parametrize(module: nn.Module, name: str) -> None:
    """Replace what torch.nn.utils.prune left of parameter `name` by the parameter under a mask."""
    original = module._parameters.pop(f"{name}_orig")
    mask = module._buffers.pop(f"{name}_mask")
    assert original is not None and mask is not None
    if hasattr(module, name):
        delattr(module, name)
    module.register_parameter(name, original)
    register_parametrization(module, name, Mask(mask))


def _pruning_hooks(module: nn.Module) -> dict[int, str]:
    """By their numbers, the names of the tensors that such hooks make."""
    hooks = module._forward_pre_hooks.items()
    return {number: hook._tensor_name for number, hook in hooks if isinstance(hook, prune.BasePruningMethod)}


def original_of(layer: nn.Module, name: str = "weight") -> Tensor:
    """The parameter of a weight, under masks or not."""
    if not parametrize.is_parametrized(layer, name):
        return getattr(layer, name)
    return _originals(_chain(layer, name))[0]


def has_one_original(layer: nn.Module, name: str = "weight") -> bool:
    """Whether a parametrized tensor is made of one parameter, which an optimizer goes on with when it becomes plain."""
    return bool(_chain(layer, name).is_tensor)


def kept_by_masks(layer: nn.Module, name: str = "weight") -> Tensor:
    """Where the masks of a weight leave it."""
    kept = _kept(_chain(layer, name))
    assert kept is not None, "it has masks"
    return kept


def _chain(layer: nn.Module, name: str) -> ParametrizationList:
    return layer.parametrizations[name]  # type: ignore[index, return-value]


def _originals(chain: ParametrizationList) -> list[Tensor]:
    """The parameters that it starts from; all but one kind of parametrization have one."""
    return [chain.original] if chain.is_tensor else [getattr(chain, f"original{n}") for n in range(chain.ntensors)]


@torch.no_grad()
def _kept(chain: ParametrizationList) -> Tensor | None:
    """Where parametrizations leave a tensor; None if they make nothing zero."""
    steps = list(chain.children())
    known = [isinstance(each, Mask) or is_of_torch_ao(each) for each in steps]
    if all(known):
        masks: list[Any] = [each.mask for each in steps]
        return torch.stack([mask != 0 for mask in masks]).all(0)
    if all(type(each).__module__ == parametrizations.__name__ for each in steps):  # norms, orthogonal matrices
        return None
    first, *others = _originals(chain)
    if first.is_meta:
        return None
    try:
        with evaluating(chain):
            value = steps[0](_without_zeros(first), *others)  # zeros that were there tell nothing
            for each in steps[1:]:
                value = each(value)
    except Exception:  # of a function that takes other tensors
        return None
    kept: Tensor = value != 0
    changes = any(known) or not bool(kept.all())
    return kept if changes and kept.shape == first.shape else None


def _without_zeros(tensor: Tensor) -> Tensor:
    """Zeros become smaller than all else, so that a mask that keeps the largest elements goes on keeping them."""
    sizes = tensor.abs()
    least = torch.where(sizes == 0, torch.inf, sizes).amin() if tensor.numel() else sizes.sum()
    return torch.where(sizes == 0, least / 2 if least.isfinite() else 1, tensor)


def make_plain(layer: nn.Module, name: str = "weight", *, keep_value: bool = True) -> None:
    """Multiplies the parametrizations of a weight into it, or takes them off: a plain parameter, the same object, in front of
    a bias as before."""
    remove_parametrizations(layer, name, keep_value=keep_value)
    if name in layer._parameters:  # no buffer
        layer._parameters = {name: layer._parameters[name], **layer._parameters}
