"""Formats: what MLIR prints is what we print, what MLIR cannot use is refused with a reason."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch_mlir import ir, passmanager

from gossamer.dialects.errors import FormatError
from gossamer.dialects.format import Format, Level


def encoding(body: str) -> str:
    return f"#sparse_tensor.encoding<{{ {body} }}>"


def mlir(text: str, rank: int) -> str | None:
    """What MLIR prints for the encoding on a tensor type of that rank, None if it refuses it."""
    with ir.Context(), ir.Location.unknown():
        try:
            return str(ir.RankedTensorType(ir.Type.parse(f"tensor<{'8x' * rank}f32, {text}>")).encoding)
        except ir.MLIRError:
            return None


NAMED = {
    "COO": Format.COO,
    "CSR": Format.CSR,
    "CSC": Format.CSC,
    "DCSR": Format.DCSR,
    "DCSC": Format.DCSC,
    "COO(3)": Format.coo(3),
    "CSF(3)": Format.csf(3),
    "BSR(16, 8)": Format.bsr(16, 8),
    "BSR(4, 4)": Format.bsr(4, 4),
    "2:4": Format.nm(2, 4),
    "1:16": Format.nm(1, 16),
    "KBlock(192)": Format.kblock(192),
    "KBlock(192, transposed)": Format.kblock(192).permuted((1, 0)),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_formats_print_as_mlir_does_and_know_their_names(name: str) -> None:
    for fmt in (NAMED[name], NAMED[name].with_widths(32, 16), NAMED[name].with_widths(0, 8)):
        assert str(fmt) == mlir(str(fmt), fmt.rank)
        assert Format.parse(str(fmt)) == fmt
        assert fmt.name == name


def test_a_format_without_a_name_is_called_by_its_levels() -> None:
    fmt = Format((Level("d0", "compressed"), Level("d1", "loose_compressed", nonordered=True)), 2)
    assert fmt.name == "(d0 : compressed, d1 : loose_compressed(nonordered))"


def test_kblock_has_the_widths_that_its_kernel_reads() -> None:
    levels = "(d1 floordiv 96 : dense, d0 : dense, d1 mod 96 : compressed)"
    assert str(Format.kblock(96)) == encoding(f"map = (d0, d1) -> {levels}, posWidth = 32, crdWidth = 16")


KINDS = (
    ["dense", "batch", "structured[1, 4]", "structured[2, 4]"]
    + [f"{kind}{flag}" for kind in ("compressed", "loose_compressed") for flag in ("", "(nonunique)", "(nonordered)")]
    + [f"singleton{flag}" for flag in ("", "(nonunique)", "(soa)", "(nonunique, soa)")]
)


@pytest.mark.parametrize("exprs", ["d0", "d1,d0", "d0,d1 floordiv 4,d1 mod 4", "d1 floordiv 4,d0,d1 mod 4"])
def test_we_accept_exactly_the_level_kinds_that_mlir_accepts(exprs: str) -> None:
    dims = ", ".join(sorted(set(re.findall(r"d\d", exprs))))
    rank = dims.count("d")
    with ir.Context(), ir.Location.unknown():
        for kinds in itertools.product(KINDS, repeat=exprs.count(",") + 1):
            levels = ", ".join(f"{expr} : {kind}" for expr, kind in zip(exprs.split(","), kinds, strict=True))
            text = encoding(f"map = ({dims}) -> ({levels})")
            try:
                ir.Type.parse(f"tensor<{'8x' * rank}f32, {text}>")
            except ir.MLIRError:
                with pytest.raises(FormatError):
                    Format.parse(text)
            else:
                assert str(Format.parse(text)) == text


BSR_MAP = "(d0 floordiv 2 : dense, d1 floordiv 4 : compressed, d0 mod 2 : dense, d1 mod 4 : dense)"
BSR_LEVELS = "(a = i floordiv 2 : dense, b = j floordiv 4 : compressed, c = i mod 2 : dense, d = j mod 4 : dense)"
SPELLINGS = [
    # whitespace, comments, order of keys, a comma too many
    "#sparse_tensor.encoding<{map=(d0,d1)->(d0:dense,d1:compressed())}>",
    "  #sparse_tensor<encoding<{ map = (d0, d1) -> (d0 : dense, d1 : compressed) }>>",
    encoding("crdWidth = 0x10, posWidth = 32 : i64, map = (d0, d1) -> (d0 : dense, // rows\n d1 : compressed),"),
    encoding("map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 8, posWidth = 64"),
    # names of dimensions and of levels
    encoding("map = (row, column) -> (column : dense, row : compressed)"),
    encoding("map = (mod, a.b$c) -> (mod : dense, a.b$c : compressed)"),
    encoding("map = {a, b} (i = b, j = a) -> (a = j : dense, b = i : compressed)"),
    encoding(f"map = {{a, b, c, d}} (i, j) -> {BSR_LEVELS}"),
    encoding(f"map = {{a, b, c, d}} (i = a * 2 + c, j = 4 * b + d) -> {BSR_LEVELS}"),
    # arithmetic that comes to the same
    encoding("map = (d0, d1) -> (d0 floordiv 1 : dense, - -d1 + 0 : compressed)"),
    encoding("map = (d0, d1) -> ((d0) : dense, d1 floordiv (4 * 4) : dense, d1 mod (20 - 4) : compressed)"),
    # properties
    encoding("map = (d0, d1) -> (d0 : compressed(nonordered, nonunique), d1 : singleton(soa, nonordered))"),
    encoding("map = (d0, d1) -> (d0 : dense, d1 floordiv 4 : dense, d1 mod 4 : structured[0x2, 4]())"),
]


@pytest.mark.parametrize("text", SPELLINGS)
def test_parses_every_spelling_as_mlir_does(text: str) -> None:
    assert str(Format.parse(text)) == mlir(text, 2)


# The place that the error points at is marked with @.
MALFORMED = [
    ("@tensor<4xf32>", "expected #sparse_tensor.encoding<{"),
    (encoding("map = (d0, d1) -> (d0 : dense, d1 : @squeezed)"), "unknown level kind 'squeezed'"),
    (encoding("map = (d0, d1) -> (d0 : dense, @d2 : compressed)"), "unknown variable 'd2'"),
    (encoding("map = (i, @i) -> (i : dense, i : compressed)"), "'i' is declared twice"),
    (encoding("map = (d0) -> (d0 : @compressed(high))"), "unknown level property 'high'"),
    (encoding("map = (d0) -> (d0 : @compressed(soa))"), "a compressed level cannot be soa"),
    (encoding("map = (d0) -> (d0 : @structured)"), "needs its sizes"),
    (encoding("map = (d0) -> (d0 : @structured[4, 2])"), r"\[4, 2\] is not 1 <= n <= m <= 255"),
    (encoding("map = (d0) -> (d0 : @structured[200, 256])"), r"\[200, 256\] is not 1 <= n <= m <= 255"),
    (
        encoding("map = (d0, d1) -> (@d0 + d1 : dense, d1 : dense)"),
        "a level holds dN, dN floordiv B or dN mod B",
    ),
    (encoding("map = (d0) -> (d0 @floordiv 0 : dense, d0 mod 0 : dense)"), "a positive number"),
    (encoding("map = (d0) -> (d0 : dense), crdWidth = @x"), "expected a number, found 'x'"),
    (encoding("map = (d0) -> (d0 : dense), @width = 32"), "expected one map, posWidth or crdWidth"),
    (encoding("map = (d0) -> (d0 : dense), @explicitVal = 1.0 : f32"), "found 'explicitVal'"),
    (encoding("map = @[s0] (d0) -> (d0 : dense)"), "no symbols"),
    (encoding("map = (d0 @: #sparse_tensor<slice(0, 4, 1)>) -> (d0 : dense)"), "no dimension slices"),
    (encoding("map = {a, b} (i @= a, j = b) -> (a = j : dense, b = i : dense)"), "d0 is not the inverse"),
    (encoding("map = {a, b} (i@, j = b) -> (a = i : dense, b = j : dense)"), "d0 is not the inverse"),
    (encoding("map = {a, b} (i, j) -> (@b = i : dense, a = j : dense)"), "order of their declaration"),
    ("#sparse_tensor.encoding<{ map = (d0) -> (d0 : dense) }@", "expected '>', found ''"),
    ("#sparse_tensor.encoding<{ map = (d0) -> (d0 : dense) }> @x", "expected the end"),
    ("#sparse_tensor.encoding<{ posWidth = 32 }>@", "has no map"),
    ("#sparse_tensor.encoding<{ map = (d0) ->\n  (d0 : @heap) }>", "unknown level kind"),
]


@pytest.mark.parametrize(("marked", "reason"), MALFORMED)
def test_nonsense_is_refused_with_a_reason_and_the_place(marked: str, reason: str) -> None:
    with pytest.raises(FormatError, match=reason) as caught:
        Format.parse(marked.replace("@", ""))
    line = next(line for line in marked.split("\n") if "@" in line)
    assert str(caught.value).split("\n")[1:] == [f"  {line.replace('@', '')}", f"  {' ' * line.index('@')}^"]


UNUSABLE = [
    # refused by MLIR's verifier
    ("(d0, d1) -> (d0 : dense, d1 : singleton)", "a singleton follows compressed"),
    ("(d0, d1) -> (d0 : dense, d1 : batch)", "batch levels come before"),
    ("(d0, d1) -> (d0 : compressed(nonunique), d1 : dense)", "cannot follow a nonunique"),
    ("(d0, d1) -> (d0 : compressed, d1 : structured[2, 4])", "below dense levels only"),
    ("(d0, d1) -> (d0 : dense, d1 floordiv 8 : dense, d1 mod 8 : structured[2, 4])", "must have 4 elements"),
    ("(d0, d1, d2) -> (d0 : compressed, d1 : singleton(soa), d2 : singleton)", "all soa or all not"),
    ("(d0, d1) -> (d0 : dense)", "d1 must be stored once"),
    ("(d0, d1) -> (d0 : dense, d0 : dense, d1 : dense)", "d0 must be stored once"),
    ("(d0, d1) -> (d0 mod 2 : dense, d0 floordiv 2 : dense, d1 : dense)", "d0 must be stored once"),
    ("(d0) -> (d0 : dense), posWidth = 7", "pos_width is 7 bits"),
    # these abort the process, in the parser or in the sparsifier
    ("() -> ()", "no map"),
    (
        "(d0, d1) -> (d0 floordiv 4 : dense, d1 floordiv 4 : dense, d1 mod 4 : dense)",
        "d0 must be stored once",
    ),
    (
        "(d0, d1) -> (d0 floordiv 16 : dense, d1 : compressed, d0 mod 16 : dense)",
        "d0 is blocked and d1 is not",
    ),
    (
        "(d0, d1, d2) -> (d0 : dense, d1 floordiv 4 : dense, d1 mod 4 : dense, d2 : dense)",
        "d1 is blocked and d2 is not",
    ),
]


@pytest.mark.parametrize(("body", "reason"), UNUSABLE)
def test_what_mlir_cannot_use_is_refused(body: str, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        Format.parse(encoding(f"map = {body}"))


def test_levels_built_by_hand_are_checked_too() -> None:
    for expr in ("1", "d", "d01", "d0 floordiv 1", "d0 mod 0", "d0  mod 4", "d0 ceildiv 4"):
        with pytest.raises(FormatError, match="a level holds"):
            Level(expr)
    with pytest.raises(FormatError, match="unknown level kind"):
        Level("d0", "sparse")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="structured level, and no other"):
        Level("d0", "compressed", structured=(2, 4))
    with pytest.raises(FormatError, match="uses d1, but there are 1"):
        Format((Level("d0"), Level("d1")), 1)
    with pytest.raises(FormatError, match="at least one dimension"):
        Format((), 0)


def mlir_level_sizes(fmt: Format, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The constants that `sparse_tensor.lvl` folds to."""
    tensor = f"tensor<{'x'.join(map(str, shape))}xf32, #S>"
    numbers = range(len(fmt.levels))
    ops = [f"%c{n} = arith.constant {n} : index\n%l{n} = sparse_tensor.lvl %t, %c{n} : {tensor}" for n in numbers]
    types = ", ".join("index" for _ in numbers)
    sizes = ", ".join(f"%l{n}" for n in numbers)
    body = "\n".join([*ops, f"return {sizes} : {types}"])
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(f"#S = {fmt}\nfunc.func @f(%t: {tensor}) -> ({types}) {{\n{body}\n}}")
        passmanager.PassManager.parse("builtin.module(canonicalize)").run(module.operation)
        terminator = list(module.body.operations[0].regions[0].blocks[0].operations)[-1]
        return tuple(ir.IntegerAttr(value.owner.attributes["value"]).value for value in terminator.operands)


