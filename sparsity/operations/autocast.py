"""What torch.autocast makes of the operands of our products."""

import torch
from torch import Tensor


def as_autocast(x: Tensor) -> Tensor:
    """What torch.autocast makes of an operand of a product: its lower precision, but for float64."""
    place = x.device.type
    if not torch.is_autocast_enabled(place) or x.dtype == torch.float64 or not x.is_floating_point():
        return x
    return x.to(torch.get_autocast_dtype(place))
