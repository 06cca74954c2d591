"""Sparse linear layers on GPUs: what is checked and what is timed."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
BERT = ((768, 768), (3072, 768), (768, 3072), (1024, 1024), (4096, 1024), (1024, 4096))
"""Rows and columns of the weights of BERT, base and large: VENOM's benchmark, for 2048, 4096 and 8192 tokens."""
Size = TypeVar("Size", int, int | None)

_LLAMA = ((4096, 4096), (11008, 4096), (4096, 11008))  # of 7 billion parameters


@dataclass(frozen=True)
class Layer:
    """y = epilogue(x w^T) with a sparse w [rows, columns]: all that the code of its kernels depends on.

    element   of x and w; where that is "i8", all else is of f32
    epilogue  names out of "step" (a factor a token), "scale" (one a row of w), "bias", "gelu", "relu" and "residual", in this
              order of use
    block     the nonzeros fill aligned blocks of this many rows and columns; None: they lie anywhere
    two_four  2 of every 4 neighbours along a row may be nonzero
    vnm       (v, n, m): of every m neighbours along a row, n may be nonzero, which lie in 4 columns for v rows together
    planned   share of nonzeros for which the family chooses how to store the weight; None: a tenth
    schedule  the family of the kernels
    """

    schedule: str
    rows: int
    columns: int
    element: str
    epilogue: tuple[str, ...] = ()
    block: int | None = None
    two_four: bool = False
    vnm: tuple[int, int, int] | None = None
    planned: float | None = None

    @property
    def name(self) -> str:
        """A name for files and tables."""
        parts = [self.schedule, f"{self.rows}x{self.columns}", self.element, *self.epilogue]
        pattern = ([f"b{self.block}"] if self.block else []) + (["_".join(map(str, self.vnm))] if self.vnm else [])
        return "-".join([*parts, *pattern, *([f"d{self.planned}"] if self.planned else [])])

    @property
    def given(self) -> torch.dtype:
        """The type of x and w."""
        return torch.int8 if self.element == "i8" else TYPES[self.element]

    @property
    def dtype(self) -> torch.dtype:
        """Of all its other tensors."""
        return torch.float32 if self.element == "i8" else TYPES[self.element]

    def shapes(self, tokens: Size) -> dict[str, tuple[Size, ...]]:
        """Of what the epilogue reads, by the names of its steps."""
        known = {"step": (tokens, 1), "scale": (self.rows,), "bias": (self.rows,), "residual": (tokens, self.rows)}
        return {step: known[step] for step in self.epilogue if step in known}

    def weight(self, density: float) -> Tensor:
        """A random weight, on the CPU; of a 2:4 or V:N:M weight, the density is that of what may be nonzero."""
        size = self.block or 1
        kept = torch.rand(-(-self.rows // size), -(-self.columns // size)) < density
        mask = kept.repeat_interleave(size, 0).repeat_interleave(size, 1)[: self.rows, : self.columns]
        if self.two_four:
            kept = torch.rand(self.rows, -(-self.columns // 4), 4).argsort(2).argsort(2) < 2
            mask &= kept.view(self.rows, -1)[:, : self.columns]
        if self.vnm:
            mask &= _vnm_mask(self.rows, self.columns, *self.vnm)
        return _random(self.given, self.rows, self.columns) * mask

    def operands(self, tokens: int) -> list[Tensor]:
        """Random x, and what the epilogue reads, on the CPU."""
        extras = [_random(self.dtype, *shape) for shape in self.shapes(tokens).values()]
        return [_random(self.given, tokens, self.columns), *extras]

    def reference(self, w: Tensor, operands: list[Tensor]) -> Tensor:
        """The layer by torch, in the type of its operands, which are floats."""
        x, *extras = operands
        bias = extras.pop(0) if self.epilogue[:1] == ("bias",) else None
        y = F.linear(x, w, bias)
        for step in self.epilogue[bias is not None :]:
            if step in ("step", "scale"):
                y = y * extras.pop(0)
            elif step in ("bias", "residual"):
                y = y + extras.pop(0)
            else:
                y = {"relu": torch.relu, "gelu": F.gelu}[step](y)
        return y

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """The inverse of `as_json`."""
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return cls(**{**fields, **lists})


def _random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=dtype) if dtype is torch.int8 else torch.randn(shape).to(dtype)


def _vnm_mask(rows: int, columns: int, v: int, n: int, m: int) -> Tensor:
    """Where a random V:N:M matrix has nonzeros."""
    strips, groups = -(-rows // v), -(-columns // m)
    four = torch.rand(strips, 1, groups, m).argsort(3)[..., :4].expand(-1, v, -1, -1)
    kept = four.gather(3, torch.rand(four.shape).argsort(3)[..., :n])
    mask = torch.zeros(strips, v, groups, m, dtype=torch.bool).scatter(3, kept, True)
    return mask.view(strips * v, groups * m)[:rows, :columns]


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
        for rows, columns, few in ((1, 1, (1,)), (33, 129, (1, 5)), (130, 872, (2, 3, 6)), (512, 4096, (*range(1, 9), 16))):
            for planned in (None, 0.5):
                yield Layer("gpu-deltas", rows, columns, element, ("bias", "gelu"), planned=planned), few
        for rows, columns in ((1, 8), (33, 872), (512, 4096)):
            yield Layer("gpu-expand", rows, columns, element, ("bias", "gelu")), (1, 3, 16, 40)
        for rows, columns in ((1, 8), (130, 264), (512, 384)):
            yield Layer("gpu-twofour", rows, columns, element, ("bias", "residual"), two_four=True), tokens
        for rows, columns, vnm in ((1, 8, (128, 2, 8)), (130, 264, (64, 2, 8)), (512, 384, (128, 2, 16))):
            yield Layer("gpu-vnm", rows, columns, element, ("bias", "residual"), vnm=vnm), tokens
    for rows, columns in ((1, 1), (33, 130), (130, 268), (200, 872), (512, 4096)):
        for schedule in ("gpu-quads", "gpu-gather"):
            yield Layer(schedule, rows, columns, "i8", ("step", "scale", "bias", "gelu")), (1, 3, 16, 40)
    for block in (16, 32, 64, 128):
        for element in ("bf16", "f16"):
            yield Layer("gpu-blocks", 512, 384, element, ("bias", "relu"), block), tokens
        yield Layer("gpu-blocks", 200, 264, "bf16", ("bias", "residual"), block), tokens
        for rows, columns in ((200, 272), (512, 384)):
            yield Layer("gpu-blocks", rows, columns, "i8", ("step", "scale", "bias"), block), tokens


@dataclass(frozen=True)
class Timing:
    """A layer at a density, for a number of tokens."""

    layer: Layer
    density: float
    tokens: int


def timed() -> Iterator[Timing]:
    """Layers of BERT and of a language model, from skinny to wide inputs."""
    wide = (128, 2048, 4096, 8192)
    for rows, columns in (*BERT, _LLAMA[0]):
        for element in ("f32", "bf16"):
            layer = Layer("gpu-kblock", rows, columns, element)
            for density in (0.5, 0.3, 0.2, 0.1, 0.05, 0.01):
                yield from (Timing(layer, density, tokens) for tokens in (16, *wide))
        for vnm in ((128, 2, 8), (64, 2, 8), (128, 2, 16)):
            layer = Layer("gpu-vnm", rows, columns, "bf16", vnm=vnm)
            yield from (Timing(layer, 1.0, tokens) for tokens in wide)
        pruned = Layer("gpu-twofour", rows, columns, "bf16", two_four=True)
        yield from (Timing(pruned, 1.0, tokens) for tokens in (16, *wide))
        for block in (32, 64, 128):
            for element in ("bf16", "i8"):
                layer = Layer("gpu-blocks", rows, columns, element, (), block)
                for density in (0.5, 0.25, 0.1):
                    yield from (Timing(layer, density, tokens) for tokens in (16, *wide))
    for rows, columns in (*BERT, *_LLAMA):
        for schedule, element in (("gpu-gather", "f32"), ("gpu-gather", "bf16"), ("gpu-expand", "bf16")):
            layer = Layer(schedule, rows, columns, element)
            for density in (0.5, 0.3, 0.2, 0.1, 0.05):
                yield from (Timing(layer, density, tokens) for tokens in (1, 4, 8, 16, 32))
        for schedule, counts in (("gpu-gather", (1, 4, 8, 16)), ("gpu-quads", (1, 8, 16, 32, 64))):
            layer = Layer(schedule, rows, columns, "i8")
            for density in (0.3, 0.2, 0.1, 0.05):
                yield from (Timing(layer, density, tokens) for tokens in counts)
    for rows, columns in (*_LLAMA, *BERT[-2:]):
        for density in (0.5, 0.3, 0.2, 0.1, 0.05):
            layer = Layer("gpu-deltas", rows, columns, "f16", planned=density if density > 0.1 else None)
            yield from (Timing(layer, density, tokens) for tokens in (1, 2, 4, 8))
    for rows, columns in _LLAMA:
        for density in (0.5, 0.2):
            layer = Layer("gpu-deltas", rows, columns, "bf16", planned=density)
            yield from (Timing(layer, density, tokens) for tokens in (1, 4))
            layer = Layer("gpu-gather", rows, columns, "f16")
            yield from (Timing(layer, density, tokens) for tokens in (1, 4))
    fused = Layer("gpu-kblock", 3072, 768, "f32", ("bias", "gelu"))
    for layer in (fused, replace(fused, schedule="gpu-blocks", element="bf16", block=64)):
        yield from (Timing(layer, 0.1, tokens) for tokens in (128, 4096))


def layers() -> list[Layer]:
    """All layers that need kernels."""
    return list(dict.fromkeys([*(layer for layer, _ in checked()), *(timing.layer for timing in timed())]))
