"""Weights that a hook of torch.nn.utils makes of other parameters at every call, from before there were parametrizations."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils import remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_REMOVERS: dict[type, Callable[[Any], Any]] = {WeightNorm: remove_weight_norm, SpectralNorm: remove_spectral_norm}


def remover_of_norm(layer: nn.Module) -> Callable[[Any], Any] | None:
    """The function of torch.nn.utils that makes such a weight of a layer a parameter, of the value that it has."""
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm | SpectralNorm) and hook.name == "weight":
            return _REMOVERS[type(hook)]
    return None
