"""Blocks of random models of images: each reads and leaves `h` [images, channels, height, width]."""

from collections.abc import Callable

from tests.fuzz.builder import Builder

CHANNELS = [4, 8, 12, 16, 17, 24]
_ACTIVATIONS = ["torch.relu", "F.relu6", "F.silu", "F.hardswish", "F.gelu", "F.leaky_relu", "torch.sigmoid", "(lambda x: x)"]


def _convolution(b: Builder, channels: int, filters: int, size: int = 3, stride: int = 1, groups: int = 1) -> str:
    """A convolution that leaves the size as it is, or halves it."""
    b.products += groups == 1
    bias = b.rng.random() < 0.5
    if stride == 1 and size > 1 and b.rng.random() < 0.1:
        return b.layer(f"nn.ConvTranspose2d({channels}, {filters}, {size}, padding={size // 2}, groups={groups}, bias={bias})")
    return b.layer(f"nn.Conv2d({channels}, {filters}, {size}, {stride}, {size // 2}, groups={groups}, bias={bias})")


def _norm(b: Builder, channels: int) -> str:
    """A norm of channels, or none."""
    groups = next(n for n in (4, 3, 2, 17, 1) if channels % n == 0)
    batch = f"nn.BatchNorm2d({channels})"
    return b.layer(b.rng.choice([batch, batch, batch, f"nn.GroupNorm({groups}, {channels})", "nn.Identity()"]))


def convolution(b: Builder) -> None:
    """A convolution, a norm and an activation."""
    filters, size, stride = b.rng.choice(CHANNELS), b.rng.choice([1, 3, 3, 5]), b.rng.choice([1, 1, 2])
    layer, norm = _convolution(b, b.width, filters, size, stride), _norm(b, filters)
    b.line(f"h = {b.rng.choice(_ACTIVATIONS)}({norm}({layer}(h)))")
    b.width = filters


def residual(b: Builder) -> None:
    """Two convolutions beside what goes past them."""
    inner = b.rng.choice(CHANNELS)
    first, second = _convolution(b, b.width, inner), _convolution(b, inner, b.width, b.rng.choice([1, 3]))
    norms, act = (_norm(b, inner), _norm(b, b.width)), b.rng.choice(_ACTIVATIONS)
    inplace = b.layer("nn.ReLU(inplace=True)")
    b.line(f"u = {norms[1]}({second}({b.rng.choice([act, inplace])}({norms[0]}({first}(h)))))")
    b.line(b.rng.choice([f"h = {act}(h + u)", f"u += h; h = {inplace}(u)", f"h = h + {act}(u)"]))


def separable(b: Builder) -> None:
    """Pointwise, depthwise and pointwise, perhaps with weights for channels."""
    wide, act = 2 * b.width, b.rng.choice(_ACTIVATIONS)
    up, depth = _convolution(b, b.width, wide, 1), _convolution(b, wide, wide, 3, b.rng.choice([1, 2]), wide)
    down, norm = _convolution(b, wide, b.width, 1), _norm(b, wide)
    b.line(f"u = {act}({depth}({act}({norm}({up}(h)))))")
    if b.rng.random() < 0.5:
        less, more = _convolution(b, wide, 4, 1), _convolution(b, 4, wide, 1)
        b.line(f"u = u * torch.sigmoid({more}(torch.relu({less}(u.mean((2, 3), keepdim=True)))))")
    b.line(f"u = {down}(u); h = u + h if u.shape == h.shape else u")


def joined(b: Builder) -> None:
    """Branches that read the same, side by side or summed."""
    filters = b.rng.choice(CHANNELS)
    one, two = _convolution(b, b.width, filters, 1), _convolution(b, b.width, filters)
    join = b.rng.choice(["torch.cat([one, two], 1)", "one + two", "torch.cat([h, one * two], 1)"])
    b.line(f"one, two = {one}(h), {two}(h); h = {join}")
    b.width = {"torch.cat([one": 2 * filters, "torch.cat([h, ": b.width + filters}.get(join[:14], filters)


def resized(b: Builder) -> None:
    """Another size, or other places."""
    b.line(b.rng.choice([
        "h = F.max_pool2d(h, 2, ceil_mode=True)", "h = F.avg_pool2d(h, 3, 1, 1)", "h = F.interpolate(h, scale_factor=2)",
        "h = F.pad(h, (1, 1, 1, 0))", "h = F.adaptive_avg_pool2d(h, 3)", "h = h.flip(-1)", "h = F.dropout2d(h, 0.0)",
        "h = h.transpose(-1, -2)", "h = F.normalize(h, dim=1)", "h = h * torch.softmax(h, 1)",
    ]))  # fmt: skip


def tokens(b: Builder) -> None:
    """A layer over the channels of every place."""
    norm, wide = b.layer(b.rng.choice([f"nn.LayerNorm({b.width})", "nn.Identity()"])), b.rng.choice(CHANNELS)
    up, down = b.linear(b.width, wide), b.linear(wide, b.width)
    b.line(f"u = {down}(F.gelu({up}({norm}(h.permute(0, 2, 3, 1)))))")
    b.line("h = h + u.permute(0, 3, 1, 2)")


def head(b: Builder) -> None:
    """What networks end with, or nothing."""
    if b.rng.random() < 0.5:
        classes = b.linear(b.width, 10)
        pooled = b.rng.choice(["h.mean((2, 3))", "F.adaptive_avg_pool2d(h, 1).flatten(1)", "h.amax((2, 3))"])
        b.line(f"h = {classes}({pooled})")
    else:
        b.line(b.rng.choice(["h = h", "h = h[:, ::2]", "h = h.flatten(2).transpose(1, 2)", "h = (h * 2, h)[0]"]))


IMAGE_BLOCKS: list[Callable[[Builder], None]] = [
    convolution,
    convolution,
    residual,
    residual,
    separable,
    joined,
    resized,
    tokens,
]
