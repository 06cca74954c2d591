"""Applies torch.autocast to the operands of our products."""

import torch
from torch import Tensor


def as_autocast(x: Tensor) -> Tensor:
    """Returns an operand of a product in the dtype of torch.autocast if it is on. float64 and integers stay."""
    dtype = autocast_dtype(x)
    return x if dtype == x.dtype else x.to(dtype)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of an operand in a product: that of torch.autocast if it is on. float64 and integers stay."""
    place = x.device.type
    if not torch.is_autocast_enabled(place) or x.dtype == torch.float64 or not x.is_floating_point():
        return x.dtype
    return torch.get_autocast_dtype(place)
