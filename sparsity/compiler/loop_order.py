"""Finds the order in which an einsum iterates over its letters, and the operands that need another format for it.

A kernel reads a sparse operand in the order of its levels. It writes a sparse result in the order of its levels. Summed letters
come before the last level, so that a row of the result is collected in a workspace (Gustavson, 1978):

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
    """Returns the letters of a sparse operand in the order of its levels."""
    assert operand.format is not None
    return list(dict.fromkeys(operand.letters[level.dim] for level in operand.format.levels))


def sparse_result_order(operands: Sequence[Operand], result: Operand) -> list[str]:
    """Returns the order for a sparse result: its levels, with the summed letters before the last one."""
    levels = level_letters(result)
    summed = sorted({letter for operand in operands for letter in operand.letters} - set(levels))
    return [*levels[:-1], *summed, *levels[-1:]]


@lru_cache(1024)
def dense_result_order(operands: tuple[Operand, ...]) -> tuple[str, ...]:
    """Returns an order that fits the levels of as many sparse operands as possible; earlier operands have priority."""
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
    """Returns the format of an operand without blocks, or a similar one whose levels follow this order of the letters."""
    assert operand.format is not None
    places = [order.index(letter) for letter in level_letters(operand)]
    if places == sorted(places):
        return operand.format
    dims = sorted(range(len(operand.letters)), key=lambda dim: order.index(operand.letters[dim]))
    levels = (replace(level, expr=f"d{dim}") for level, dim in zip(operand.format.levels, dims, strict=True))
    return replace(operand.format, levels=tuple(levels))


def takes_any_pattern(format: Format) -> bool:
    """Whether a kernel can write a result in this format, whatever its nonzeros are."""
    if any(level.block > 1 or level.structured or level.kind == "loose_compressed" for level in format.levels):
        return False
    # MLIR writes outside its arrays if dense levels lie below singleton levels (torch's hybrid COO).
    return all(below.kind != "dense" for above, below in pairwise(format.levels) if above.kind == "singleton")


def unblocked(format: Format, rank: int) -> Format:
    """Returns the format itself if it takes any pattern, else CSR or CSF with the same widths."""
    if format.rank == rank and takes_any_pattern(format):
        return format
    plain = Format.CSR if rank == 2 else Format.csf(rank)
    return plain.with_widths(format.pos_width, format.crd_width)
