"""`Mask`: a parametrization that multiplies a weight by a fixed mask; which ones are such, and what they keep."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from gossamer.sparsity.calls.check_model import check_model


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


def is_masked(layer: nn.Module, name: str = "weight") -> bool:
    """Whether there are masks between the parameter and the weight of a layer, and nothing else."""
    return parametrize.is_parametrized(layer, name) and all(map(is_mask, layer.parametrizations[name].children()))  # type: ignore[index, union-attr]


def has_mask(module: nn.Module) -> bool:
    """Whether a mask is on any of its tensors: a parametrization, or what torch.nn.utils.prune puts there."""
    chains = module.parametrizations.values() if parametrize.is_parametrized(module) else ()  # type: ignore[operator]
    return any(is_mask(each) for chain in chains for each in chain.children()) or bool(_pruning_hooks(module))


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
    parametrize.register_parametrization(module, name, Mask(mask))


def _pruning_hooks(module: nn.Module) -> dict[int, str]:
    """By their numbers, the names of the tensors that such hooks make."""
    hooks = module._forward_pre_hooks.items()
    return {number: hook._tensor_name for number, hook in hooks if isinstance(hook, prune.BasePruningMethod)}


def original_of(layer: nn.Module, name: str = "weight") -> Tensor:
    """The parameter of a weight, under masks or not."""
    if not parametrize.is_parametrized(layer, name):
        return getattr(layer, name)
    original: Tensor = layer.parametrizations[name].original  # type: ignore[index, union-attr]
    return original


def kept_by_masks(layer: nn.Module, name: str = "weight") -> Tensor:
    """Where the masks of a weight are not zero."""
    kept, *others = (each.mask != 0 for each in layer.parametrizations[name].children())  # type: ignore[index, union-attr]
    for mask in others:
        kept = kept & mask
    return kept


def make_plain(layer: nn.Module, name: str = "weight") -> None:
    """Multiplies the parametrizations of a weight into it: a plain parameter, the same object, in front of a bias as before."""
    parametrize.remove_parametrizations(layer, name)
    parameters = layer._parameters
    layer._parameters = {name: parameters[name], **parameters}
