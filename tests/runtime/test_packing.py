"""Packing: the arrays suit SciPy, a walk over the levels in plain Python and MLIR's sparsifier expect."""

import itertools
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gossamer.dialects.errors import FormatError
from gossamer.dialects.format import Format
from gossamer.runtime.packing import Packed, pack


def parsed(body: str) -> Format:
    return Format.parse(f"#sparse_tensor.encoding<{{ map = {body} }}>")


def random(shape: tuple[int, ...], density: float = 0.3, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, which sums keep exact."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(1, 9, shape, generator=generator).float()
    return values * (torch.rand(shape, generator=generator) < density)


def two_of_four(rows: int, columns: int) -> torch.Tensor:
    """At most two nonzeros in every four."""
    dense = random((rows, -(-columns // 4) * 4), 1.0)
    groups = dense.view(rows, -1, 4)
    order = torch.rand(groups.shape, generator=torch.Generator().manual_seed(0)).argsort(-1)
    return (groups * (order < 2)).view(rows, -1)[:, :columns].contiguous()


def numbers(packed: Packed) -> list[list[Any]]:
    """The components as Python lists, integers read as unsigned."""
    *integers, values = packed.components
    unsigned = [array.numpy().view(f"u{array.itemsize}").tolist() for array in integers]
    return [*unsigned, values.tolist()]


# --- against SciPy


@pytest.mark.parametrize("shape", [(6, 9), (1, 5), (5, 1), (0, 4), (4, 0)])
def test_csr_and_csc_are_those_of_scipy(shape: tuple[int, int]) -> None:
    dense = random(shape)
    for fmt, theirs in ((Format.CSR, scipy.sparse.csr_array), (Format.CSC, scipy.sparse.csc_array)):
        oracle = theirs(dense.numpy())
        assert numbers(pack(dense, fmt)) == [
            oracle.indptr.tolist(),
            oracle.indices.tolist(),
            oracle.data.tolist(),
        ]


def test_coo_is_that_of_scipy() -> None:
    dense = random((6, 9))
    oracle = scipy.sparse.coo_array(dense.numpy())
    expected = [[0, oracle.nnz], oracle.row.tolist(), oracle.col.tolist(), oracle.data.tolist()]
    assert numbers(pack(dense, Format.COO)) == expected


def test_interleaved_coo_holds_pairs() -> None:
    dense = random((6, 9))
    oracle = scipy.sparse.coo_array(dense.numpy())
    pairs = np.stack(oracle.coords, 1).tolist()
    packed = pack(dense, parsed("(d0, d1) -> (d0 : compressed(nonunique), d1 : singleton)"))
    assert numbers(packed) == [[0, oracle.nnz], pairs, oracle.data.tolist()]


def test_bsr_is_that_of_scipy() -> None:
    dense = random((8, 9), 0.1)
    oracle = scipy.sparse.csr_array(dense.numpy()).tobsr((2, 3))
    oracle.sort_indices()
    expected = [oracle.indptr.tolist(), oracle.indices.tolist(), oracle.data.ravel().tolist()]
    assert numbers(pack(dense, Format.bsr(2, 3))) == expected


def test_kblock_is_the_csr_of_each_panel() -> None:
    dense = random((6, 9))
    panels = [scipy.sparse.csr_array(dense[:, start : start + 4].numpy()) for start in (0, 4, 8)]
    rows = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(panel.indptr) for panel in panels]))])
    columns, values = (np.concatenate([getattr(p, name) for p in panels]) for name in ("indices", "data"))
    packed = pack(dense, Format.kblock(4))
    assert numbers(packed) == [rows.tolist(), columns.tolist(), values.tolist()]
    assert [component.dtype for component in packed.components] == [torch.int32, torch.int16, torch.float32]


# --- against the definition of the levels


