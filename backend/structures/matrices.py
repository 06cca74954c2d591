"""Structured matrices, which are made of smaller ones, and products with them that never make the whole matrix.

x @ kron(a, b)          view x as [..., rows of a, rows of b], multiply with b, transpose, multiply with a
x @ block_diag(a, b)    split x, and multiply each part with its block
x @ (a + b)             x @ a + x @ b
x @ (a @ b)             (x @ a) @ b

Each matrix is the right factor of a product. The unit of costs is a multiply-add of a large dense product. They were fitted to
one thread of an AMD EPYC (znver5), with 1 to 512 rows of x and matrices of 256 to 1024 columns.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx

Emit = Callable[..., fx.Node]
"""Adds a call to the graph: (function, *arguments) → its node."""

_ELEMENT = 10.0
"""The cost of reading or writing an element of a tensor."""

_CALL = 2.7e5
"""The cost of calling an operation of torch."""

_NARROW = 32.0
"""A product with a matrix that has so few rows or columns takes twice as long for each multiply-add."""

_SPARSE = 3.0
"""The cost of a multiply-add with a nonzero of a sparse matrix."""


class Matrix(ABC):
    """A matrix of `rows` and `columns`."""

    rows: int
    columns: int

    @abstractmethod
    def multiplied(self, emit: Emit, x: fx.Node) -> fx.Node:
        """Emits x [..., rows] times this matrix, and returns the node."""

    @abstractmethod
    def cost(self, tokens: float) -> float:
        """Returns the cost of `multiplied` for so many rows of x."""

    @property
    @abstractmethod
    def transposed(self) -> "Matrix":
        """The transpose."""

    @property
    @abstractmethod
    def made(self) -> float:
        """The cost of making the whole matrix."""

    @property
    @abstractmethod
    def structure(self) -> str:
        """Its structure as a text for the report; empty for a matrix that is stored whole."""

    @property
    def whole(self) -> float:
        """The cost of reading or writing the whole matrix."""
        return self.rows * self.columns * _ELEMENT


@dataclass(frozen=True)
class Given(Matrix):
    """A tensor of the graph, or its transpose if `turned`. `density` is the share of its nonzeros."""

    node: fx.Node
    rows: int
    columns: int
    density: float = 1.0
    turned: bool = False

    def multiplied(self, emit: Emit, x: fx.Node) -> fx.Node:
        return emit(F.linear, x, self.node) if self.turned else emit(torch.matmul, x, self.node)

    def cost(self, tokens: float) -> float:
        each = min(1.0, _SPARSE * self.density) * (1 + _NARROW / min(self.rows, self.columns))
        return _CALL + tokens * (self.rows * self.columns * each + (self.rows + self.columns) * _ELEMENT)

    @property
    def transposed(self) -> Matrix:
        return Given(self.node, self.columns, self.rows, self.density, not self.turned)

    @property
    def made(self) -> float:
        return 0.0

    @property
    def structure(self) -> str:
        return ""


@dataclass(frozen=True)
class Diagonal(Matrix):
    """diag(node), or the identity if `node` is None."""

    node: fx.Node | None
    rows: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", self.rows)

    def multiplied(self, emit: Emit, x: fx.Node) -> fx.Node:
        return x if self.node is None else emit(torch.mul, x, self.node)

    def cost(self, tokens: float) -> float:
        return 0.0 if self.node is None else _CALL + 2 * tokens * self.rows * _ELEMENT

    @property
    def transposed(self) -> Matrix:
        return self

    @property
    def made(self) -> float:
        return self.whole

    @property
    def structure(self) -> str:
        return "an identity" if self.node is None else "a diagonal"


@dataclass(frozen=True)
class Kronecker(Matrix):
    """kron(left, right)."""

    left: Matrix
    right: Matrix

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.left.rows * self.right.rows)
        object.__setattr__(self, "columns", self.left.columns * self.right.columns)

    def multiplied(self, emit: Emit, x: fx.Node) -> fx.Node:
        y = emit(torch.unflatten, x, -1, (self.left.rows, self.right.rows))
        if self._right_first(1.0):
            y = self._times_left(emit, self.right.multiplied(emit, y))
        else:
            y = self.right.multiplied(emit, self._times_left(emit, y))
        return emit(torch.flatten, y, -2)

    def _times_left(self, emit: Emit, x: fx.Node) -> fx.Node:
        if isinstance(self.left, Diagonal) and self.left.node is None:
            return x
        return emit(torch.transpose, self.left.multiplied(emit, emit(torch.transpose, x, -1, -2)), -1, -2)

    def _right_first(self, tokens: float) -> bool:
        return self._cost(tokens, True) <= self._cost(tokens, False)

    def _cost(self, tokens: float, right_first: bool) -> float:
        if right_first:
            return self.right.cost(tokens * self.left.rows) + self.left.cost(tokens * self.right.columns)
        return self.left.cost(tokens * self.right.rows) + self.right.cost(tokens * self.left.columns)

    def cost(self, tokens: float) -> float:
        copies = 2 * _CALL + tokens * (self.rows + self.columns) * _ELEMENT
        return copies + min(self._cost(tokens, True), self._cost(tokens, False))

    @property
    def transposed(self) -> Matrix:
        return Kronecker(self.left.transposed, self.right.transposed)

    @property
    def made(self) -> float:
        return self.left.made + self.right.made + self.whole

    @property
    def structure(self) -> str:
        parts = _factors(self)
        return "kron of " + " and ".join(part.structure or f"{part.rows}x{part.columns}" for part in parts)


def _factors(matrix: Matrix) -> list[Matrix]:
    return [*_factors(matrix.left), *_factors(matrix.right)] if isinstance(matrix, Kronecker) else [matrix]


@dataclass(frozen=True)
class BlockDiagonal(Matrix):
    """block_diag(*blocks)."""

    blocks: Sequence[Matrix]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", sum(block.rows for block in self.blocks))
        object.__setattr__(self, "columns", sum(block.columns for block in self.blocks))

    def multiplied(self, emit: Emit, x: fx.Node) -> fx.Node:
        if (nodes := self._alike()) is None:
            parts = emit(torch.split, x, [block.rows for block in self.blocks], -1)
            each = [block.multiplied(emit, emit(operator.getitem, parts, n)) for n, block in enumerate(self.blocks)]
            return emit(torch.cat, each, -1)
        first = self.blocks[0]
        x = emit(torch.unflatten, x, -1, (len(nodes), first.rows))
        equation = "...bi,boi->...bo" if isinstance(first, Given) and first.turned else "...bi,bio->...bo"
        return emit(torch.flatten, emit(torch.einsum, equation, x, emit(torch.stack, nodes)), -2)

    def _alike(self) -> list[fx.Node] | None:
        """Returns the tensors of the blocks, if all have one size; otherwise None."""
        first = self.blocks[0]
        if not isinstance(first, Given):
            return None
        nodes = [
            block.node
            for block in self.blocks
            if isinstance(block, Given)
            and (block.rows, block.columns, block.turned) == (first.rows, first.columns, first.turned)
        ]
        return nodes if len(nodes) == len(self.blocks) else None

    def cost(self, tokens: float) -> float:
        copies, each = 2 * _CALL + tokens * (self.rows + self.columns) * _ELEMENT, sum(b.cost(tokens) for b in self.blocks)
        if self._alike() is None:
            return copies + each
        return copies + each - (len(self.blocks) - 4) * _CALL + sum(2 * block.whole for block in self.blocks)

    @property
    def transposed(self) -> Matrix:
        return BlockDiagonal([block.transposed for block in self.blocks])

    @property
    def made(self) -> float:
        return self.whole + sum(block.made for block in self.blocks)

    @property
    def structure(self) -> str:
        return f"{len(self.blocks)} blocks on the diagonal"


@dataclass(frozen=True)
class Scaled(Matrix):
    """A number times a matrix."""

    matrix: Matrix
    number: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.matrix.rows)
        object.__setattr__(self, "columns", self.matrix.columns)

    def multiplied(self, emit: Emit, x: fx.Node) -> fx.Node:
        return emit(torch.mul, self.matrix.multiplied(emit, x), self.number)

    def cost(self, tokens: float) -> float:
        return self.matrix.cost(tokens) + _CALL + 2 * tokens * self.columns * _ELEMENT

    @property
    def transposed(self) -> Matrix:
        return Scaled(self.matrix.transposed, self.number)

    @property
    def made(self) -> float:
        return self.matrix.made + self.whole

    @property
    def structure(self) -> str:
        return self.matrix.structure


@dataclass(frozen=True)
class Product(Matrix):
    """Matrices multiplied with each other."""

    matrices: Sequence[Matrix]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.matrices[0].rows)
        object.__setattr__(self, "columns", self.matrices[-1].columns)

    def multiplied(self, emit: Emit, x: fx.Node) -> fx.Node:
        for matrix in self.matrices:
            x = matrix.multiplied(emit, x)
        return x

    def cost(self, tokens: float) -> float:
        return sum(matrix.cost(tokens) for matrix in self.matrices)

    @property
    def transposed(self) -> Matrix:
        return Product([matrix.transposed for matrix in reversed(self.matrices)])

    @property
    def made(self) -> float:
        products = sum(self.rows * factor.rows * factor.columns for factor in self.matrices[1:])
        return products + self.whole + sum(matrix.made for matrix in self.matrices)

    @property
    def structure(self) -> str:
        return " times ".join(filter(None, (matrix.structure for matrix in self.matrices)))


@dataclass(frozen=True)
class Sum(Matrix):
    """The sum of two matrices; `sign` is -1 for a difference."""

    left: Matrix
    right: Matrix
    sign: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.left.rows)
        object.__setattr__(self, "columns", self.left.columns)

    def multiplied(self, emit: Emit, x: fx.Node) -> fx.Node:
        parts = self.left.multiplied(emit, x), self.right.multiplied(emit, x)
        return emit(torch.add if self.sign > 0 else torch.sub, *parts)

    def cost(self, tokens: float) -> float:
        return self.left.cost(tokens) + self.right.cost(tokens) + _CALL + 3 * tokens * self.columns * _ELEMENT

    @property
    def transposed(self) -> Matrix:
        return Sum(self.left.transposed, self.right.transposed, self.sign)

    @property
    def made(self) -> float:
        return self.left.made + self.right.made + self.whole

    @property
    def structure(self) -> str:
        return " and ".join(filter(None, (self.left.structure, self.right.structure)))
