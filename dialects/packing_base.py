"""The base class of packings, `Packing`, and the description of their arrays, `Component`."""

from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

from gossamer.dialects.errors import FormatError


class Component(NamedTuple):
    """One array of a packing: its name, and the bits of its integers, or 0 if it holds elements of the tensor."""

    name: str
    bits: int


@dataclass(frozen=True)
class Packing:
    """The base of all packings. `reduction` is the dimension that is summed over: 1 if the tensor is [M, K], 0 if [K, M]."""

    kind: ClassVar[str]
    coded: ClassVar[int] = 1
    """Number of components, at the end, that hold the values. It is 1 unless elements are coded, as integers and scales."""
    reduction: int

    def components(self) -> tuple[Component, ...]:
        """Returns the one-dimensional arrays that hold a tensor, the values last."""
        raise NotImplementedError

    @property
    def neighbours(self) -> int:
        """Number of neighbouring columns that are stored together if one of them is. The last ones may lie beyond K."""
        return 1

    @property
    def name(self) -> str:
        """Its name in reports."""
        return str(self)

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{field.name}={getattr(self, field.name)}' for field in fields(self))})"

    def _check(self, *conditions: tuple[bool, str]) -> None:
        for holds, problem in ((self.reduction in (0, 1), "reduction must be 0 or 1"), *conditions):
            if not holds:
                raise FormatError(f"{self}: {problem}")