def walk(packed: Packed) -> Iterator[tuple[tuple[int, ...], float]]:
    """Coordinates in the dense tensor and value of everything stored, as the level kinds define it."""
    levels, sizes = packed.format.levels, packed.format.level_sizes(packed.shape)
    arrays = dict(zip(packed.format.components(), numbers(packed), strict=True))

    def coordinate(number: int, place: int) -> int:
        if (number, "coordinates") not in arrays:  # interleaved with those of the compressed level above
            top = max(above for above, kind in arrays if kind == "coordinates" and above < number)
            return int(arrays[top, "coordinates"][place][number - top])
        found = arrays[number, "coordinates"][place]
        return int(found[0] if isinstance(found, list) else found)

    def children(number: int, place: int) -> range:
        positions = arrays.get((number, "positions"), [])
        match levels[number].kind:
            case "dense":
                return range(place * sizes[number], (place + 1) * sizes[number])
            case "compressed":
                return range(positions[place], positions[place + 1])
            case "loose_compressed":
                return range(positions[2 * place], positions[2 * place + 1])
        n, _ = levels[number].structured or (1, 1)  # a singleton has one child
        return range(place * n, (place + 1) * n)

    def below(number: int, place: int, index: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], float]]:
        if number == len(levels):
            yield index, arrays[number, "values"][place]
            return
        level, places = levels[number], children(number, place)
        dense = level.kind == "dense"
        found = list(range(sizes[number])) if dense else [coordinate(number, child) for child in places]
        assert found == sorted(found if level.nonunique else set(found))
        assert all(0 <= coordinate < sizes[number] for coordinate in found)
        step = 1 if level.inner else level.block
        for child, crd in zip(places, found, strict=True):
            moved = (at + crd * step if dim == level.dim else at for dim, at in enumerate(index))
            yield from below(number + 1, child, tuple(moved))

    return below(0, 0, (0,) * packed.format.rank)


def check(dense: torch.Tensor, packed: Packed) -> None:
    """What is stored is the dense tensor, each element at most once, and every block has a nonzero."""
    entries = list(walk(packed))
    stored = dict(entries)
    assert len(entries) == len(stored) == packed.nnz
    inside = {index: value for index, value in stored.items() if all(map(int.__lt__, index, dense.shape))}
    assert all(dense[index] == value for index, value in inside.items())
    assert not any(stored[index] for index in stored.keys() - inside.keys())
    assert inside.keys() >= set(map(tuple, dense.nonzero().tolist()))
    levels = zip(packed.format.levels, packed.format.level_sizes(packed.shape), strict=True)
    inner = itertools.takewhile(lambda pair: pair[0].kind == "dense", reversed(list(levels)))
    block = max(prod(size for _, size in inner), 1)
    if packed.format.components()[:-1] and not packed.format.levels[-1].structured:
        assert all(any(value for _, value in entries[at : at + block]) for at in range(0, len(entries), block))


FORMATS = [
    *(Format.CSR, Format.CSC, Format.DCSR, Format.DCSC, Format.COO),
    *(Format.bsr(2, 4), Format.bsr(3, 3), Format.kblock(4), Format.kblock(64)),
    Format.kblock(4).permuted((1, 0)),
    parsed("(d0, d1) -> (d0 : dense, d1 : dense)"),
    parsed("(d0, d1) -> (d0 : compressed, d1 : dense)"),
    parsed("(d0, d1) -> (d0 : loose_compressed, d1 : loose_compressed)"),
    parsed("(d0, d1) -> (d0 : compressed(nonunique), d1 : singleton)"),
    parsed("(d0, d1) -> (d0 : compressed, d1 floordiv 2 : compressed, d1 mod 2 : compressed)"),
    parsed("(d0, d1) -> (d1 floordiv 4 : compressed(nonunique), d0 : singleton(soa), d1 mod 4 : dense)"),
]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", [(6, 8), (5, 7), (1, 1)])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
def test_matrices_come_back_from_a_walk_over_the_levels(fmt: Format, shape: tuple[int, int], density: float) -> None:
    dense = random(shape, density)
    check(dense, pack(dense, fmt))


KINDS = [
    *("dense", "compressed", "loose_compressed", "compressed(nonunique)"),
    *("singleton", "singleton(nonunique)", "singleton(soa)", "singleton(nonunique, soa)"),
]


def may_follow(above: str, kind: str) -> bool:
    if kind == "dense":
        return "nonunique" not in above
    if kind.startswith("singleton"):
        return "compressed" in above or (above.startswith("singleton") and ("soa" in above) == ("soa" in kind))
    return True


