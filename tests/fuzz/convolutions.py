"""Random convolutions, pruned or depthwise, against float64: python -m tests.fuzz.convolutions --count 2000 --seed 0.

Each case has a kernel, stride, padding (some of it by a pad before it), dilation, channels, batch, size and element type of its
own, an epilogue, and blocks of channels and a tile that no cost model would choose.
"""

import argparse
import random
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from gossamer.backend.convolution import convolution
from gossamer.dialects.window import Window
from tests.backend.harness import compile_and_run


def difference(seed: int) -> tuple[float, str]:
    """How far the compiled convolution is from dense float64, relative to the largest number, and what it was."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    dims = chance.choice([1, 2, 2, 2])
    pointwise = chance.random() < 0.3

    def numbers(low: int, high: int) -> tuple[int, ...]:
        return tuple(chance.randint(low, high) for _ in range(dims))

    kernel = (1,) * dims if pointwise else numbers(1, 4)
    stride, dilation, padding = (
        ((1,) * dims, (1,) * dims, (0,) * dims) if pointwise else (numbers(1, 3), numbers(1, 3), numbers(0, 3))
    )
    batch, channels, filters = chance.randint(1, 3), chance.randint(1, 40), chance.randint(1, 40)
    depthwise = channels > 1 and chance.random() < 0.3
    if depthwise:
        filters, stride = channels, (*stride[:-1], min(2, stride[-1]))
    around = [chance.randint(0, 2) for _ in range(2 * dims)] if chance.random() < 0.3 else [0] * 2 * dims
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    sizes = [n + chance.randint(0, 24) for n in least]
    dtype = chance.choice([torch.float32, torch.float32, torch.float64])
    x = torch.randn(batch, channels, *sizes, dtype=dtype)
    w = torch.randn(filters, 1 if depthwise else channels, *kernel, dtype=dtype)
    w *= torch.rand_like(w) < chance.choice([0.0, 0.05, 0.3, 0.9])
    groups = channels if depthwise else 1
    b = torch.randn(filters, dtype=dtype) if chance.random() < 0.5 else None
    conv = {1: F.conv1d, 2: F.conv2d}[dims]
    scale, shift = torch.rand(filters, *[1] * dims, dtype=dtype), torch.randn(filters, *[1] * dims, dtype=dtype)
    dense = conv(F.pad(x, around), w, b, stride, padding, dilation, groups)
    residual = torch.randn_like(dense)
    which = chance.randint(0, 3)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(w)

        def forward(self, x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            if any(around):
                x = F.pad(x, around)
            y = conv(x, self.w.to(x), None if b is None else b.to(x), stride, padding, dilation, groups)
            return (y, F.silu(y * scale + shift.to(x)), F.relu(y + residual), F.hardswish(y) * scale)[which]

    if chance.random() < 0.3 and dims == 2:
        x = x.contiguous(memory_format=torch.channels_last)
    block, vectors = max(2, chance.randint(1, channels)), chance.choice([1, 2, 4])

    def cut(found: convolution.Convolution) -> Window:
        return replace(found.window, channels=block, vectors=vectors)

    layer = Layer()
    with torch.no_grad():
        wide = layer(*(t.double() for t in (x, residual, scale)))
    torch._dynamo.reset()
    with patch.object(convolution, "planned", cut):
        run = compile_and_run(layer, x, residual, scale, regions=1 - depthwise)
    actual = run.output
    assert not depthwise or "as it is, by a kernel" in run.decisions[0].reason
    assert actual.shape == wide.shape and actual.dtype == dtype
    error = (actual - wide).abs().max() / max(1.0, float(wide.abs().max()))
    precision = 1e-5 if dtype == torch.float32 else 1e-12
    window = f"{kernel} {groups=} {around=} {stride=} {padding=} {dilation=}"
    told = f"{batch}x{channels}x{sizes} -> {filters}, {window} {dtype} {block=} {vectors=}"
    return float(error) / precision, f"seed {seed}: {told} epilogue {which}"


def trained_difference(seed: int) -> tuple[float, str]:
    """The same of the gradients of a convolution under a mask, of its images, its kernel and its bias."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    dims = chance.choice([1, 2, 2])
    kernel, stride, dilation, padding = (
        tuple(chance.randint(low, high) for _ in range(dims)) for low, high in ((1, 3), (1, 2), (1, 2), (0, 2))
    )
    channels, filters = chance.randint(1, 24), chance.randint(1, 24)
    depthwise = channels > 1 and chance.random() < 0.3
    groups, filters = (channels, channels) if depthwise else (1, filters)
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    dtype = chance.choice([torch.float32, torch.float64])
    x = torch.randn(chance.randint(1, 3), channels, *[n + chance.randint(0, 16) for n in least], dtype=dtype)
    weight = torch.randn(filters, channels // groups, *kernel, dtype=dtype)
    mask = (torch.rand_like(weight) < chance.choice([0.0, 0.1, 0.5])).to(dtype)
    bias = torch.randn(filters, dtype=dtype) if chance.random() < 0.5 else None
    conv = {1: F.conv1d, 2: F.conv2d}[dims]

    def loss(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
        return conv(x, weight * mask, bias, stride, padding, dilation, groups).square().sum()

    class Layer(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight.to(dtype))
            self.bias = None if bias is None else nn.Parameter(bias.to(dtype))
            self.register_buffer("mask", mask.to(dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return loss(x, self.weight, self.bias, self.mask)

    layer, wide = Layer(dtype), Layer(torch.float64)
    given, twin = x.clone().requires_grad_(), x.double().clone().requires_grad_()
    torch._dynamo.reset()
    run = compile_and_run(layer, given, grad=True, regions=None if not depthwise else 0)
    run.output.backward()
    wide(twin).backward()
    precision, worst = 1e-5 if dtype == torch.float32 else 1e-12, 0.0
    for one, other in zip((given, *layer.parameters()), (twin, *wide.parameters()), strict=True):
        assert one.grad is not None and other.grad is not None and one.grad.shape == other.grad.shape
        worst = max(worst, float((one.grad - other.grad).abs().max()) / max(1.0, float(other.grad.abs().max())))
    told = f"{tuple(x.shape)} -> {filters}, {kernel} {groups=} {stride=} {padding=} {dilation=} {dtype}"
    return worst / precision, f"seed {seed}: trained, {told}"


def main() -> int:
    """The number of cases that were wrong."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    given, wrong = options.parse_args(), 0
    for seed in range(given.seed, given.seed + given.count):
        error, told = (difference, trained_difference)[seed % 2](seed)
        if not error <= 1:
            wrong += 1
            print(f"{told}: {error:.1f} times the tolerance", flush=True)
    print(f"{given.count} convolutions, {wrong} wrong")
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
