"""Makes sketches of operands, by which einsum chooses an order, and notes the orders in traced graphs for reports."""

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
"""The size that is assumed if a size is unknown."""

_LONG = 5e6
"""Predicted nanoseconds of a product. Above it, entries are counted before an order is chosen."""

_MOST = 64
"""The most notes to keep, because a report may never read them."""


@dataclass(frozen=True)
class NotedOrder:
    """An order of products that einsum has chosen.

    expression  the expression of the einsum, with all operands
    text        the products, in their order
    shape       the shape of the result
    gain        the predicted gain over all operands at once
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
    """Returns sketches of the operands. If two are sparse and the product takes long, they count entries by coordinate."""
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
"""Counts of entries by coordinate, remembered by the arrays, because most operands are multiplied many times."""


def _counted(tensor: SparseTensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Returns, for each letter, how many entries have each coordinate."""

    def count() -> list[Tensor]:
        with torch.no_grad():
            at = CoordinateList.of(tensor).at
            return [torch.bincount(where, minlength=size).double() for size, where in zip(sizes.values(), at, strict=True)]

    structure = tensor.components[:-1]
    found = _known.get(structure, (tensor.format, *tensor.shape), count) if structure else count()
    return dict(zip(sizes, found, strict=True))


def note_order(expression: str, order: Order, inputs: Sequence[str], result: str, operands: Sequence[Tensor]) -> None:
    """Notes an order that einsum has chosen in a traced graph."""
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
    """Returns the orders that this thread has noted since the last call."""
    found = [*_notes.found.values()]
    _notes.found.clear()
    return found


def _is_traced(tensor: Tensor) -> bool:
    return is_fake(tensor.components[-1] if isinstance(tensor, SparseTensor) else tensor)


def _number(size: Any) -> int:
    """Returns a size as a number; an open size has its value in the example."""
    if isinstance(size, int):
        return size
    known = size.node.hint if isinstance(size, torch.SymInt) else int(size)
    return _UNKNOWN if known is None else int(known)