@st.composite
def formats(draw: st.DrawFn) -> Format:
    rank = draw(st.integers(1, 4))
    whole = draw(st.integers(0, rank))  # the dimensions after these are blocked
    blocks = [(dim, draw(st.sampled_from([2, 3]))) for dim in range(whole, rank)]
    pieces = [[f"d{dim}"] for dim in range(whole)]
    pieces += [[f"d{dim} floordiv {block}", f"d{dim} mod {block}"] for dim, block in blocks]
    levels, kind = [], "dense"
    while any(pieces):
        kind = draw(st.sampled_from([other for other in KINDS if may_follow(kind, other)]))
        expr = draw(st.sampled_from([piece for piece in pieces if piece])).pop(0)
        levels.append(f"{expr} : {kind}")
    dims = ", ".join(f"d{dim}" for dim in range(rank))
    fmt = parsed(f"({dims}) -> ({', '.join(levels)})")
    return fmt.with_widths(*draw(st.sampled_from([(0, 0), (16, 8), (64, 32)])))


@given(fmt=formats(), data=st.data(), density=st.sampled_from([0.05, 0.3, 1.0]))
def test_any_format_comes_back_from_a_walk_over_the_levels(fmt: Format, data: st.DataObject, density: float) -> None:
    shape = tuple(data.draw(st.integers(0, 6)) for _ in range(fmt.rank))
    dense = random(shape, density)
    try:
        packed = pack(dense, fmt)
    except FormatError as refused:  # singletons whose data do not fit them
        assume(re.search("make it nonunique|use soa", str(refused)) is None)
        raise
    check(dense, packed)
    assert packed.matches(dense)


# --- against the sparsifier

