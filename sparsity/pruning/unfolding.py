"""Unfolds the inputs of convolutions into rows (im2col), so that a convolution of torch.nn is a product of matrices.

y[n, m, p] = sum over c, t of w[m, c, t] x[n, c, stride p + dilation t - padding]      p a place, t a tap, in 1 to 3 dimensions
"""

from torch import Tensor, nn
from torch.nn.functional import pad

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def patches(layer: Convolution, x: Tensor) -> Tensor:
    """Returns the rows [samples, channels x taps] that a weight [outputs, channels x taps] is multiplied with.

    For several groups they are [groups, samples, channels / groups x taps].
    """
    sides = len(layer.kernel_size)
    x = pad(x if x.dim() == sides + 2 else x[None], _around(layer), _MODES.get(layer.padding_mode, layer.padding_mode))
    for side, (taps, step, apart) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)):
        x = x.unfold(2 + side, apart * (taps - 1) + 1, step)[..., ::apart]
    places = x.unflatten(1, (layer.groups, -1)).movedim(2, 2 + sides).movedim(1, 0)  # [groups, batch, *places, channels, *taps]
    rows = places.flatten(-1 - sides).flatten(1, -2)
    return rows if layer.groups > 1 else rows[0]


def is_depthwise(layer: nn.Module) -> bool:
    """Whether a layer is a convolution in which each filter reads one channel."""
    return isinstance(layer, Convolution) and layer.groups == layer.in_channels > 1


_MODES = {"zeros": "constant"}
"""The names that `pad` uses for modes of padding, where they differ."""


def _around(layer: Convolution) -> list[int]:
    """Returns the padding at both ends of each side, the last side first, as `pad` takes it."""
    if layer.padding == "same":
        added = [apart * (taps - 1) for taps, apart in zip(layer.kernel_size, layer.dilation, strict=True)]
        ends = [(each // 2, each - each // 2) for each in added]
    elif isinstance(layer.padding, str):  # "valid"
        ends = [(0, 0) for _ in layer.kernel_size]
    else:
        ends = [(each, each) for each in layer.padding]
    return [amount for both in reversed(ends) for amount in both]
