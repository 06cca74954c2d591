"""Parses the text of a `#sparse_tensor.encoding` attribute into levels, rank and widths, for `Format.parse`.

    encoding ::= `#sparse_tensor.encoding<{` entry (`,` entry)* `}>`
    entry    ::= `map` `=` map | (`posWidth` | `crdWidth`) `=` integer (`:` type)?
    map      ::= (`{` lvl,* `}`)? `(` (dim (`=` affine)?),* `)` `->` `(` ((lvl `=`)? affine `:` kind),* `)`
    kind     ::= name (`[` n `,` m `]`)? (`(` property,* `)`)?

The grammar is that of LvlTypeParser and DimLvlMapParser in mlir/lib/Dialect/SparseTensor/IR/Detail (LLVM 24).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from gossamer.dialects.errors import FormatError
from gossamer.dialects.level import PROPERTIES, Level

_START = re.compile(r"\s*#sparse_tensor(\.encoding<|<\s*encoding\s*<)\s*\{")
_BLANK = re.compile(r"(\s|//[^\n]*)*")
_TOKEN = re.compile(r"->|[A-Za-z_][\w$.]*|0x[0-9a-fA-F]+|\d+|\S")

T = TypeVar("T")
Affine = dict[str, int]  # term -> coefficient; a term is "", "d1", "d1 floordiv 4" or "d1 mod 4"


@dataclass
class EncodingParser:
    """A recursive-descent parser. It has read `text` up to place `at`."""

    text: str
    at: int = 0

    def parse(self) -> tuple[tuple[Level, ...], int, dict[str, int]]:
        """Returns levels, rank, and those widths that the text has."""
        start = _START.match(self.text)
        if not start:
            self._fail("expected #sparse_tensor.encoding<{")
        self.at = start.end()
        levels: tuple[Level, ...] = ()
        rank, widths = 0, {}
        while not self._accept("}"):
            key_at, key = self._skip_blank(), self._next()
            self._expect("=")
            if key == "map" and not levels:
                levels, rank = self._map()
            elif key in ("posWidth", "crdWidth"):
                widths[key] = self._integer()
                if self._accept(":"):
                    self._name("a type")
            else:
                self._fail(f"expected one map, posWidth or crdWidth, found '{key}'", key_at)
            if self._peek() != "}":
                self._expect(",")
        for closing in ">" if start[1].startswith(".") else ">>":
            self._expect(closing)
        if self._peek():
            self._fail(f"expected the end, found '{self._peek()}'")
        if not levels:
            self._fail("the encoding has no map")
        return levels, rank, widths

    def _map(self) -> tuple[tuple[Level, ...], int]:
        if self._peek() == "[":
            self._fail("a format has no symbols")
        level_names = self._optional_list("{", lambda: self._name("a level variable"), "}")
        level_variables = {name: f"l{number}" for number, name in enumerate(level_names)}
        inverses: list[tuple[int, Affine | None]] = []
        dimensions: dict[str, str] = {}

        def dimension() -> None:
            at, name = self._skip_blank(), self._name("a dimension")
            if name in dimensions or name in level_names:
                self._fail(f"'{name}' is declared twice", at)
            dimensions[name] = f"d{len(dimensions)}"
            at = self._skip_blank()
            inverses.append((at, self._affine(level_variables) if self._accept("=") else None))
            if self._peek() == ":":
                self._fail("a format has no dimension slices")

        self._list("(", dimension, ")")
        self._expect("->")
        levels: list[Level] = []

        def level() -> None:
            at = self._skip_blank()
            if level_names and level_variables.get(self._next()) != f"l{len(levels)}":
                self._fail("level variables must come in the order of their declaration", at)
            if level_names:
                self._expect("=")
            levels.append(self._level(dimensions))

        at = self._skip_blank()
        self._list("(", level, ")")
        if level_names and len(level_names) != len(levels):
            self._fail(f"{len(level_names)} level variables for {len(levels)} levels", at)
        self._check_inverses(inverses, levels)
        return tuple(levels), len(dimensions)

    def _check_inverses(self, inverses: list[tuple[int, Affine | None]], levels: list[Level]) -> None:
        """Checks that dimensions written in level variables invert the levels. Either all are written or none."""
        if all(inverse is None for _, inverse in inverses):
            return
        for dim, (at, inverse) in enumerate(inverses):
            of_dim = ((f"l{number}", level) for number, level in enumerate(levels) if level.dim == dim)
            if inverse != {name: 1 if level.inner else level.block for name, level in of_dim}:
                self._fail(f"d{dim} is not the inverse of its levels", at)

    def _level(self, dimensions: dict[str, str]) -> Level:
        at = self._skip_blank()
        terms = self._affine(dimensions)
        if list(terms.values()) != [1] or "" in terms:
            self._fail("a level holds dN, dN floordiv B or dN mod B", at)
        self._expect(":")
        kind_at, kind = self._skip_blank(), self._name("a level kind")
        sizes = self._optional_list("[", self._integer, "]")
        properties = self._optional_list("(", lambda: self._name("a level property"), ")")
        for name in properties:
            if name not in PROPERTIES:
                self._fail(f"unknown level property '{name}', there are {', '.join(PROPERTIES)}", kind_at)
        if sizes and len(sizes) != 2:
            self._fail("expected two sizes, structured[n, m]", kind_at)
        options: dict[str, Any] = {"kind": kind, "structured": tuple(sizes) or None}
        options.update(dict.fromkeys(properties, True))
        try:
            return Level(next(iter(terms)), **options)
        except FormatError as problem:
            self._fail(str(problem), kind_at)

    def _affine(self, variables: dict[str, str]) -> Affine:
        """Parses a sum of products into a linear combination."""
        total = self._product(variables)
        while self._peek() in ("+", "-"):
            sign = 1 if self._next() == "+" else -1
            for term, factor in self._product(variables).items():
                total[term] = total.get(term, 0) + sign * factor
        return {term: factor for term, factor in total.items() if factor}

    def _product(self, variables: dict[str, str]) -> Affine:
        left = self._atom(variables)
        while self._peek() in ("*", "floordiv", "mod"):
            at, op = self._skip_blank(), self._next()
            right = self._atom(variables)
            if op == "*" and set(left) <= {""}:
                left, right = right, left
            if not set(right) <= {""}:
                self._fail(f"the right side of '{op}' must be a number", at)
            number = right.get("", 0)
            if op == "*":
                left = {term: factor * number for term, factor in left.items()}
            elif list(left.values()) != [1] or not re.fullmatch(r"\w+", next(iter(left))) or number < 1:
                self._fail(f"'{op}' must stand between a variable and a positive number", at)
            elif number == 1:
                left = left if op == "floordiv" else {}
            else:
                left = {f"{next(iter(left))} {op} {number}": 1}
        return left

    def _atom(self, variables: dict[str, str]) -> Affine:
        at = self._skip_blank()
        if self._accept("-"):
            return {term: -factor for term, factor in self._atom(variables).items()}
        if self._accept("("):
            inside = self._affine(variables)
            self._expect(")")
            return inside
        if self._peek()[:1].isdigit():
            return {"": self._integer()}
        name = self._name("a variable")
        if name not in variables:
            self._fail(f"unknown variable '{name}', there are {', '.join(variables) or 'none'}", at)
        return {variables[name]: 1}

    def _optional_list(self, opening: str, item: Callable[[], T], closing: str) -> list[T]:
        return self._list(opening, item, closing) if self._peek() == opening else []

    def _list(self, opening: str, item: Callable[[], T], closing: str) -> list[T]:
        self._expect(opening)
        items: list[T] = []
        while not self._accept(closing):
            if items:
                self._expect(",")
            items.append(item())
        return items

    def _integer(self) -> int:
        at, token = self._skip_blank(), self._next()
        if not token[:1].isdigit():
            self._fail(f"expected a number, found '{token}'", at)
        return int(token, 16 if token.startswith("0x") else 10)

    def _name(self, what: str) -> str:
        at, token = self._skip_blank(), self._next()
        if not re.match(r"[A-Za-z_]", token):
            self._fail(f"expected {what}, found '{token}'", at)
        return token

    def _expect(self, token: str) -> None:
        if not self._accept(token):
            self._fail(f"expected '{token}', found '{self._peek()}'")

    def _accept(self, token: str) -> bool:
        found = self._peek() == token
        if found:
            self._next()
        return found

    def _peek(self) -> str:
        at, token = self.at, self._next()
        self.at = at
        return token

    def _next(self) -> str:
        """Reads the next token; "" at the end."""
        match = _TOKEN.match(self.text, self._skip_blank())
        self.at = match.end() if match else self.at
        return match[0] if match else ""

    def _skip_blank(self) -> int:
        match = _BLANK.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return self.at

    def _fail(self, reason: str, at: int | None = None) -> NoReturn:
        at = self._skip_blank() if at is None else at
        before = self.text[:at].split("\n")
        line = self.text.split("\n")[len(before) - 1]
        raise FormatError(f"{reason}\n  {line}\n  {' ' * len(before[-1])}^")