REFERENCE = {
    **{fmt.name: (fmt, random((6, 9))) for fmt in (Format.CSR, Format.CSC, Format.DCSR, Format.DCSC, Format.COO)},
    "interleaved COO": (parsed("(d0, d1) -> (d0 : compressed(nonunique), d1 : singleton)"), random((6, 9))),
    "loose": (parsed("(d0, d1) -> (d0 : dense, d1 : loose_compressed)"), random((6, 9))),
    "CSR in 8 bits": (Format.CSR.with_widths(8, 8), random((3, 256), 0.2)),
    "CSR in 16 bits": (Format.CSR.with_widths(16, 16), random((2, 65536), 0.2)),
    "BSR": (Format.bsr(2, 3), random((6, 9), 0.1)),
    "BSR with edges": (Format.bsr(2, 3), random((5, 7), 0.1)),
    "block COO": (
        parsed(
            "(d0, d1) -> (d0 floordiv 2 : compressed(nonunique), d1 floordiv 3 : singleton(soa), "
            "d0 mod 2 : dense, d1 mod 3 : dense)"
        ),
        random((6, 9), 0.1),
    ),
    "KBlock": (Format.kblock(4), random((6, 8))),
    "KBlock with edges": (Format.kblock(4), random((6, 9))),
    "2:4": (Format.nm(2, 4), two_of_four(6, 8)),
    "2:4 with edges": (Format.nm(2, 4), two_of_four(6, 9)),
    "CSF(3)": (Format.csf(3), random((4, 5, 6))),
    "COO(3)": (Format.coo(3), random((4, 5, 6))),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_the_sparsifier_computes_with_the_packed_arrays(name: str) -> None:
    fmt, dense = REFERENCE[name]
    padded = np.zeros(fmt.padded_shape(dense.shape), np.float32)
    padded[tuple(map(slice, dense.shape))] = dense
    other, vector = random(padded.shape, 1.0, seed=1).numpy(), random(padded.shape[-1:], 1.0, seed=2).numpy()
    packed = pack(dense, fmt)
    widths = {"positions": fmt.pos_width, "coordinates": fmt.crd_width}
    integers = [f"i{widths[kind]}" if widths[kind] else "index" for _, kind in fmt.components()[:-1]]
    operands = (str(fmt), integers, [component.numpy() for component in packed.components], other, vector)
    script = Path(__file__).with_name("sparsifier.py")
    done = subprocess.run([sys.executable, script], input=pickle.dumps(operands), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    product, contracted = pickle.loads(done.stdout)
    np.testing.assert_array_equal(product, padded * other)
    np.testing.assert_array_equal(contracted, padded @ vector)


# --- values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_keep_their_dtype_and_bits(dtype: torch.dtype) -> None:
    dense = torch.tensor([[0.0, 1.5, float("nan")], [-0.0, float("inf"), -2.5]], dtype=dtype)
    packed = pack(dense, Format.CSR)
    assert [component.tolist() for component in packed.components[:2]] == [[0, 2, 4], [1, 2, 1, 2]]
    assert packed.values.dtype == dtype
    torch.testing.assert_close(packed.values, dense[[0, 0, 1, 1], [1, 2, 1, 2]], rtol=0, atol=0, equal_nan=True)
    assert packed.matches(dense)


def test_strides_do_not_matter() -> None:
    dense = random((6, 8))
    wide = torch.zeros(12, 16)
    wide[::2, ::2] = dense
    for view in (dense.t().contiguous().t(), wide[::2, ::2], dense.clone().requires_grad_()):
        for fmt in (Format.CSR, Format.kblock(4), Format.bsr(2, 4)):
            packed = pack(view, fmt)
            assert numbers(packed) == numbers(pack(dense, fmt))
            assert packed.refresh(view)
            assert packed.matches(view)
            assert not packed.values.requires_grad


def test_counts_what_is_stored() -> None:
    dense = torch.zeros(4, 8)
    dense[1, 5] = 1.0
    packed = pack(dense, Format.bsr(2, 4))
    assert (packed.shape, packed.nnz) == ((4, 8), 8)
    assert packed.nbytes == 3 * 8 + 1 * 8 + 8 * 4  # positions, coordinate, values
    kblock = pack(dense, Format.kblock(4))
    assert kblock.nbytes == 9 * 4 + 1 * 2 + 1 * 4


# --- N:M


def test_groups_with_fewer_nonzeros_store_their_first_zeros() -> None:
    dense = torch.tensor([[0.0, 7, 0, 0, 0, 0, 0, 0], [0, 0, 5, 6, 1, 0, 0, 2]])
    packed = pack(dense, Format.nm(2, 4))
    assert numbers(packed) == [[0, 1, 0, 1, 2, 3, 0, 3], [0, 7, 0, 0, 5, 6, 1, 2]]


def test_a_group_with_too_many_nonzeros_is_named() -> None:
    dense = two_of_four(20, 16)
    dense[17, 8:12] = torch.tensor([1.0, 2, 3, 0])
    dense[19] = 1.0
    with pytest.raises(FormatError, match=r"2:4 stores 2 of every 4.*row 17 has 3 nonzeros in elements 8 to 11"):
        pack(dense, Format.nm(2, 4))


# --- widths


def test_coordinates_fill_their_width_to_the_last_bit() -> None:
    dense = torch.zeros(1, 65536)
    dense[0, [0, 32768, 65535]] = 1.0
    packed = pack(dense, Format.CSR.with_widths(8, 16))
    assert numbers(packed)[:2] == [[0, 3], [0, 32768, 65535]]
    assert [component.dtype for component in packed.components[:2]] == [torch.int8, torch.int16]
    with pytest.raises(FormatError, match=r"coordinates up to 65536 do not fit 16 bits.*with_widths\(8, 32\)"):
        pack(torch.zeros(1, 65537), Format.CSR.with_widths(8, 16))


def test_positions_fill_their_width_to_the_last_bit() -> None:
    fmt = Format.CSR.with_widths(8, 16)
    assert numbers(pack(torch.ones(1, 255), fmt))[0] == [0, 255]
    with pytest.raises(FormatError, match=r"positions up to 256 do not fit 8 bits.*with_widths\(16, 16\)"):
        pack(torch.ones(1, 256), fmt)


# --- what does not fit


def test_a_unique_level_above_a_singleton_takes_each_coordinate_once() -> None:
    one_a_row = parsed("(d0, d1) -> (d0 : compressed, d1 : singleton(soa))")
    permutation = torch.eye(4)[[2, 0, 3, 1]]
    assert numbers(pack(permutation, one_a_row)) == [[0, 4], [0, 1, 2, 3], [2, 0, 3, 1], [1.0] * 4]
    permutation[3, 3] = 1.0
    with pytest.raises(FormatError, match="'d0 : compressed' needs 3 twice, make it nonunique"):
        pack(permutation, one_a_row)


def test_levels_without_fixed_arrays_are_refused() -> None:
    with pytest.raises(FormatError, match="batch one by one"):
        pack(random((4, 4)), parsed("(d0, d1) -> (d0 : batch, d1 : compressed)"))
    mixed = parsed("(d0, d1, d2) -> (d0 : compressed(nonunique), d1 : singleton, d2 : compressed)")
    with pytest.raises(FormatError, match="interleaved singletons must be the last"):
        pack(random((4, 4, 4)), mixed)
    with pytest.raises(FormatError, match="CSR has 2 dimensions"):
        pack(random((4, 4, 4)), Format.CSR)


# --- refresh and matches
