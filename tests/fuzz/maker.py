"""Random operands for programs, the same ones for a seed."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.programs import EXPLICIT_ZERO, Program

FLOATS = {torch.float32: 6, torch.float64: 3, torch.float16: 1, torch.bfloat16: 1}
OTHERS = {torch.int64: 2, torch.int32: 1, torch.int8: 1, torch.bool: 1, torch.complex64: 1}

_ENCODINGS = {
    1: ["(i) -> (i : compressed)"],
    2: [
        "(i, j) -> (i : dense, j : compressed)",
        "(i, j) -> (j : dense, i : compressed)",
        "(i, j) -> (i : compressed(nonunique), j : singleton(soa))",
        "(i, j) -> (i : compressed(nonunique), j : singleton)",
        "(i, j) -> (i : compressed, j : compressed)",
        "(i, j) -> (j : compressed, i : compressed)",
        "(i, j) -> (i floordiv 2 : dense, j floordiv 3 : compressed, i mod 2 : dense, j mod 3 : dense)",
        "(i, j) -> (j floordiv 2 : dense, i floordiv 2 : compressed, i mod 2 : dense, j mod 2 : dense)",
        "(i, j) -> (i : compressed, j : dense)",
        "(i, j) -> (i : dense, j : loose_compressed)",
        "(i, j) -> (i : dense, j : dense)",
        "(i, j) -> (i : dense, j floordiv 4 : dense, j mod 4 : structured[2, 4])",
    ],
    3: [
        "(i, j, k) -> (i : compressed(nonunique), j : singleton(nonunique, soa), k : singleton(soa))",
        "(i, j, k) -> (i : compressed, j : compressed, k : compressed)",
        "(i, j, k) -> (k : compressed, i : compressed, j : compressed)",
        "(i, j, k) -> (i : dense, j : dense, k : compressed)",
        "(i, j, k) -> (i : compressed(nonunique), j : singleton(soa), k : dense)",
        "(i, j, k) -> (i : dense, j : compressed, k : dense)",
    ],
    4: [
        "(i, j, k, l) -> (i : compressed, j : compressed, k : compressed, l : compressed)",
        "(i, j, k, l) -> (i : compressed(nonunique), j : singleton(soa), k : dense, l : dense)",
    ],
}
FORMATS = {
    rank: [f"#sparse_tensor.encoding<{{map = {text}}}>" for text in texts] for rank, texts in _ENCODINGS.items()
}  # fmt: skip
FORMATS[2].append("#sparse_tensor.encoding<{map = (i, j) -> (i : dense, j : compressed), posWidth = 32, crdWidth = 32}>")


class Maker:
    """Makes the operands of a program. `specials`: with NaN and infinities among what is stored. `generic`: of floats of which
    no two are equal, so that what is computed from them has a gradient.
    """

    def __init__(self, seed: int, generic: bool = False) -> None:
        self.rng = random.Random(seed)
        self.program = Program()
        self.specials, self.generic = False, generic

    def value(self) -> Any:
        """What the steps so far come to with dense tensors; None if they raise."""
        try:
            return self.program.function()(**self.program.tensors(False))
        except Exception:
            return None

    def dtype(self) -> torch.dtype:
        """A type of values, mostly a float."""
        if self.generic:
            return self.rng.choice([torch.float32, torch.float64])
        kinds = FLOATS | (OTHERS if self.rng.random() < 0.3 else {})
        return self.rng.choices(list(kinds), list(kinds.values()))[0]

    def operand(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """A sparse operand."""
        rng = self.rng
        format = rng.choice(FORMATS[len(shape)])
        density = rng.choice([0, 0.2, 0.3, 0.5, 0.8, 1])
        structured = "structured" in format

        def entry(place: int) -> str:
            if rng.random() >= density or (structured and place % shape[-1] % 4 > 1):
                return "0"
            if dtype != torch.bool and rng.random() < 0.05:
                return str(EXPLICIT_ZERO)
            if self.specials and rng.random() < 0.2:
                return rng.choice(["nan", "inf", "-inf"])
            if self.generic:
                return f"{rng.choice([-1, 1]) * rng.uniform(0.3, 3):.4f}"
            return "1" if dtype == torch.bool else str(rng.choice([-3, -2, -1, 1, 2, 3]))

        self.program.sparse[name] = (self.literal(shape, dtype, entry), format)
        return name

    def dense(self, shape: tuple[int, ...], dtype: torch.dtype, entries: str = "-2 -1 0 1 2 3") -> str:
        """A dense operand."""
        name = f"x{len(self.program.dense)}"
        choices = ["0", "1"] if dtype == torch.bool else entries.split()
        if self.generic and dtype != torch.bool:
            choices = [f"{float(choice) * self.rng.uniform(0.7, 1.3):.4f}" for choice in choices for _ in range(9)]
        self.program.dense[name] = self.literal(shape, dtype, lambda _: self.rng.choice(choices))
        return name

    def literal(self, shape: tuple[int, ...], dtype: torch.dtype, entry: Callable[[int], str]) -> str:
        """The text of a tensor."""
        count = 1
        for extent in shape:
            count *= extent
        return f"torch.tensor([{', '.join(entry(n) for n in range(count))}], dtype={dtype}).reshape({list(shape)})"

    def dim(self, value: Tensor) -> int:
        """A dimension, now and then one that does not exist."""
        rank = max(value.dim(), 1)
        return self.rng.randrange(-rank, rank) if self.rng.random() < 0.97 else self.rng.choice([rank, -rank - 1])

    def number(self) -> str:
        """A number."""
        return self.rng.choice(["2", "-1", "0.5", "0", "3", "1.5", "True"])

    def broadcast(self, shape: torch.Size) -> tuple[int, ...]:
        """A shape that broadcasts to this one, or with this one."""
        rng = self.rng
        found = [1 if rng.random() < 0.3 else n for n in shape]
        return tuple(found[rng.randrange(len(found) + 1) if rng.random() < 0.3 else 0 :])

    def other(self, value: Tensor) -> str:
        """A sparse operand of the shape of a value."""
        name = f"b{len(self.program.sparse)}"
        return self.operand(name, tuple(value.shape), self.dtype() if self.rng.random() < 0.2 else value.dtype)
