"""Random programs with SparseTensors: text that runs with the sparse tensor for `a`, or with the dense one.

A program is a few lines that make tensors from literals, and one expression for each step. What it computes from dense tensors
is the oracle, so that a case that fails needs nothing but its own text to be looked at.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer import Format, SparseTensor, einsum

EXPLICIT_ZERO = 77  # stands in literals for a zero that is stored

NAMES = {
    "torch": torch, "F": F, "Format": Format, "SparseTensor": SparseTensor, "einsum": einsum, "nan": torch.nan,
    "inf": torch.inf,
}  # fmt: skip


@dataclass
class Program:
    """sparse      name, text of the dense tensor and format of each sparse operand
    dense       name and text of each dense operand
    steps       expressions of `a`, each the next one's `a`
    """

    sparse: dict[str, tuple[str, str]] = field(default_factory=dict)
    dense: dict[str, str] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = ["import torch, torch.nn.functional as F", "from torch import inf, nan", "from gossamer import *", ""]
        for name, (text, format) in self.sparse.items():
            lines += [f"{name} = SparseTensor.from_dense({text}, Format.parse({format!r}))"]
            if str(EXPLICIT_ZERO) in text:
                lines += [f"{name} = {name}.with_values(torch.where({name}.values() == {EXPLICIT_ZERO}, 0, {name}.values()))"]
        lines += [f"{name} = {text}" for name, text in self.dense.items()]
        return "\n".join([*lines, *(f"a = {step}" for step in self.steps), "print(a)"])

    def tensors(self, sparse: bool, wide: bool = False) -> dict[str, Tensor]:
        """The operands; `wide` in float64 where they are floats, which the oracle of values is computed in."""
        made: dict[str, Tensor] = {}
        for name, (text, format) in self.sparse.items():
            tensor = eval(text, dict(NAMES))
            explicit = tensor == EXPLICIT_ZERO
            if sparse:
                stored = SparseTensor.from_dense(tensor, Format.parse(format))
                values = stored.values()
                made[name] = stored.with_values(torch.where(values == EXPLICIT_ZERO, 0, values)) if explicit.any() else stored
            else:
                made[name] = tensor.masked_fill(explicit, 0) if explicit.any() else tensor
        made |= {name: eval(text, dict(NAMES)) for name, text in self.dense.items()}
        if wide:
            made = {name: each.double() if each.is_floating_point() else each for name, each in made.items()}
        return made

    def function(self, signed_zeros: bool = True) -> Callable[..., Any]:
        """The steps, as a function of the operands; without signed zeros, each step's negative zeros become positive."""

        def run(**operands: Tensor) -> Any:
            for step in self.codes():
                a = eval(step, NAMES | operands)
                operands["a"] = a if signed_zeros else _without_negative_zeros(a)
            return operands["a"]

        return run

    def codes(self) -> list[Any]:
        """The steps, compiled."""
        return [compile(step, "<step>", "eval") for step in self.steps]

    def source(self) -> str:
        """The same as the text of a Python function, for Dynamo."""
        names = ", ".join([*self.sparse, *self.dense])
        return "\n".join([f"def program({names}):", *(f"    a = {step}" for step in self.steps), "    return a"])


def _without_negative_zeros(a: Any) -> Any:
    if isinstance(a, SparseTensor):
        return a.with_values(a.values() + 0)
    return a + 0 if isinstance(a, Tensor) and a.is_floating_point() else a
