"""Finds weights that an old hook of torch.nn.utils, such as `weight_norm`, computes from other parameters at every call."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils import remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_REMOVERS: dict[type, Callable[[Any], Any]] = {WeightNorm: remove_weight_norm, SpectralNorm: remove_spectral_norm}


def remover_of_norm(layer: nn.Module) -> Callable[[Any], Any] | None:
    """Returns the function of torch.nn.utils that makes such a weight a parameter, None if the layer has no such weight."""
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm | SpectralNorm) and hook.name == "weight":
            return _REMOVERS[type(hook)]
    return None
