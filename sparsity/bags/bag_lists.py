"""Lists of bags: the arguments of operations, and the lines of numbers that kernels read (see dialects/bags.py)."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.dialects.bags import Field
from gossamer.dialects.errors import ArgumentError, IndexRangeError

WIDTH = len(Field)
INTEGERS = {torch.int32: "i32", torch.int64: "i64"}


@dataclass(frozen=True, slots=True)
class BagList:
    """The bags of one table.

    indices  [bags, length], or [entries] with offsets; int32 or int64, contiguous
    offsets  where bags begin, [bags], or [bags + 1] with the end of the last bag if `last`; of the dtype of the indices
    weights  factors of the rows, of the shape of the indices
    padding  an index that is ignored, -1 for none
    """

    indices: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    padding: int
    last: bool

    @property
    def count(self) -> int:
        """The number of bags."""
        if self.offsets is None:
            return self.indices.shape[0]
        return self.offsets.shape[0] - self.last

    @property
    def entries(self) -> int:
        """The number of indices."""
        return self.indices.numel()

    def line(self, rows: int, first: int = 0) -> list[int]:
        """Returns the line that kernels read for this list. Fields that other callers fill in are 0."""
        indices, offsets, weights = self.indices, self.offsets, self.weights
        if offsets is None:
            count, length = indices.shape
            begins = ends = 0
        else:
            begins, ends, length = offsets.data_ptr(), offsets.numel(), 0
            count = ends - self.last
        held = 0 if weights is None else weights.data_ptr()
        return [
            0, rows, 0, indices.data_ptr(), indices.numel(), begins, ends, length, held, count, self.padding, 0, 0, 0, first,
            0, 0,
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ManyBags:
    """The bags of many tables, as the arguments of operations.

    values   for each table its rows, or the gradients of its bags: [., columns]
    indices  for each table; offsets, weights and padding, too, as in BagList
    kind     "sum", "mean" or "max", for all tables
    last     whether offsets have the end of the last bag
    """

    SCHEMA: ClassVar[str] = (
        "Tensor[] values, Tensor[] indices, Tensor?[] offsets, Tensor?[] weights, int[] padding, str kind, bool last"
    )

    values: Sequence[Tensor]
    indices: Sequence[Tensor]
    offsets: Sequence[Tensor | None]
    weights: Sequence[Tensor | None]
    padding: Sequence[int]
    kind: str
    last: bool

    @property
    def counts(self) -> list[int]:
        """The number of bags of each table; a symbolic size in traced graphs."""
        return [
            each.shape[0] if begins is None else begins.shape[0] - int(self.last)
            for each, begins in zip(self.indices, self.offsets, strict=True)
        ]

    def by_kernel(
        self, columns: Sequence[int], compute: Callable[[list[int], list[BagList]], Sequence[Tensor]]
    ) -> list[Tensor]:
        """Returns a result for each table. Calls `compute` with the numbers and bags of all tables that one kernel can take."""
        groups = dict[object, dict[int, BagList]]()
        for number, given in enumerate(zip(self.indices, self.offsets, self.weights, self.padding, strict=True)):
            bags = bag_list(*given, self.last)
            held = None if bags.weights is None else bags.weights.dtype
            alike = self.values[number].dtype, columns[number], bags.indices.dtype, held
            groups.setdefault(alike, {})[number] = bags
        found = dict[int, Tensor]()
        for group in groups.values():
            found.update(zip(group, compute([*group], [*group.values()]), strict=True))
        return [found[number] for number in range(len(found))]


def bag_list(indices: Tensor, offsets: Tensor | None, weights: Tensor | None, padding: int, last: bool) -> BagList:
    """Returns the bags of the operands of torch's operation. ArgumentError if they do not fit together."""
    if indices.dtype not in INTEGERS:
        raise ArgumentError(f"embedding bag: indices are {indices.dtype}, must be int32 or int64: convert them with .long()")
    if indices.dim() != (1 if offsets is not None else 2):
        wanted = "one dimension, because offsets are" if offsets is not None else "two dimensions, because no offsets are"
        raise ArgumentError(f"embedding bag: indices have the shape {list(indices.shape)}, must have {wanted} given")
    if weights is not None and weights.shape != indices.shape:
        raise ArgumentError(
            f"embedding bag: weights {list(weights.shape)} must have the shape of the indices, {list(indices.shape)}"
        )
    if offsets is not None:
        if offsets.dim() != 1 or offsets.numel() < last:
            raise ArgumentError(
                f"embedding bag: offsets {list(offsets.shape)} must be a vector. With include_last_offset, "
                "its last number is the end of the last bag"
            )
        wide = index_type(indices, offsets)
        offsets, indices = offsets.to(wide).contiguous(), indices.to(wide)
    held = None if weights is None else weights.detach().contiguous()
    return BagList(indices.contiguous(), offsets, held, padding, last)


def index_type(indices: Tensor, offsets: Tensor | None) -> torch.dtype:
    """Returns the type to which indices and offsets are converted."""
    return indices.dtype if offsets is None or offsets.dtype is indices.dtype else torch.int64


def lines_of(lines: Sequence[Sequence[int]]) -> Tensor:
    """Returns lines as an operand of a kernel."""
    numbers = array("q")
    for line in lines:
        numbers.extend(line)
    return torch.frombuffer(numbers, dtype=torch.int64).view(len(lines), -1)


def zeros_of(count: int) -> "tuple[array[int], Tensor]":
    """Returns numbers for a kernel to write, as an array for Python and as a tensor over the same memory."""
    numbers = array("q", bytes(8 * count))
    return numbers, torch.frombuffer(numbers, dtype=torch.int64)


def raise_for(wrong: "array[int]", bags: Sequence[BagList], rows: Sequence[int]) -> None:
    """Raises IndexRangeError or ArgumentError for the problem that a kernel has found."""
    table = next(number for number, problem in enumerate(wrong) if problem)
    problem, which = wrong[table], f" {table} of {len(rows)}" if len(rows) > 1 else ""
    if problem > 0:
        index = int(bags[table].indices.flatten()[problem - 1])
        raise IndexRangeError(
            f"embedding bag: index {index} at place {problem - 1} is out of range for table{which}, which has {rows[table]} "
            f"rows (0 to {rows[table] - 1})"
        )
    raise ArgumentError(
        f"embedding bag: the offsets of bag {-1 - problem} of table{which} are wrong: offsets must begin with 0, ascend, and "
        f"end within the {bags[table].entries} indices"
    )