@pytest.mark.parametrize(
    ("fmt", "shape"),
    [
        (Format.CSC, (5, 7)),
        (Format.bsr(2, 4), (6, 8)),
        (Format.kblock(4), (3, 12)),
        (Format.nm(2, 4), (3, 8)),
    ],
)
def test_level_sizes_are_those_of_mlir(fmt: Format, shape: tuple[int, ...]) -> None:
    assert fmt.padded_shape(shape) == shape
    assert fmt.level_sizes(shape) == mlir_level_sizes(fmt, shape)


def test_blocks_at_the_edge_are_whole() -> None:
    assert Format.bsr(2, 4).level_sizes((5, 7)) == (3, 2, 2, 4)
    assert Format.bsr(2, 4).padded_shape((5, 7)) == (6, 8)
    assert mlir_level_sizes(Format.bsr(2, 4), (6, 8)) == (3, 2, 2, 4)
    # why padded_shape is needed: MLIR believes that blocks of a 5 x 7 matrix are 1 x 3
    assert mlir_level_sizes(Format.bsr(2, 4), (5, 7)) == (3, 2, 1, 3)


def test_a_shape_of_another_rank_is_refused() -> None:
    with pytest.raises(FormatError, match=r"CSR has 2 dimensions, the shape \(3, 4, 5\) has 3"):
        Format.CSR.level_sizes((3, 4, 5))


