"""`Mask` is a parametrization that multiplies a weight by a fixed mask. This file also finds other masks, and what they keep.

A parametrization of the user counts as a mask if it sets nonzero elements to zero: `weight * mask`,
`torch.where(mask, weight, 0)`, or a function that keeps the largest elements of each row.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
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
        """Returns original * mask."""
        return original * self.mask


def is_of_torch_ao(parametrization: nn.Module) -> bool:
    """Whether a parametrization is the mask of a sparsifier of torch.ao.pruning, before `squash_mask`."""
    kind = type(parametrization)  # compared by name, because importing torch.ao takes a second
    return kind.__name__ == "FakeSparsity" and kind.__module__.startswith("torch.ao.pruning")


def is_masked(layer: nn.Module, name: str = "weight") -> bool:
    """Whether the parametrizations of a tensor set elements to zero."""
    return parametrize.is_parametrized(layer, name) and _kept(_chain(layer, name)) is not None


def parametrized_tensors(module: nn.Module) -> list[str]:
    """Returns the names of a module's tensors that have parametrizations."""
    chains: Any = module.parametrizations if parametrize.is_parametrized(module) else {}
    return [*chains]


def masked_tensors(module: nn.Module) -> list[str]:
    """Returns the names of a module's tensors that have a mask as a parametrization."""
    return [name for name in parametrized_tensors(module) if is_masked(module, name)]


def has_mask(module: nn.Module) -> bool:
    """Whether any tensor of a module has a mask: a parametrization, or a hook of torch.nn.utils.prune."""
    return bool(masked_tensors(module) or pruning_hooks(module))


def is_pruned_by_hook(module: nn.Module, name: str = "weight") -> bool:
    """Whether torch.nn.utils.prune has put a hook on a tensor."""
    return any(hook._tensor_name == name for hook in pruning_hooks(module).values())


def parametrize_pruned(model: nn.Module) -> None:
    """Replaces the hooks of torch.nn.utils.prune by masks, in place."""
    check_model(model)
    for module in list(model.modules()):
        for hook_id, hook in pruning_hooks(module).items():
            del module._forward_pre_hooks[hook_id]
            _parametrize(module, hook._tensor_name)


def _parametrize(module: nn.Module, name: str) -> None:
    """Replaces `<name>_orig` and `<name>_mask` of torch.nn.utils.prune by a parameter `name` under a mask."""
    original = module._parameters.pop(f"{name}_orig")
    mask = module._buffers.pop(f"{name}_mask")
    assert original is not None and mask is not None
    if hasattr(module, name):
        delattr(module, name)
    module.register_parameter(name, original)
    register_parametrization(module, name, Mask(mask))


def pruning_hooks(module: nn.Module) -> dict[int, Any]:
    """Returns the hooks of torch.nn.utils.prune by their ids. The attribute `_tensor_name` of each names its tensor."""
    return {number: hook for number, hook in module._forward_pre_hooks.items() if isinstance(hook, prune.BasePruningMethod)}


def original_of(layer: nn.Module, name: str = "weight") -> Tensor:
    """Returns the parameter of a weight: masked, pruned by a hook, or neither."""
    if is_pruned_by_hook(layer, name):
        return getattr(layer, f"{name}_orig")
    if not parametrize.is_parametrized(layer, name):
        return getattr(layer, name)
    return _originals(_chain(layer, name))[0]


def has_one_original(layer: nn.Module, name: str = "weight") -> bool:
    """Whether a parametrized tensor has one parameter. An optimizer keeps training that one after the masks are removed."""
    return bool(_chain(layer, name).is_tensor)


def kept_by_masks(layer: nn.Module, name: str = "weight") -> Tensor:
    """Returns where the masks of a weight keep elements."""
    kept = _kept(_chain(layer, name))
    assert kept is not None, "it has masks"
    return kept


def _chain(layer: nn.Module, name: str) -> ParametrizationList:
    return layer.parametrizations[name]  # type: ignore[index, return-value]


def _originals(chain: ParametrizationList) -> list[Tensor]:
    """Returns the parameters that a chain of parametrizations starts from, usually one."""
    return [chain.original] if chain.is_tensor else [getattr(chain, f"original{n}") for n in range(chain.ntensors)]


@torch.no_grad()
def _kept(chain: ParametrizationList) -> Tensor | None:
    """Returns where parametrizations keep elements of a tensor, None if they set none to zero."""
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
            value = steps[0](_without_zeros(first), *others)  # zeros of the original say nothing about the mask
            for each in steps[1:]:
                value = each(value)
    except Exception:  # a function that takes other tensors
        return None
    kept: Tensor = value != 0
    changes = any(known) or not bool(kept.all())
    return kept if changes and kept.shape == first.shape else None


def _without_zeros(tensor: Tensor) -> Tensor:
    """Replaces zeros by numbers smaller than all others, so that a mask of the largest elements stays the same."""
    sizes = tensor.abs()
    least = torch.where(sizes == 0, torch.inf, sizes).amin() if tensor.numel() else sizes.sum()
    return torch.where(sizes == 0, least / 2 if least.isfinite() else 1, tensor)


def uses_of(modules: Iterable[nn.Module]) -> Counter[int]:
    """Counts the modules that have a parameter, by the parameter's id. One that has it under a mask counts, too."""
    return Counter(id(parameter) for module in modules for parameter in module._parameters.values() if parameter is not None)


def make_plain(layer: nn.Module, name: str = "weight", *, keep_value: bool = True) -> None:
    """Makes a parametrized weight a plain parameter again, the same object, before the bias in the module's order.

    keep_value  whether it gets the value that the parametrizations compute, or keeps that of the parameter
    """
    remove_parametrizations(layer, name, keep_value=keep_value)
    if name in layer._parameters:  # no buffer
        layer._parameters = {name: layer._parameters[name], **layer._parameters}


def make_plain_together(holders: Sequence[tuple[nn.Module, str]], *, shared: bool = False) -> None:
    """Makes the parametrized weights of modules that share a parameter plain.

    Those that have the same value share the parameter again, others get one of their own. `shared` says that another module
    uses the parameter itself, so that all get others.
    """
    if len(holders) == 1 and not shared:
        make_plain(*holders[0])
        return
    original = original_of(*holders[0])
    with torch.inference_mode(False):  # parameters that were made within it could never train
        values = [getattr(module, name).detach().clone() for module, name in holders]
    made = list[tuple[Tensor, Tensor]]()
    for (module, name), value in zip(holders, values, strict=True):
        make_plain(module, name, keep_value=False)
        own = next((parameter for other, parameter in made if other.is_meta or torch.equal(other, value)), None)
        if own is None:
            own = original if not made and not shared else nn.Parameter(value, original.requires_grad)
            made.append((value, own))
        setattr(module, name, own)
    if not shared:
        with torch.no_grad():
            original.copy_(values[0])


def make_plain_within(model: nn.Module, tensors: Iterable[tuple[nn.Module, str]]) -> None:
    """Makes parametrized tensors of a model plain, given as modules and names. All other tensors keep their values.

    A tensor whose parameter another module uses without the mask, or with another mask, gets a parameter of its own.
    """
    uses, holders = uses_of(model.modules()), dict[int, list[tuple[nn.Module, str]]]()
    for module, name in tensors:
        if has_one_original(module, name):
            holders.setdefault(id(original_of(module, name)), []).append((module, name))
        else:
            make_plain(module, name)
    for original, together in holders.items():
        make_plain_together(together, shared=uses[original] > len(together))
