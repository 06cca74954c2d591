"""Converts operands of the operations on sparse tensors to and from the arguments of torch's dispatcher:

arrays  the operands one after the other: a dense tensor itself, the components of a sparse one
sizes   the shapes of the sparse operands
spec    a line for each operand and one for the result: its letters, and the format if it is sparse
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Generic, TypeVar

from torch import Tensor

from gossamer.dialects.format import Format
from gossamer.sparsity.compiler.contract_ir import Operand

Array = TypeVar("Array")


@dataclass(frozen=True)
class Spec:
    """The parsed argument `spec`."""

    operands: tuple[Operand, ...]
    result: Operand

    def __str__(self) -> str:
        return "\n".join(_line(operand) for operand in (*self.operands, self.result))

    @staticmethod
    @lru_cache(4096)
    def parse(text: str) -> "Spec":
        """Parses a text that `str` has made."""
        *operands, result = [
            Operand(letters, Format.parse(format) if format else None)
            for letters, _, format in (line.partition(" ") for line in text.split("\n"))
        ]
        return Spec(tuple(operands), result)


@dataclass(frozen=True)
class Held(Generic[Array]):
    """An operand with its arrays; a dense one has one."""

    operand: Operand
    arrays: tuple[Array, ...]

    @property
    def letters(self) -> str:
        """A letter for each dimension."""
        return self.operand.letters

    @property
    def format(self) -> Format | None:
        """Its format, None if it is dense."""
        return self.operand.format

    @property
    def sparse(self) -> bool:
        """Whether it has a format."""
        return self.operand.format is not None

    @property
    def values(self) -> Array:
        """The stored values, or the dense tensor. Gradients flow to it."""
        return self.arrays[-1]


@dataclass(frozen=True)
class Bound(Held[Tensor]):
    """An operand with its arrays and its shape."""

    shape: tuple[int, ...]

    def with_values(self, values: Tensor) -> "Bound":
        """Returns the same pattern with other values."""
        return Bound(self.operand, (*self.arrays[:-1], values), self.shape)

    def named(self, letters: str) -> "Bound":
        """Returns the same tensor with other letters."""
        return Bound(Operand(letters, self.format), self.arrays, self.shape)


def dense(letters: str, tensor: Tensor) -> Bound:
    """Returns a dense operand."""
    return Bound(Operand(letters), (tensor,), tuple(tensor.shape))


def flat(operands: Sequence[Bound], result: Operand) -> tuple[list[Tensor], list[int], str]:
    """Returns the arguments arrays, sizes and spec of a call."""
    arrays = [array for operand in operands for array in operand.arrays]
    sizes = [extent for operand in operands if operand.sparse for extent in operand.shape]
    if any(isinstance(extent, Tensor) for extent in sizes):  # in torch.jit.trace
        sizes = [int(extent) for extent in sizes]
    return arrays, sizes, "\n".join([*(_line(operand.operand) for operand in operands), _line(result)])


_lines: dict[tuple[str, int], tuple[Format, str]] = {}


def _line(operand: Operand) -> str:
    """Returns the line of an operand in a spec. Lines are kept by the format's id, because printing a format is slow."""
    if operand.format is None:
        return operand.letters
    key = operand.letters, id(operand.format)
    known = _lines.get(key)
    if known is None:
        if len(_lines) > 4096:
            _lines.clear()
        known = _lines[key] = operand.format, f"{operand.letters} {operand.format}"
    return known[1]


def bind(arrays: Iterable[Tensor], sizes: Iterable[int], spec: Spec) -> list[Bound]:
    """Returns the operands of a call, the inverse of `flat`."""
    remaining, extents = iter(arrays), iter(sizes)
    bound = []
    for operand in spec.operands:
        if operand.format is None:
            bound.append(dense(operand.letters, next(remaining)))
        else:
            own = tuple(islice(remaining, operand.arrays))
            bound.append(Bound(operand, own, tuple(islice(extents, len(operand.letters)))))
    return bound


def extents(operands: Sequence[Bound]) -> dict[str, int]:
    """Returns the size of each letter."""
    return {letter: extent for o in operands for letter, extent in zip(o.letters, o.shape, strict=True)}


def padded(operands: Sequence[Bound]) -> dict[str, int]:
    """Returns the size of each letter, rounded up to whole blocks of the sparse operands."""
    sizes = extents(operands)
    for operand in operands:
        if operand.format is not None and operand.operand.blocked:
            sizes.update(zip(operand.letters, operand.format.padded_shape(operand.shape), strict=True))
    return sizes


ARGUMENTS = "(Tensor[] arrays, SymInt[] sizes, str spec)"
