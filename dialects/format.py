"""Formats: how a tensor with zeros is stored, level by level, in the terms of MLIR's `sparse_tensor` dialect.

A `Format` is the Python side of a `#sparse_tensor.encoding` attribute. `Format.parse` reads the attribute's
text, and `str` gives exactly the text that MLIR prints. A format that MLIR would refuse, miscompile or abort
on is a `FormatError`. This file imports neither torch nor MLIR.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self

from gossamer.dialects.encoding_parser import EncodingParser
from gossamer.dialects.errors import FormatError
from gossamer.dialects.level import Level

__all__ = ["Format", "Level"]


@dataclass(frozen=True)
class Format:
    """A storage format: levels, outermost first, for tensors with `rank` dimensions.

    pos_width and crd_width are the bits of positions and coordinates: 8, 16, 32, 64, or 0 for `index`, which has 64 here.
    FormatError if MLIR cannot use the format.
    """

    levels: tuple[Level, ...]
    rank: int
    pos_width: int = 0
    crd_width: int = 0

    COO: ClassVar["Format"]
    CSR: ClassVar["Format"]
    CSC: ClassVar["Format"]
    DCSR: ClassVar["Format"]
    DCSC: ClassVar["Format"]

    def __post_init__(self) -> None:
        for name, width in (("pos_width", self.pos_width), ("crd_width", self.crd_width)):
            if width not in (0, 8, 16, 32, 64):
                raise FormatError(f"{name} is {width} bits, must be 8, 16, 32, 64 or 0 for index")
        if not self.levels or self.rank < 1:
            raise FormatError("a format needs at least one dimension and one level")
        _check_dimensions(self.levels, self.rank)
        _check_order_of_kinds(self.levels)

    @classmethod
    def coo(cls, rank: int) -> Self:
        """Coordinates: one array of coordinates for each dimension, in lexicographic order."""
        top = Level("d0", "compressed", nonunique=rank > 1)
        others = (Level(f"d{dim}", "singleton", nonunique=dim < rank - 1, soa=True) for dim in range(1, rank))
        return cls((top, *others), rank)

    @classmethod
    def csf(cls, rank: int) -> Self:
        """Compressed sparse fibres: every dimension compressed, in order."""
        return cls(tuple(Level(f"d{dim}", "compressed") for dim in range(rank)), rank)

    @classmethod
    def bsr(cls, rows: int, columns: int) -> Self:
        """Block CSR: a CSR matrix of dense blocks of `rows` x `columns`."""
        blocks = (Level(f"d0 floordiv {rows}"), Level(f"d1 floordiv {columns}", "compressed"))
        return cls((*blocks, Level(f"d0 mod {rows}"), Level(f"d1 mod {columns}")), 2)

    @classmethod
    def nm(cls, n: int, m: int) -> Self:
        """N:M: n of every m consecutive elements of a row."""
        inside = Level(f"d1 mod {m}", "structured", structured=(n, m))
        return cls((Level("d0"), Level(f"d1 floordiv {m}"), inside), 2)

    @classmethod
    def kblock(cls, columns: int) -> Self:
        """K-blocked CSR: a CSR matrix for each panel of `columns` columns, with coordinates of 16 bits within the panel."""
        levels = Level(f"d1 floordiv {columns}"), Level("d0"), Level(f"d1 mod {columns}", "compressed")
        return cls(levels, 2, pos_width=32, crd_width=16)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a `#sparse_tensor.encoding<{...}>`, in any spelling that MLIR prints or accepts.

        Dimension slices, symbols and explicit or implicit values do not describe storage and are refused.
        Raises FormatError with the text and the place in it.
        """
        levels, rank, widths = EncodingParser(text).parse()
        try:
            return cls(levels, rank, widths.get("posWidth", 0), widths.get("crdWidth", 0))
        except FormatError as problem:
            raise FormatError(f"{problem}\n  in {text}") from None

    def with_widths(self, pos_width: int, crd_width: int) -> "Format":
        """The same levels with these bits for positions and coordinates. Cached, because calls of operations ask for it."""
        return _in_widths(self, pos_width, crd_width)

    def level_sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The number of coordinates of each level for a tensor of this shape. A block at the edge counts as whole."""
        self._check_rank(shape)
        return tuple(level.size(shape[level.dim]) for level in self.levels)

    def padded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape rounded up to whole blocks, which the packed arrays cover.

        MLIR gives `dN mod B` the size (extent - 1) mod B + 1, which is too small if B does not divide a static extent.
        So a tensor type with dense or structured levels inside blocks must have this shape.
        """
        self._check_rank(shape)
        blocks = {level.dim: level.block for level in self.levels}
        return tuple(-(-extent // blocks[dim]) * blocks[dim] for dim, extent in enumerate(shape))

    def permuted(self, order: Sequence[int]) -> Self:
        """The same storage seen as the transposed tensor, whose dimension i is dimension order[i] of this one."""
        if sorted(order) != list(range(self.rank)):
            raise FormatError(f"{tuple(order)} does not order the {self.rank} dimensions of {self.name}")
        levels = (
            replace(level, expr=level.expr.replace(f"d{level.dim}", f"d{order.index(level.dim)}")) for level in self.levels
        )
        return replace(self, levels=tuple(levels))

    def components(self) -> tuple[tuple[int, str], ...]:
        """The arrays that hold a tensor, in the order of the operands of sparse_tensor.assemble.

        Pairs of a level and "positions" or "coordinates"; the last pair is (number of levels, "values").
        Singletons that are not soa have no array. They are interleaved with the level above, [entries, levels].
        """
        arrays: list[tuple[int, str]] = []
        for number, level in enumerate(self.levels):
            if level.kind in ("compressed", "loose_compressed"):
                arrays.append((number, "positions"))
            if level.kind in ("compressed", "loose_compressed", "structured") or level.soa:
                arrays.append((number, "coordinates"))
        return (*arrays, (len(self.levels), "values"))

    def _check_rank(self, shape: Sequence[int]) -> None:
        if len(shape) != self.rank:
            raise FormatError(f"{self.name} has {self.rank} dimensions, the shape {tuple(shape)} has {len(shape)}")

    @property
    def name(self) -> str:
        """The common name of the levels (`CSR`, `BSR(16, 16)`, `2:4`), or the levels themselves if they have none."""
        known = {name: getattr(Format, name) for name in ("COO", "CSR", "CSC", "DCSR", "DCSC")}
        known[f"COO({self.rank})"] = Format.coo(self.rank)
        known[f"CSF({self.rank})"] = Format.csf(self.rank)
        blocks = [level.block for level in self.levels if level.inner]
        if len(blocks) == 1:
            known[f"KBlock({blocks[0]})"] = Format.kblock(blocks[0])
            known[f"KBlock({blocks[0]}, transposed)"] = Format.kblock(blocks[0]).permuted((1, 0))
            if self.levels[-1].structured:
                n, m = self.levels[-1].structured
                known[f"{n}:{m}"] = Format.nm(n, m)
        if len(blocks) == 2:
            known[f"BSR({blocks[0]}, {blocks[1]})"] = Format.bsr(*blocks)
        known |= _REGISTERED
        levels = ", ".join(map(str, self.levels))
        return next((name for name, other in known.items() if other.levels == self.levels), f"({levels})")

    def registered(self, name: str) -> Self:
        """Gives the format a name, for `Format.name` and messages, and returns it. FormatError if it or the name is taken."""
        taken = _REGISTERED.get(name)
        if not self.name.startswith("(") and self.name != name:
            raise FormatError(f"{self} is called {self.name} already, so it cannot become {name}")
        if not name.isprintable() or not name or hasattr(Format, name) or (taken is not None and taken != self):
            raise FormatError(f"'{name}' cannot name a format, or names another one already: choose another name")
        _REGISTERED[name] = self
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a format never changes, and comparing an object with itself is fast

    def __repr__(self) -> str:
        return f"Format.parse({str(self)!r})"

    def __str__(self) -> str:
        dims, levels = ", ".join(f"d{dim}" for dim in range(self.rank)), ", ".join(map(str, self.levels))
        pos = f", posWidth = {self.pos_width}" if self.pos_width else ""
        crd = f", crdWidth = {self.crd_width}" if self.crd_width else ""
        return f"#sparse_tensor.encoding<{{ map = ({dims}) -> ({levels}){pos}{crd} }}>"


_REGISTERED: dict[str, Format] = {}


@lru_cache(1024)
def _in_widths(format: Format, pos_width: int, crd_width: int) -> Format:
    return replace(format, pos_width=pos_width, crd_width=crd_width)


def _check_dimensions(levels: tuple[Level, ...], rank: int) -> None:
    """Checks that each dimension is stored once, whole or as block and place, in an order that MLIR can invert."""
    parts: dict[int, list[Level]] = {dim: [] for dim in range(rank)}
    for level in levels:
        if level.dim >= rank:
            raise FormatError(f"'{level}' uses d{level.dim}, but there are {rank} dimensions")
        parts[level.dim].append(level)
    for dim, of_dim in parts.items():
        found = [level.expr for level in of_dim]
        block = of_dim[0].block if of_dim else 1
        if found not in ([f"d{dim}"], [f"d{dim} floordiv {block}", f"d{dim} mod {block}"]):
            raise FormatError(
                f"d{dim} must be stored once, as d{dim} or as d{dim} floordiv B and then d{dim} mod B, "
                f"found {', '.join(found) or 'nothing'}"
            )
    # MLIR's inverse of a blocked map assumes that the blocked dimensions are the last ones. Else the sparsifier crashes.
    whole = max([-1, *(level.dim for level in levels if level.block == 1)])
    blocked = min([rank, *(level.dim for level in levels if level.block > 1)])
    # K-blocking over d0 is allowed all the same, because only a schedule of its own reads it, not the sparsifier.
    k_blocked = [str(level).replace(f" {levels[0].block} ", " K ") for level in levels]
    if blocked < whole and k_blocked != ["d0 floordiv K : dense", "d1 : dense", "d0 mod K : compressed"]:
        raise FormatError(
            f"d{blocked} is blocked and d{whole} is not, but MLIR needs the blocked dimensions to be the last ones: "
            "transpose the tensor or block every dimension"
        )


def _check_order_of_kinds(levels: tuple[Level, ...]) -> None:
    """Checks the order of levels: batch levels first, singletons after a compressed level, a structured level last."""
    for above, level in zip((None, *levels), levels, strict=False):
        if level.kind == "batch" and above and above.kind != "batch":
            raise FormatError(f"'{level}': batch levels come before all others")
        if level.kind == "dense" and above and above.nonunique:
            raise FormatError(f"'{level}': a dense level cannot follow a nonunique one")
        if level.kind == "singleton":
            if not above or above.kind not in ("compressed", "loose_compressed", "singleton"):
                raise FormatError(f"'{level}': a singleton follows compressed, usually compressed(nonunique)")
            if above.kind == "singleton" and above.soa != level.soa:
                raise FormatError(f"'{level}': singletons in a row are all soa or all not")
        if level.structured:
            if level is not levels[-1] or any(other.kind != "dense" for other in levels[:-1]):
                raise FormatError(f"'{level}': a structured level is the last one, below dense levels only")
            if any(other.block not in (1, level.structured[1]) for other in levels):
                raise FormatError(f"'{level}': all blocks must have {level.structured[1]} elements")


Format.COO = Format.coo(2)
Format.CSR = Format((Level("d0"), Level("d1", "compressed")), 2)
Format.CSC = Format((Level("d1"), Level("d0", "compressed")), 2)
Format.DCSR = Format.csf(2)
Format.DCSC = Format((Level("d1", "compressed"), Level("d0", "compressed")), 2)