def test_permuting_the_dimensions_turns_csr_into_csc() -> None:
    assert Format.CSR.permuted((1, 0)) == Format.CSC
    assert Format.bsr(2, 4).permuted((1, 0)).permuted((1, 0)) == Format.bsr(2, 4)
    with pytest.raises(FormatError, match="does not order the 2 dimensions of CSR"):
        Format.CSR.permuted((0, 0))


def test_components_come_level_by_level_and_the_values_last() -> None:
    def kinds(fmt: Format) -> list[str]:
        return [f"{kind}{level}" for level, kind in fmt.components()]

    assert kinds(Format.CSR) == ["positions1", "coordinates1", "values2"]
    assert kinds(Format.DCSR) == ["positions0", "coordinates0", "positions1", "coordinates1", "values2"]
    assert kinds(Format.COO) == ["positions0", "coordinates0", "coordinates1", "values2"]
    assert kinds(Format.nm(2, 4)) == ["coordinates2", "values3"]
    interleaved = Format((Level("d0", "compressed", nonunique=True), Level("d1", "singleton")), 2)
    assert kinds(interleaved) == ["positions0", "coordinates0", "values2"]


@st.composite
def formats(draw: st.DrawFn) -> Format:
    rank = draw(st.integers(1, 4))
    whole = draw(st.integers(0, rank))  # the dimensions after these are blocked
    blocks = [(dim, draw(st.sampled_from([2, 3, 16]))) for dim in range(whole, rank)]
    pieces = [[f"d{dim}"] for dim in range(whole)]
    pieces += [[f"d{dim} floordiv {block}", f"d{dim} mod {block}"] for dim, block in blocks]
    levels = []
    while any(pieces):
        expr = draw(st.sampled_from([piece for piece in pieces if piece])).pop(0)
        nonordered = draw(st.booleans())
        levels.append(draw(st.sampled_from([Level(expr), Level(expr, "compressed", nonordered=nonordered)])))
    widths = st.sampled_from([0, 8, 16, 32, 64])
    return Format(tuple(levels), rank, draw(widths), draw(widths))


@given(fmt=formats(), blank=st.sampled_from(["", " ", "\n\t ", " // note\n"]))
def test_any_format_survives_text_and_mlir(fmt: Format, blank: str) -> None:
    assert str(fmt) == mlir(str(fmt), fmt.rank)
    spaced = re.sub(r"(?<=[,:(){}=>]) | (?=[,:(){}=])", blank, str(fmt))
    assert Format.parse(spaced) == fmt
