"""Operands of the operations on sparse tensors, as torch's dispatcher passes them.

arrays  the operands one after the other: the tensor itself if it is dense, its components if it is sparse
sizes   the shapes of the sparse operands
spec    a line for each operand and one for the result: its letters and, if it is sparse, its format
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
    """What `spec` says."""

    operands: tuple[Operand, ...]
    result: Operand

    def __str__(self) -> str:
        return "\n".join(_line(operand) for operand in (*self.operands, self.result))

    @staticmethod
    @lru_cache(4096)
    def parse(text: str) -> "Spec":
        """The inverse of `str`."""
        *operands, result = [
            Operand(letters, Format.parse(format) if format else None)
            for letters, _, format in (line.partition(" ") for line in text.split("\n"))
        ]
        return Spec(tuple(operands), result)


@dataclass(frozen=True)
class Held(Generic[Array]):
    """An operand with what holds it: its arrays, one if it is dense."""

    operand: Operand
    arrays: tuple[Array, ...]

    @property
    def letters(self) -> str:
        """One a dimension."""
        return self.operand.letters

    @property
    def format(self) -> Format | None:
        """None if it is dense."""
        return self.operand.format

    @property
    def sparse(self) -> bool:
        """Whether it has a format."""
        return self.operand.format is not None

    @property
    def values(self) -> Array:
        """What gradients flow to: the stored values, or the tensor itself."""
        return self.arrays[-1]


@dataclass(frozen=True)
class Bound(Held[Tensor]):
    """An operand with its arrays and its shape."""

    shape: tuple[int, ...]

    def with_values(self, values: Tensor) -> "Bound":
        """The same pattern with other values."""
        return Bound(self.operand, (*self.arrays[:-1], values), self.shape)

    def named(self, letters: str) -> "Bound":
        """The same tensor with other letters."""
        return Bound(Operand(letters, self.format), self.arrays, self.shape)


def dense(letters: str, tensor: Tensor) -> Bound:
    """A dense operand."""
    return Bound(Operand(letters), (tensor,), tuple(tensor.shape))


def flat(operands: Sequence[Bound], result: Operand) -> tuple[list[Tensor], list[int], str]:
    """arrays, sizes and spec of a call."""
    arrays = [array for operand in operands for array in operand.arrays]
    sizes = [extent for operand in operands if operand.sparse for extent in operand.shape]
    if any(isinstance(extent, Tensor) for extent in sizes):  # as torch.jit.trace has them
        sizes = [int(extent) for extent in sizes]
    return arrays, sizes, "\n".join([*(_line(operand.operand) for operand in operands), _line(result)])


_lines: dict[tuple[str, int], tuple[Format, str]] = {}


def _line(operand: Operand) -> str:
    """An operand in a spec. Formats are long to write, and few: their lines are kept, with the format that an id stands for."""
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
    """The operands of a call: the inverse of `flat`."""
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
    """The size of each letter."""
    return {letter: extent for o in operands for letter, extent in zip(o.letters, o.shape, strict=True)}


def padded(operands: Sequence[Bound]) -> dict[str, int]:
    """The size of each letter, filled up to whole blocks of the sparse operands."""
    sizes = extents(operands)
    for operand in operands:
        if operand.format is not None and operand.operand.blocked:
            sizes.update(zip(operand.letters, operand.format.padded_shape(operand.shape), strict=True))
    return sizes


ARGUMENTS = "(Tensor[] arrays, SymInt[] sizes, str spec)"
