"""Random networks of convolutions in a row against float64: python -m tests.fuzz.convolution_rows --count 2000 --seed 0.

Each has a few pointwise, depthwise and k x k convolutions, with scales, activations, sums with earlier images and results that
others read, for images of one size or of several. Some go through by bands of channels. What is prepared for a row has to
notice parameters that are written to, or replaced, between its calls.
"""

import copy
import random
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.backend.convolution import bands
from gossamer.backend.run.row_of_kernels import Ready
from tests.backend.harness import compile_and_run
from tests.fuzz.convolutions import PRECISION, far, kept, laid_out, tried

_ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [F.relu, F.relu6, F.silu, F.hardswish, F.gelu, torch.sigmoid, lambda x: x]


class Layer(nn.Module):
    """A convolution, perhaps a batch norm written out, a sum with an earlier image of its size, and an activation."""

    def __init__(self, chance: random.Random, channels: int, filters: int, dtype: torch.dtype) -> None:
        super().__init__()
        depthwise = channels == filters > 1 and chance.random() < 0.6
        size = chance.choice([1, 3, 3, 5]) if depthwise else chance.choice([1, 1, 1, 3])
        stride = chance.choice([1, 1, 1, 2]) if size > 1 else 1
        self.convolution = nn.Conv2d(
            channels, filters, size, stride, chance.choice([size // 2, size // 2, 0]), groups=channels if depthwise else 1,
            bias=chance.random() < 0.5, dtype=dtype,
        )  # fmt: skip
        self.around = [chance.randint(0, 1) for _ in range(4)] if chance.random() < 0.2 else None
        with torch.no_grad():
            self.convolution.weight *= 2
            if not depthwise:
                self.convolution.weight *= kept(chance, (filters, channels), (size, size))
        shape = (filters, 1, 1)
        self.scaled = chance.random() < 0.6
        self.mean, self.shift = (nn.Parameter(torch.randn(shape, dtype=dtype)) for _ in range(2))
        self.deviation, self.scale = (nn.Parameter(torch.rand(shape, dtype=dtype) + 0.5) for _ in range(2))
        self.activation, self.sums = chance.choice(_ACTIVATIONS), chance.choice([None, None, "before", "behind"])

    def forward(self, x: Tensor, earlier: list[Tensor]) -> Tensor:
        y: Tensor = self.convolution(x if self.around is None else F.pad(x, self.around))
        if self.scaled:
            y = (y - self.mean) / self.deviation * self.scale + self.shift
        same = [each for each in earlier if each.shape[1:] == y.shape[1:]]
        if self.sums == "before" and same:
            y = y + same[0]
        y = self.activation(y)
        return y + same[-1] if self.sums == "behind" and same else y


class Network(nn.Module):
    """Layers in a row; what `read` numbers is read by others, too."""

    def __init__(self, chance: random.Random, dtype: torch.dtype) -> None:
        super().__init__()
        widths = [chance.choice([3, 8, 12, 17]) for _ in range(2)]
        self.channels = channels = chance.choice(widths)
        layers = list[Layer]()
        for _ in range(chance.randint(2, 8)):
            filters = chance.choice([channels, *widths])
            layers.append(Layer(chance, channels, filters, dtype))
            channels = filters
        self.layers = nn.ModuleList(layers)
        self.read = {n for n in range(len(layers) - 1) if chance.random() < 0.15}
        self.gated = chance.random() < 0.2

    def forward(self, x: Tensor) -> list[Tensor]:
        results: list[Tensor] = []
        images = [x]
        for n, layer in enumerate(self.layers):
            images.append(layer(images[-1], images))
            if n in self.read:
                results.append(images[-1] if self.gated else images[-1].mean((2, 3)))
        return [*results, images[-1]]


def difference(seed: int) -> tuple[float, str]:
    """How far the compiled network is from dense float64, relative to the largest number, and what it was."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    dtype = chance.choice([torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16])
    network, ran = Network(chance, dtype).eval(), list[bool]()
    sizes = [
        chance.choice([1, 1, 2, 3]),
        network.channels,
        *(chance.choice([16, 32, chance.randint(12, 40)]) for _ in range(2)),
    ]
    opened, banded, prepared = chance.random() < 0.2, chance.random() < 0.5, Ready.__call__
    large, least = (1 << 8, chance.choice([1 << 11, 1 << 14])) if banded else (bands._LARGE, bands._BAND)

    def run(self: Ready, images: list[Tensor]) -> list[Tensor]:
        ran.append(True)
        return prepared(self, images)

    worst, torchs, function = 0.0, 0.0, None
    torch._dynamo.reset()
    with torch.no_grad(), patch.object(Ready, "__call__", run), patch.multiple(bands, _LARGE=large, _BAND=least):
        for n in range(8):
            if n == 4:
                _change(chance, network)
            x = torch.randn(sizes if not opened or n < 6 else [sizes[0] + 1, *sizes[1:3], sizes[3] + 2], dtype=dtype)
            if chance.random() < 0.2:
                x = x.contiguous(memory_format=torch.channels_last)
            if function is None:
                for axis in (0, 3) if opened else ():
                    torch._dynamo.maybe_mark_dynamic(x, axis)
                sparse = sum(layer.convolution.groups == 1 for layer in network.layers)
                made = compile_and_run(network, x, regions=None if sparse else 0)
                function, found = made.function, made.output
            else:
                found = function(x)
            plain = network(x)
            wide = [each.double() for each in copy.deepcopy(network).double()(x.double())]
            for ours, eager, reference in zip(found, plain, wide, strict=True):
                assert laid_out(ours) == laid_out(eager)
                worst, torchs = max(worst, far(ours, reference)), max(torchs, far(eager, reference))
    layers = [str(layer.convolution) for layer in network.layers]
    told = f"{sizes} {dtype} {opened=} {banded=} {len(ran)} calls as prepared {layers}"
    return worst / max(PRECISION[dtype], 2 * torchs), f"seed {seed}: {told}"


def _change(chance: random.Random, network: Network) -> None:
    """Writes to a parameter, or puts another one in its place."""
    layer = chance.choice(list(network.layers))
    owner, name = chance.choice(
        [(layer, "scale"), (layer, "shift"), (layer.convolution, "weight"), (layer.convolution, "weight")]
    )
    old = getattr(owner, name)
    new = torch.rand_like(old) * (old != 0) if name == "weight" else torch.rand_like(old) + 0.5
    if chance.random() < 0.5:
        old.copy_(new)
    else:
        setattr(owner, name, nn.Parameter(new))


if __name__ == "__main__":
    raise SystemExit(tried(__doc__, (difference,)))
