"""Random convolutions, pruned or depthwise, against float64: python -m tests.fuzz.convolutions --count 2000 --seed 0.

Each case has a kernel, stride, padding (some of it by a pad of any mode before it, some by name), dilation, groups, channels,
batch (maybe none), size, pattern of zeros and element type of its own, in one to three dimensions, some transposed, some with
open sizes, an epilogue, a weight that changes, and blocks of channels and a tile that no cost model would choose.
"""

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from gossamer.backend.convolution import find_convolutions
from gossamer.dialects.window import Window
from tests.backend.harness import compile_and_run

CONVOLUTIONS: dict[bool, dict[int, Callable[..., torch.Tensor]]] = {
    False: {1: F.conv1d, 2: F.conv2d, 3: F.conv3d},
    True: {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d},
}
PRECISION = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True)
class Given:
    """A random convolution: its weight, its images, and `call`, which gives them to torch."""

    told: str
    x: torch.Tensor
    w: torch.Tensor
    call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    filters: int
    channels: int  # of a group
    depthwise: bool


def given_by(chance: random.Random, dims: int, most: int, largest: int) -> Given:
    """With at most so many channels, strides, dilations and taps up to `largest`."""

    def numbers(low: int, high: int) -> tuple[int, ...]:
        return tuple(chance.randint(low, high) for _ in range(dims))

    ones, transposed = (1,) * dims, chance.random() < 0.25
    kernel, stride, dilation, padding = numbers(1, largest + 1), numbers(1, largest), numbers(1, largest), numbers(0, largest)
    if chance.random() < 0.25:
        kernel, stride, dilation, padding = ones, ones, ones, (0,) * dims
    channels, filters = chance.randint(1, most), chance.randint(1, most)
    groups = chance.choice([1, 1, 1, 2, 3, channels, channels])
    channels, filters = groups * -(-channels // groups), groups * -(-filters // groups)
    depthwise = groups == channels > 1 and not transposed and dims < 3 and chance.random() < 0.7
    if depthwise:
        filters, stride = groups, (*stride[:-1], min(2, stride[-1]))
    elif groups == channels > 1:
        filters = 2 * groups
    named = chance.choice(["valid", "same"]) if not transposed and chance.random() < 0.15 else None
    if named == "same":
        stride = ones
    if named is not None:
        padding = (0,) * dims
    reach = [d * (k - 1) + 1 - 2 * p for k, d, p in zip(kernel, dilation, padding, strict=True)]
    least = [max(1, 2 - n if transposed else n) for n in reach]
    sizes = [n + chance.randint(0, 24 if dims < 3 else 5) for n in least]
    dtype = chance.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
    x = torch.randn(chance.choice([0, 1, 1, 2, 2, 3, 3, 3]), channels, *sizes, dtype=dtype)
    shape = (channels, filters // groups) if transposed else (filters, channels // groups)
    w = torch.randn(*shape, *kernel, dtype=dtype) * kept(chance, shape, kernel)
    more = [chance.randint(0, max(s, d) - 1) if transposed else 0 for s, d in zip(stride, dilation, strict=True)]
    torchs = CONVOLUTIONS[transposed][dims]

    def call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        if transposed:
            return torchs(x, w, b, stride, padding, more, groups, dilation)
        return torchs(x, w, b, stride, named or padding, dilation, groups)

    window = f"{kernel} {groups=} {stride=} padding={named or padding} {dilation=} {transposed=} {more=}"
    return Given(f"{tuple(x.shape)} -> {filters}, {window} {dtype}", x, w, call, filters, channels // groups, depthwise)


def kept(chance: random.Random, shape: tuple[int, int], kernel: Sequence[int]) -> torch.Tensor:
    """True where a weight is not zero: anywhere, in whole filters or channels, blocks of filters, or two of four channels."""
    density, (filters, channels) = chance.choice([0.0, 0.05, 0.3, 0.9]), shape
    way = chance.choice(["any", "any", "filters", "channels", "both", "blocks", "two of four"])
    if way == "any":
        return torch.rand(*shape, *kernel) < density
    rows, columns = torch.rand(filters) < max(density, 0.3), torch.rand(channels) < max(density, 0.3)
    if way == "blocks":
        edge = chance.choice([4, 16])
        there = (torch.rand(-(-filters // edge), channels, *kernel) < density).repeat_interleave(edge, 0)[:filters]
    elif way == "two of four":
        ranks = torch.rand(filters, -(-channels // 4), 4, *kernel).argsort(2).argsort(2)
        there = (ranks < 2).flatten(1, 2)[:, :channels]
    else:
        there = torch.rand(*shape, *kernel) < max(density, 0.3)
        there &= (rows if way != "channels" else torch.ones_like(rows)).view(-1, 1, *[1] * len(kernel))
        there &= (columns if way != "filters" else torch.ones_like(columns)).view(-1, *[1] * len(kernel))
    return there


def far(found: torch.Tensor, wide: torch.Tensor) -> float:
    """The largest difference relative to the largest number, one at least."""
    return float((found - wide).abs().max()) / max(1.0, float(wide.abs().max())) if wide.numel() else 0.0


def laid_out(tensor: torch.Tensor) -> tuple[torch.dtype, list[int], list[int]]:
    """What code may depend on but its values: type, sizes, and strides where there is more than one element."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.dtype, [*tensor.shape], [step for n, step in pairs if n > 1 and tensor.numel()]


@torch.no_grad()
def traced(layer: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """What torch itself makes of the layer in a graph, where some results lie otherwise in memory than in eager code."""
    function = torch.compile(layer, backend="aot_eager")
    out: torch.Tensor = function(*inputs)
    return out


def difference(seed: int) -> tuple[float, str]:
    """How far the compiled convolution is from dense float64, relative to the largest number, and what it was."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    dims = chance.choice([1, 2, 2, 3])
    given = given_by(chance, dims, 40, 3)
    dtype, filters = given.x.dtype, given.filters
    around = [chance.randint(0, 2) for _ in range(2 * dims)] if chance.random() < 0.3 else [0] * 2 * dims
    b = torch.randn(filters, dtype=dtype) if chance.random() < 0.5 else None
    small = max(around) >= min(given.x.shape[2:])
    mode = "constant" if small else chance.choice(["constant", "constant", "reflect", "replicate", "circular"])
    scale, shift = torch.rand(filters, *[1] * dims, dtype=dtype), torch.randn(filters, *[1] * dims, dtype=dtype)
    which, opened = chance.randint(0, 6), chance.random() < 0.3

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(given.w)

        def forward(self, x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            if any(around):
                x = F.pad(x, around, mode)
            y = given.call(x, self.w.to(x), None if b is None else b.to(x))
            if which == 4:
                return F.relu6(F.batch_norm(y, shift.flatten().to(x), scale.flatten(), training=False))
            if which == 5:
                return F.gelu(y) + residual
            if which == 6:
                return F.max_pool1d(y.flatten(2), 1) + y.mean(1, keepdim=True).flatten(2)
            return (y, F.silu(y * scale + shift.to(x)), F.relu(y + residual), F.hardswish(y) * scale)[which]

    layer, x = Layer(), given.x
    images = [x, torch.randn(x.shape[0] + 1, x.shape[1], *(n + 3 for n in x.shape[2:]), dtype=dtype)][: 1 + opened]
    if chance.random() < 0.3 and dims > 1:
        last = torch.channels_last if dims == 2 else torch.channels_last_3d
        images = [each.contiguous(memory_format=last) for each in images]
    if chance.random() < 0.3:
        images.append(images[-1])  # under another weight
    block, vectors = max(2, chance.randint(1, given.channels)), chance.choice([1, 2, 4])

    columns = random.Random(seed ^ 0x5EED).choice([0, 1, 2])

    def cut(found: find_convolutions.Convolution) -> Window:
        apart = columns if any(found.window.images) and not found.window.pointwise else 0
        return replace(found.window, channels=block, vectors=vectors * max(1, apart), across=apart)

    whole = not given.depthwise and given.channels == x.shape[1]
    schedule = "reference" if whole and random.Random(~seed).random() < 0.1 else "auto"
    worst, torchs, function, seen = 0.0, 0.0, None, None
    torch._dynamo.reset()
    for each in images:
        with torch.no_grad():
            if each is seen:
                layer.w.copy_(torch.randn_like(given.w) * kept(chance, (given.w.shape[0], given.w.shape[1]), given.w.shape[2:]))
            seen = each
            dense = given.call(F.pad(each, around, mode), layer.w, b)
            residual = torch.randn_like(dense)
            wide = layer(*(t.double() for t in (each, residual, scale)))
            eager = layer(each, residual, scale)
            torchs = max(torchs, far(eager, wide))
        if function is None:
            for axis in (0, *range(2, 2 + dims)) if opened else ():
                torch._dynamo.maybe_mark_dynamic(each, axis)
                torch._dynamo.maybe_mark_dynamic(residual, axis)
            sparse = not given.depthwise and bool((given.w == 0).any())
            with patch.object(find_convolutions, "planned", cut):
                run = compile_and_run(layer, each, residual, scale, regions=int(sparse), schedule=schedule)
            assert not given.depthwise or "as it is, by a kernel" in run.decisions[0].reason
            function, actual = run.function, run.output
        else:
            with torch.no_grad():
                actual = function(each, residual, scale)
        assert laid_out(actual) == laid_out(eager) or laid_out(actual) == laid_out(traced(layer, each, residual, scale))
        worst = max(worst, far(actual, wide))
    told = f"{given.told} {around=} {mode} {block=} {vectors=} {columns=} {opened=} {schedule=}"
    return worst / max(PRECISION[dtype], 2 * torchs), f"seed {seed}: {told} epilogue {which}"


def trained_difference(seed: int) -> tuple[float, str]:
    """The same of the gradients of a convolution under a mask, of its images, its kernel and its bias."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    given = given_by(chance, chance.choice([1, 2, 2, 3]), 24, 2)
    x, weight, dtype = given.x, torch.randn_like(given.w), given.x.dtype
    mask = (torch.rand_like(weight) < chance.choice([0.0, 0.1, 0.5])).to(dtype)
    bias = torch.randn(given.filters, dtype=dtype) if chance.random() < 0.5 else None

    class Layer(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight.to(dtype))
            self.bias = None if bias is None else nn.Parameter(bias.to(dtype))
            self.register_buffer("mask", mask.to(dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return given.call(x, self.weight * self.mask, self.bias).square().sum()

    layer, plain, wide = Layer(dtype), Layer(dtype), Layer(torch.float64)
    leaf, other, twin = (x.to(each).clone().requires_grad_() for each in (dtype, dtype, torch.float64))
    torch._dynamo.reset()
    kept_apart = given.depthwise and dtype in (torch.float32, torch.float64)
    run = compile_and_run(layer, leaf, grad=True, regions=int(kept_apart) if given.depthwise else None)
    run.output.backward()
    plain(other).backward()
    wide(twin).backward()
    worst, torchs = 0.0, 0.0
    for pair in zip((leaf, *layer.parameters()), (other, *plain.parameters()), (twin, *wide.parameters()), strict=True):
        ours, eager, reference = (each.grad for each in pair)
        assert ours is not None and eager is not None and reference is not None and ours.shape == reference.shape
        worst, torchs = max(worst, far(ours, reference)), max(torchs, far(eager, reference))
    return worst / max(PRECISION[dtype], 2 * torchs), f"seed {seed}: trained, {given.told}"


def tried(description: str | None, differences: Sequence[Callable[[int], tuple[float, str]]]) -> int:
    """How many of the cases that the command line asks for were wrong, of each kind in turn."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--count", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    given, wrong = options.parse_args(), 0
    for seed in range(given.seed, given.seed + given.count):
        try:
            error, told = differences[seed % len(differences)](seed)
            problem = f"{told}: {error:.1f} times the tolerance"
        except Exception as failure:
            error, problem = math.inf, f"seed {seed} raises {type(failure).__name__}: {str(failure)[:400]}"
        if not error <= 1:
            wrong += 1
            print(problem, flush=True)
    print(f"{given.count} cases, {wrong} wrong")
    return wrong


if __name__ == "__main__":
    raise SystemExit(tried(__doc__, (difference, trained_difference)))
