"""Sparse linear layers on GPUs: what is checked and what is timed."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Layer:
    """y = epilogue(x w^T) with a sparse w [rows, columns]: all that the code of its kernels depends on.

    epilogue  names out of "bias", "gelu", "relu" and "residual", in this order of use
    block     the nonzeros fill aligned blocks of this many rows and columns; None: they lie anywhere
    two_four  2 of every 4 neighbours along a row may be nonzero
    schedule  the family of the kernels
    """

    schedule: str
    rows: int
    columns: int
    element: str
    epilogue: tuple[str, ...] = ()
    block: int | None = None
    two_four: bool = False

    @property
    def name(self) -> str:
        """A name for files and tables."""
        parts = [self.schedule, f"{self.rows}x{self.columns}", self.element, *self.epilogue]
        return "-".join([*parts, *([f"b{self.block}"] if self.block else [])])

    @property
    def dtype(self) -> torch.dtype:
        """Of all its tensors."""
        return TYPES[self.element]

    def weight(self, density: float) -> Tensor:
        """A random weight, on the CPU; of a 2:4 weight, the density is that of what may be nonzero."""
        size = self.block or 1
        kept = torch.rand(-(-self.rows // size), -(-self.columns // size)) < density
        mask = kept.repeat_interleave(size, 0).repeat_interleave(size, 1)[: self.rows, : self.columns]
        if self.two_four:
            kept = torch.rand(self.rows, -(-self.columns // 4), 4).argsort(2).argsort(2) < 2
            mask &= kept.view(self.rows, -1)[:, : self.columns]
        return (torch.randn(self.rows, self.columns) * mask).to(self.dtype)

    def operands(self, tokens: int) -> list[Tensor]:
        """Random x, and what the epilogue reads, on the CPU."""
        shapes = {"bias": (self.rows,), "residual": (tokens, self.rows)}
        sizes = [(tokens, self.columns), *(shapes[step] for step in self.epilogue if step in shapes)]
        return [torch.randn(size).to(self.dtype) for size in sizes]

    def reference(self, w: Tensor, operands: list[Tensor]) -> Tensor:
        """The layer by torch, in the type of its operands."""
        x, *extras = operands
        bias = extras.pop(0) if "bias" in self.epilogue else None
        y = F.linear(x, w, bias)
        for step in self.epilogue:
            if step == "residual":
                y = y + extras[0]
            elif step != "bias":
                y = {"relu": torch.relu, "gelu": F.gelu}[step](y)
        return y

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """The inverse of `as_json`."""
        return cls(**{**fields, "epilogue": tuple(fields["epilogue"])})


def checked() -> Iterator[tuple[Layer, tuple[int, ...]]]:
    """Layers of odd shapes, and for how many tokens each is checked."""
    tokens = (1, 31, 128, 300)
    for element in TYPES:
        for rows, columns in ((1, 1), (33, 129), (130, 257), (512, 384)):
            yield Layer("gpu-kblock", rows, columns, element, ("bias", "residual")), tokens
        yield Layer("gpu-kblock", 256, 320, element, ("bias", "gelu")), tokens
        for rows, columns in ((1, 1), (33, 129), (512, 3000)):
            yield Layer("gpu-gather", rows, columns, element, ("bias", "gelu")), (1, 3, 16)
    for element in ("bf16", "f16"):
        for rows, columns in ((1, 8), (130, 264), (512, 384)):
            yield Layer("gpu-twofour", rows, columns, element, ("bias", "residual"), two_four=True), tokens
    for block in (16, 32, 64, 128):
        for element in ("bf16", "f16"):
            yield Layer("gpu-blocks", 512, 384, element, ("bias", "relu"), block), tokens
        yield Layer("gpu-blocks", 200, 264, "bf16", ("bias", "residual"), block), tokens


@dataclass(frozen=True)
class Timing:
    """A layer at a density, for a number of tokens."""

    layer: Layer
    density: float
    tokens: int


def timed() -> Iterator[Timing]:
    """Layers of BERT and of a language model, from skinny to wide inputs."""
    shapes = ((768, 768), (3072, 768), (768, 3072), (1024, 1024), (4096, 1024), (1024, 4096), (4096, 4096))
    for rows, columns in shapes:
        for element in ("f32", "bf16"):
            layer = Layer("gpu-kblock", rows, columns, element)
            for density in (0.3, 0.1, 0.05, 0.02):
                yield from (Timing(layer, density, tokens) for tokens in (16, 128, 4096))
            skinny = replace(layer, schedule="gpu-gather")
            for density in (0.4, 0.2, 0.1):
                yield from (Timing(skinny, density, tokens) for tokens in (1, 4, 16))
        pruned = Layer("gpu-twofour", rows, columns, "bf16", two_four=True)
        yield from (Timing(pruned, 1.0, tokens) for tokens in (16, 128, 4096))
        for block in (32, 64, 128):
            layer = Layer("gpu-blocks", rows, columns, "bf16", (), block)
            for density in (0.5, 0.25, 0.1):
                yield from (Timing(layer, density, tokens) for tokens in (16, 128, 4096))
    fused = Layer("gpu-kblock", 3072, 768, "f32", ("bias", "gelu"))
    for layer in (fused, replace(fused, schedule="gpu-blocks", element="bf16", block=64)):
        yield from (Timing(layer, 0.1, tokens) for tokens in (128, 4096))


def layers() -> list[Layer]:
    """All layers that need kernels."""
    return list(dict.fromkeys([*(layer for layer, _ in checked()), *(timing.layer for timing in timed())]))
