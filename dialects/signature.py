"""Declares the tensors that an operation takes and gives. Its verifier, IR, fake results and calls all use the declaration.

    x: W[sites channels], weight: W[offsets channels filters], bias: W[filters]?, positions: i[offsets tiles+1]

w, f, i, t  f32 or f64; floats; integers; any element type
W, F, I, T  the same, but all tensors with this letter have one type
i32, bf16   exactly this type
#T          a sparse tensor
[n w! any]  a size for each dimension. Equal names are equal sizes, `n+1` is one more, `w!` is known when a kernel is compiled.
?, *        an optional tensor; any number of tensors
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gossamer.dialects.elements import FLOATS, INTEGERS, WIDE

_LETTERS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "w": ("f32 or f64", WIDE),
    "f": ("floats", tuple(FLOATS)),
    "i": ("integers", tuple(INTEGERS)),
    "t": ("elements", None),
}
"""For each letter: the name of its types in messages, and the types; None for all."""
_DECLARED = re.compile(r"(\w+): (#?)(\w+)\[([^]]*)\]([?*]?)")

Known = dict[str, Any]
"""The sizes of names and the types of letters that are known so far."""


@dataclass(frozen=True)
class Given:
    """An actual tensor.

    element  its element type, by its name in MLIR
    shape    its sizes; None for a dynamic one
    sparse   whether it is sparse
    text     gives its text for a message
    """

    element: str
    shape: Sequence[Any]
    sparse: bool
    text: Callable[[], str]


@dataclass(frozen=True)
class Size:
    """The size of a dimension: that of a name, plus `more`. It is `fixed` if it is known when a kernel is compiled."""

    name: str
    more: int
    fixed: bool

    def of(self, known: Mapping[str, Any]) -> Any:
        """Returns the size; None if it is not known yet."""
        return known[self.name] + self.more if self.name in known else None

    def __str__(self) -> str:
        return f"{self.name}+{self.more}" if self.more else self.name


@dataclass(frozen=True)
class Declared:
    """The declaration of one tensor of an operation. `many` is "?" or "*" as in the text, else ""."""

    name: str
    sparse: bool
    element: str
    sizes: tuple[Size, ...]
    many: str

    def note(self, given: Given, known: Known) -> None:
        """Records the sizes and the type of an actual tensor for names and letters that are not known yet."""
        if self.element.isupper():
            known.setdefault(self.element, given.element)
        for size, extent in zip(self.sizes, given.shape, strict=False):
            if extent is not None and size.name != "any":
                known.setdefault(size.name, extent - size.more)

    def problem(self, given: Given, known: Known) -> str | None:
        """Notes an actual tensor. Returns what is wrong with it, such as "x tensor<4xf32>, must be floats [3, channels]"."""
        kind, allowed = _LETTERS.get(self.element.lower(), (self.element, (self.element,)))
        typed = given.element == known.get(self.element, given.element) and (allowed is None or given.element in allowed)
        if not typed:
            kind = known.get(self.element, kind)
        self.note(given, known)
        fits = (
            given.sparse == self.sparse
            and len(given.shape) == len(self.sizes)
            and all(
                size.more <= extent == (extent if (expected := size.of(known)) is None else expected)
                if extent is not None
                else not size.fixed
                for size, extent in zip(self.sizes, given.shape, strict=True)
            )
        )
        if typed and fits:
            return None
        sizes = [size.of(known) for size in self.sizes]
        shape = ", ".join(str(size if extent is None else extent) for size, extent in zip(self.sizes, sizes, strict=True))
        return f"{self.name} {given.text()}, must be {'sparse ' if self.sparse else ''}{kind} [{shape}]"


@dataclass(frozen=True)
class Signature:
    """The declared tensors of an operation."""

    takes: tuple[Declared, ...] = ()
    gives: tuple[Declared, ...] = ()

    @classmethod
    def parse(cls, takes: str, gives: str) -> "Signature":
        """Reads texts such as "x: f[rows k], w: f[k columns]" and "y: f[rows columns]"."""
        return cls(_declared(takes), _declared(gives))

    @cached_property
    def fixed(self) -> list[str]:
        """The names of sizes that are known when a kernel is compiled."""
        sizes = (size for each in self.takes + self.gives for size in each.sizes)
        return list(dict.fromkeys(size.name for size in sizes if size.fixed))

    def __add__(self, other: "Signature") -> "Signature":
        return Signature(self.takes + other.takes, self.gives + other.gives)


def _declared(text: str) -> tuple[Declared, ...]:
    found = []
    for name, sparse, element, sizes, many in _DECLARED.findall(text):
        parsed = [re.fullmatch(r"(\w+?)(?:\+(\d+))?(!?)", each) for each in sizes.split()]
        assert all(parsed), f"{sizes} are no sizes"
        dims = tuple(Size(each[1], int(each[2] or 0), bool(each[3])) for each in parsed if each is not None)
        found.append(Declared(name, bool(sparse), element, dims, many))
    return tuple(found)


def plain(text: str) -> str:
    """Returns an operation's schema without the declarations of tensors, for torch."""
    return _DECLARED.sub(r"\1", text)
