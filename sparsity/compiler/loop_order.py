"""Loop orders: in which order an einsum goes over its letters, and which operands must be stored otherwise for it.

A sparse operand can be walked in the order of its levels only. A sparse result is written in the order of its levels; what is
summed over comes before the last of them, so that a row of the result is collected in a workspace (Gustavson, 1978):

    ij,jk->ik   into CSR: i, j, k    both operands by rows; a CSC operand is converted first
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from gossamer.dialects.format import Format
from gossamer.sparsity.compiler.contract_ir import Operand


def level_letters(operand: Operand) -> list[str]:
    """The letters of a sparse operand in the order of its levels."""
    assert operand.format is not None
    return list(dict.fromkeys(operand.letters[level.dim] for level in operand.format.levels))


def sparse_result_order(operands: Sequence[Operand], result: Operand) -> list[str]:
    """The order for a sparse result: its levels, and what is summed over before the last of them."""
    levels = level_letters(result)
    summed = sorted({letter for operand in operands for letter in operand.letters} - set(levels))
    return [*levels[:-1], *summed, *levels[-1:]]


@lru_cache(1024)
def dense_result_order(operands: tuple[Operand, ...]) -> tuple[str, ...]:
    """An order that as many of the sparse operands as possible, first come first served, can be walked in."""
    before: dict[str, set[str]] = {letter: set() for operand in operands for letter in operand.letters}
    order = list(before)
    for operand in operands:
        if operand.format is None:
            continue
        levels = level_letters(operand)
        more = {letter: set(above) for letter, above in before.items()}
        for above, below in pairwise(levels):
            more[below].add(above)
        try:
            order = list(TopologicalSorter(more).static_order())
        except CycleError:
            continue
        before = more
    return tuple(order)


def walkable(operand: Operand, order: Sequence[str]) -> Format:
    """The format of an operand without blocks, or the one like it that can be walked in this order of the letters."""
    assert operand.format is not None
    places = [order.index(letter) for letter in level_letters(operand)]
    if places == sorted(places):
        return operand.format
    dims = sorted(range(len(operand.letters)), key=lambda dim: order.index(operand.letters[dim]))
    levels = (replace(level, expr=f"d{dim}") for level, dim in zip(operand.format.levels, dims, strict=True))
    return replace(operand.format, levels=tuple(levels))


def takes_any_pattern(format: Format) -> bool:
    """Whether a kernel can write a result in this format whatever its nonzeros are."""
    if any(level.block > 1 or level.structured or level.kind == "loose_compressed" for level in format.levels):
        return False
    # MLIR writes beyond its arrays where dense levels lie below coordinates of several levels (torch's hybrid COO).
    return all(below.kind != "dense" for above, below in pairwise(format.levels) if above.kind == "singleton")


def unblocked(format: Format, rank: int) -> Format:
    """The format itself if it takes any pattern, else CSR or CSF of the same widths."""
    if format.rank == rank and takes_any_pattern(format):
        return format
    plain = Format.CSR if rank == 2 else Format.csf(rank)
    return plain.with_widths(format.pos_width, format.crd_width)
