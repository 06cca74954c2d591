"""What all kinds of packings share."""

from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

from gossamer.dialects.errors import FormatError


class Component(NamedTuple):
    """One array of a packing: what it holds and the bits of an integer of it; 0 for elements of the tensor."""

    name: str
    bits: int


@dataclass(frozen=True)
class Packing:
    """What all kinds share. `reduction` is the dimension that is summed over: 1 if the tensor is [M, K], 0 if it is [K, M]."""

    kind: ClassVar[str]
    coded: ClassVar[int] = 1
    """Components at the end that hold the values: one, unless they are no elements of the tensor but what these are made of."""
    reduction: int

    def components(self) -> tuple[Component, ...]:
        """The arrays that hold a tensor, one-dimensional, the values last."""
        raise NotImplementedError

    @property
    def neighbours(self) -> int:
        """Columns side by side that are stored as soon as one of them is: the last ones may lie beyond K."""
        return 1

    @property
    def name(self) -> str:
        """What reports call it."""
        return str(self)

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{field.name}={getattr(self, field.name)}' for field in fields(self))})"

    def _check(self, *conditions: tuple[bool, str]) -> None:
        for holds, problem in ((self.reduction in (0, 1), "reduction must be 0 or 1"), *conditions):
            if not holds:
                raise FormatError(f"{self}: {problem}")
