"""Expands abbreviations in expressions of einsum: "..." becomes letters, and a repeated letter becomes a diagonal.

"...ij,jk->...ik", [2, 1, 3, 4] and [4, 5]      →      "ABij,jk->ABik"
"iij->j"                                        →      "ij->j", of the elements whose first two coordinates are equal
"""

from collections.abc import Sequence
from string import ascii_letters

import torch
from torch import Tensor

from gossamer.dialects.errors import GossamerError
from gossamer.sparsity.operations.open_sizes import agree, is_one
from gossamer.sparsity.operations.sparse_results import sizes_stay_inside
from gossamer.sparsity.tensor.coordinate_list import CoordinateList, of_rank
from gossamer.sparsity.tensor.entries import set_places
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor


class EinsumError(GossamerError, ValueError, RuntimeError):
    """The expression of an einsum cannot be read, or its operands do not fit it."""


def plain(expression: str, operands: tuple[Tensor, ...]) -> tuple[str, tuple[Tensor, ...]]:
    """Returns an expression with one letter for each dimension, each once per operand, and the operands for it."""
    if not _abbreviated(expression):
        return expression, operands
    spaceless = expression.replace(" ", "")
    left, arrow, result = spaceless.partition("->")
    inputs = left.split(",")
    if len(inputs) != len(operands):
        raise EinsumError(f"einsum '{expression}' has {len(inputs)} operands, got {len(operands)}")
    if "..." in spaceless:
        inputs, result = _spelled_out(expression, inputs, arrow, result, operands)
    elif not arrow:
        result = "".join(sorted(letter for letter in set(left) - {","} if left.count(letter) == 1))
    diagonals = tuple([_diagonal(expression, *each) for each in zip(inputs, operands, strict=True)])
    return f"{','.join(''.join(dict.fromkeys(each)) for each in inputs)}->{result}", diagonals


def with_own_letters(inputs: tuple[str, ...], operands: Sequence[Tensor]) -> tuple[str, ...]:
    """Returns the letters of the operands, with a letter of its own for each size of 1 that broadcasts, as in torch.einsum.

    "ij,ij->ij", [4, 6] and [4, 1]      →      "ij,iA->ij"
    """
    named = [[*zip(letters, operand.shape, strict=True)] for letters, operand in zip(inputs, operands, strict=True)]
    larger = {letter for each in named for letter, extent in each if not is_one(extent)}
    if not any(letter in larger and is_one(extent) for each in named for letter, extent in each):
        return inputs
    unused = iter([letter for letter in ascii_letters if letter not in "".join(inputs)])
    return tuple(["".join(next(unused) if c in larger and is_one(extent) else c for c, extent in each) for each in named])


def _abbreviated(expression: str) -> bool:
    inputs = expression.replace(" ", "").partition("->")[0].split(",")
    return "..." in expression or any(len(set(letters)) < len(letters) for letters in inputs)


def _spelled_out(
    expression: str, inputs: Sequence[str], arrow: str, result: str, operands: Sequence[Tensor]
) -> tuple[list[str], str]:
    """Replaces "..." by letters, which operands share from the last dimension on. Sizes of 1 that broadcast get own letters."""
    unused = iter([letter for letter in ascii_letters if letter not in expression])
    further = []
    for letters, operand in zip(inputs, operands, strict=True):
        named = len(letters.replace("...", ""))
        if letters.count(".") not in (0, 3) or operand.dim() < named or (named < operand.dim() and "..." not in letters):
            raise EinsumError(f"einsum '{expression}': '{letters}' names {named} dimensions of a tensor {list(operand.shape)}")
        begin = letters.find("...")
        further.append(list(operand.shape[begin : begin + operand.dim() - named]) if begin >= 0 else [])
    rank = max(map(len, further))
    shared = [next(unused) for _ in range(rank)]
    found = []
    for letters, sizes in zip(inputs, further, strict=True):
        spelled = ""
        for n, extent in enumerate(sizes, rank - len(sizes)):
            others = [each[n - rank] for each in further if len(each) >= rank - n]
            spelled += next(unused) if is_one(extent) and not all(map(is_one, others)) else shared[n]
        found.append(letters.replace("...", spelled))
    if not arrow:
        named_letters = "".join(inputs).replace(".", "")
        result = "..." + "".join(sorted(letter for letter in set(named_letters) if named_letters.count(letter) == 1))
    return found, result.replace("...", "".join(shared))


def _diagonal(expression: str, letters: str, operand: Tensor) -> Tensor:
    """Returns the diagonal of an operand for repeated letters, with one dimension for each letter."""
    first = {letter: letters.index(letter) for letter in letters}
    if len(first) == len(letters) or operand.dim() != len(letters):
        return operand
    for dim, letter in enumerate(letters):
        if not agree(operand.shape[dim], operand.shape[first[letter]]):
            raise EinsumError(
                f"einsum '{expression}': '{letter}' is {operand.shape[first[letter]]} and {operand.shape[dim]}, "
                "must be one size"
            )
    if not isinstance(operand, SparseTensor):
        return torch.einsum(f"{letters}->{''.join(first)}", operand)
    with sizes_stay_inside():
        entries = CoordinateList.of(operand)
        equal = torch.ones_like(entries.at[0], dtype=torch.bool)
        for dim, letter in enumerate(letters):
            equal = equal & (entries.at[dim] == entries.at[first[letter]])
        which = set_places(equal)
        at = tuple([entries.at[dim].index_select(0, which) for dim in first.values()])
        shape = [operand.shape[dim] for dim in first.values()]
        return CoordinateList(at, entries.values.index_select(0, which)).assembled(of_rank(operand.format, len(first)), shape)
