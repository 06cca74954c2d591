"""Packings as text: what is printed is read again, what is wrong is refused."""

import pytest

from gossamer.dialects.errors import FormatError
from gossamer.dialects.format import Format
from gossamer.dialects.gpu_packings import Deltas, Fragments, QuadFragments, TwoFour, Vnm
from gossamer.dialects.packing import (
    KINDS,
    Blocks,
    BlockVectors,
    ByteWindows,
    Packing,
    Padded,
    Pairs,
    Panels,
    Quads,
    RowPairs,
    Slices,
    TileMap,
    Vnni,
    VnniMap,
    Windows,
    parse,
    parse_packing,
)
from gossamer.dialects.quantized_packings import Groups

PACKINGS: list[Packing] = [
    Windows(1, 16),
    Windows(0, 64),
    Padded(0, 192),
    Vnni(1, 32, 32),
    Vnni(0, 16, 2),
    Pairs(1, 192),
    VnniMap(1, 32),
    TileMap(0, 64),
    Panels(0, 16, 2),
    Panels(1, 32, 64),
    Blocks(1, 4, 2, 128),
    BlockVectors(0, 4, 4, 2),
    RowPairs(1, 128),
    TwoFour(0),
    Vnm(1, 128, 16),
    Fragments(1),
    QuadFragments(0),
    Deltas(1, 4),
    Deltas(0, 8),
    Slices(1, 16, 32),
    Quads(1, 2, 512),
    ByteWindows(0, 16, 1),
    Groups(1, 4, 8, 16),
    Groups(1, 8, 16, 32),
]


def test_there_is_one_of_each_kind() -> None:
    assert {type(packing) for packing in PACKINGS} == set(KINDS.values())


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_its_text_is_read_again(packing: Packing) -> None:
    assert parse_packing(str(packing)) == packing
    assert parse(f'"{packing}"') == packing


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_the_values_come_last_and_are_elements_of_the_tensor_or_integers(packing: Packing) -> None:
    *integers, values = packing.components()
    assert values == ("values", 0 if packing.coded == 1 else 8)
    assert all(component.bits in (8, 16, 32, 64) for component in integers)


def test_an_encoding_is_a_format() -> None:
    assert parse(str(Format.CSR)) == Format.CSR


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("windows", "is no packing, there are windows"),
        ("bitmap(reduction=1, lanes=16)", "is no packing"),
        ("windows(lanes=16)", r"must be windows\(reduction=…, lanes=…\)"),
        ("windows(lanes=16, reduction=1)", "must be windows"),
        ("windows(reduction=1, lanes=-1)", "must be windows"),
        ("vnni(reduction=1, rows=8, columns=32)", "rows must be a multiple of 16"),
        ("vnni(reduction=1, rows=16, columns=64)", "columns must be 2, 4, 8, 16 or 32"),
        ("vnnimap(reduction=1, rows=48)", "rows must be 16 or 32"),
        ("tilemap(reduction=1, columns=16)", "columns must be 32 or 64"),
        ("panels(reduction=1, rows=8, width=1)", "rows must be 16 or 32"),
        ("panels(reduction=1, rows=16, width=8)", "width must be 1, 2 or 32 of bf16, 4 or 64 of int8"),
        ("pairs(reduction=1, width=65537)", "width must be 1 to 65536"),
        ("windows(reduction=1, lanes=32)", "lanes must be 2, 4, 8, 16 or 64"),
        ("padded(reduction=1, columns=8192)", "columns must be from 1 to 8191"),
        ("rowpairs(reduction=1, width=8192)", "width must be from 1 to 8191"),
        ("windows(reduction=2, lanes=16)", "reduction must be 0 or 1"),
        ("blocks(reduction=1, rows=0, columns=1, width=16)", "rows and columns must be positive"),
        ("blocks(reduction=1, rows=4, columns=3, width=16)", "width must be a multiple of columns"),
        ("blocks(reduction=1, rows=4, columns=1, width=65537)", "width must be at most 65536"),
        ("deltas(reduction=1, bits=16)", "bits must be 4 or 8"),
        ("blockvec(reduction=1, rows=4, columns=4, depth=0)", "rows, columns and depth must be positive"),
    ],
)
def test_what_is_refused(text: str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        parse_packing(text)
