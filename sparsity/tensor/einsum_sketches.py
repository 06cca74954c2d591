"""Sketches of operands for the order of an einsum, and notes of the orders that were taken while torch traced, for reports."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gossamer.runtime.remembered import Remembered
from gossamer.runtime.torch_internals import is_fake
from gossamer.sparsity.compiler.operands import Bound
from gossamer.sparsity.operations.einsum_order import Order, Sketch, cost_at_once
from gossamer.sparsity.tensor.coordinate_list import CoordinateList
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor

_UNKNOWN = 512
"""A size that nobody knows."""

_LONG = 5e6
"""Nanoseconds of a product from which on its entries are counted first."""

_MOST = 64
"""Notes that are kept for a report that may never come."""


@dataclass(frozen=True)
class NotedOrder:
    """An order that was taken.

    expression  of the einsum, with all operands
    text        the products, in their order
    shape       of the result
    gain        predicted, over all operands at once
    """

    expression: str
    text: str
    shape: tuple[int, ...]
    gain: float


class _Notes(threading.local):
    def __init__(self) -> None:
        self.found = dict[str, NotedOrder]()


_notes = _Notes()


def sketches_of(bound: Sequence[Bound], operands: Sequence[Tensor], result: str, sparse: bool) -> list[Sketch]:
    """The sketches of operands. Where two are sparse and the product takes long, they have the counts of known entries."""
    sketches = [_sketch(each) for each in bound]
    several = sum(each.sparse for each in sketches) > 1
    if not several or cost_at_once(sketches, result, sparse) < _LONG or any(map(_is_traced, operands)):
        return sketches
    return [
        replace(sketch, counts=_counted(each, sketch.sizes)) if isinstance(each, SparseTensor) else sketch
        for sketch, each in zip(sketches, operands, strict=True)
    ]


def _sketch(operand: Bound) -> Sketch:
    sizes = {letter: _number(size) for letter, size in zip(operand.letters, operand.shape, strict=True)}
    return Sketch(sizes, float(_number(operand.values.numel())), operand.sparse)


_known = Remembered[list[Tensor]](most=64)
"""How many entries have each coordinate, by the arrays of the coordinates: most operands are multiplied many times."""


def _counted(tensor: SparseTensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """For each letter, how many entries have each value."""

    def count() -> list[Tensor]:
        with torch.no_grad():
            at = CoordinateList.of(tensor).at
            return [torch.bincount(where, minlength=size).double() for size, where in zip(sizes.values(), at, strict=True)]

    structure = tensor.components[:-1]
    found = _known.get(structure, (tensor.format, *tensor.shape), count) if structure else count()
    return dict(zip(sizes, found, strict=True))


def note_order(expression: str, order: Order, inputs: Sequence[str], result: str, operands: Sequence[Tensor]) -> None:
    """Keeps an order that was taken in a graph."""
    if not any(_is_traced(operand) for operand in operands):
        return
    listed, steps = [*inputs], list[str]()
    for step in order.steps:
        steps.append(f"{listed[step.first]},{listed[step.second]}->{step.letters}")
        listed = [each for n, each in enumerate(listed) if n not in (step.first, step.second)] + [step.letters]
    steps.append(f"{','.join(listed)}->{result}")
    sizes = dict[str, int]()
    for letters, each in zip(inputs, operands, strict=True):
        sizes |= zip(letters, map(_number, each.shape), strict=True)
    if len(_notes.found) < _MOST:
        _notes.found[expression] = NotedOrder(
            expression, ", then ".join(steps), tuple(sizes[letter] for letter in result), order.gain
        )


def take_notes() -> list[NotedOrder]:
    """The orders that this thread has noted since the last call."""
    found = [*_notes.found.values()]
    _notes.found.clear()
    return found


def _is_traced(tensor: Tensor) -> bool:
    return is_fake(tensor.components[-1] if isinstance(tensor, SparseTensor) else tensor)


def _number(size: Any) -> int:
    """A size; what it is in the example, if it is open."""
    if isinstance(size, int):
        return size
    known = size.node.hint if isinstance(size, torch.SymInt) else int(size)
    return _UNKNOWN if known is None else int(known)
