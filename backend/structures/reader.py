"""Reads how Dynamo's graph makes a matrix, and returns its structure. rewrite.py calls this for the factors of products.

torch.kron(a, b).T * 2      →    Scaled(Kronecker(Given(a).transposed, Given(b).transposed), 2)
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from gossamer.backend.graph.inputs import density
from gossamer.backend.graph.nodes import WIDE_FLOATS, argument
from gossamer.backend.structures.matrices import BlockDiagonal, Diagonal, Given, Kronecker, Matrix, Product, Scaled, Sum
from gossamer.runtime.torch_internals import FakeTensor

MATMUL: tuple[Any, ...] = (torch.matmul, torch.mm, torch.mv, operator.matmul, "matmul", "mm", "mv", "__matmul__")
_CHAINS: tuple[Any, ...] = (torch.linalg.multi_dot, torch.chain_matmul)
_TURNS: tuple[Any, ...] = (torch.t, "t", torch.adjoint, "adjoint")
_SWAPS: tuple[Any, ...] = (
    torch.transpose, torch.swapaxes, torch.swapdims, torch.permute, "transpose", "swapaxes", "swapdims", "permute",
)  # fmt: skip
_ADDS: dict[Any, int] = {torch.add: 1, operator.add: 1, "add": 1, torch.sub: -1, operator.sub: -1, "sub": -1}
_SCALES: tuple[Any, ...] = (torch.mul, operator.mul, "mul", torch.div, operator.truediv, "div")
_QUOTIENTS: tuple[Any, ...] = (torch.div, operator.truediv, "div")


class Reader:
    """Reads the matrices of one graph.

    values  values of its static inputs, for their densities
    """

    def __init__(self, values: Mapping[fx.Node, Tensor]) -> None:
        self._values, self._read = values, dict[fx.Node, Matrix | None]()

    def matrix(self, node: object) -> Matrix | None:
        """Returns the matrix of a node, whole or structured; None for dynamic sizes and types not in `WIDE_FLOATS`."""
        if not isinstance(node, fx.Node):
            return None
        value = node.meta.get("example_value")
        if not isinstance(value, Tensor) or type(value) not in (Tensor, FakeTensor):
            return None
        if value.dim() != 2 or value.dtype not in WIDE_FLOATS:
            return None
        rows, columns = value.shape
        if not isinstance(rows, int) or not isinstance(columns, int) or not rows or not columns:
            return None
        if node not in self._read:
            found = self._structured(node)
            same = found is not None and (found.rows, found.columns) == (rows, columns)
            self._read[node] = found if same else Given(node, rows, columns, self._density(node))
        return self._read[node]

    def _density(self, node: fx.Node) -> float:
        value = self._values.get(node)
        return 1.0 if value is None else density(value)

    def _structured(self, node: fx.Node) -> Matrix | None:
        """Returns the structure that a node gives to other matrices; None if no rule matches."""
        for rule in _RULES if node.args else ():  # calls with keywords alone are rare
            if (found := rule(self, node)) is not None:
                return found
        return None

    def all(self, nodes: Any) -> list[Matrix] | None:
        """Returns the matrices of several nodes; None if one is no matrix, or their types differ."""
        found = [self.matrix(node) for node in nodes]
        if any(each is None for each in found) or len({node.meta["example_value"].dtype for node in nodes}) != 1:
            return None
        return [each for each in found if each is not None]


def _kron(reader: Reader, node: fx.Node) -> Matrix | None:
    if node.target not in (torch.kron, "kron"):
        return None
    found = reader.all([node.args[0], argument(node, 1, "other")])
    return Kronecker(*found) if found else None


def _outer(reader: Reader, node: fx.Node) -> Matrix | None:
    """The rule for einsum("ij,kl->ikjl", a, b).reshape(rows, columns), a Kronecker product."""
    if node.target not in ("reshape", "view", torch.reshape):
        return None
    einsum: Any = node.args[0]
    if einsum.target is not torch.einsum or len(einsum.args) != 3:
        return None
    inputs, _, result = einsum.args[0].replace(" ", "").partition("->")
    a, _, b = inputs.partition(",")
    if len(set(a + b)) != 4 or (len(a), len(b)) != (2, 2):
        return None
    for left, right, (first, second) in ((a, b, einsum.args[1:]), (b, a, einsum.args[:0:-1])):
        if result == left[0] + right[0] + left[1] + right[1]:
            found = reader.all([first, second])
            return Kronecker(*found) if found else None
    return None


def _blocks(reader: Reader, node: fx.Node) -> Matrix | None:
    if node.target is not torch.block_diag or not node.args or any(not isinstance(each, fx.Node) for each in node.args):
        return None
    found = reader.all(node.args)
    return BlockDiagonal(found) if found else None


def _diagonal(_: Reader, node: fx.Node) -> Matrix | None:
    rows = node.meta["example_value"].shape[0]
    if node.target is torch.eye:
        return Diagonal(None, rows)
    if node.target not in (torch.diag, "diag", torch.diag_embed, "diag_embed") or len(node.args) != 1 or node.kwargs:
        return None
    given: Any = node.args[0]
    return Diagonal(given, rows) if given.meta["example_value"].dim() == 1 else None


def _transpose(reader: Reader, node: fx.Node) -> Matrix | None:
    swapped = node.target in _SWAPS and _swaps(node)
    turned = node.target is getattr and node.args[1] in ("T", "mT", "H", "mH")
    if not (swapped or turned or node.target in _TURNS):
        return None
    found = reader.matrix(node.args[0])
    return None if found is None else found.transposed


def _swaps(node: fx.Node) -> bool:
    """Whether a node swaps the two dimensions of a matrix."""
    dims = node.args[1:]
    if len(dims) == 1 and isinstance(dims[0], tuple | list):
        dims = tuple(dims[0])
    if node.kwargs or len(dims) != 2 or not all(isinstance(dim, int) for dim in dims):
        return False
    first, second = (int(str(dim)) % 2 for dim in dims)
    if "permute" in (node.target, getattr(node.target, "__name__", "")):
        return (first, second) == (1, 0)
    return first != second


def _same(reader: Reader, node: fx.Node) -> Matrix | None:
    return reader.matrix(node.args[0]) if node.target == "contiguous" and not node.kwargs else None


def _scaled(reader: Reader, node: fx.Node) -> Matrix | None:
    if node.target not in _SCALES or len(node.args) != 2 or node.kwargs:
        return None
    matrix, number = node.args
    if isinstance(matrix, int | float) and node.target not in _QUOTIENTS:
        matrix, number = number, matrix
    found = reader.matrix(matrix) if isinstance(number, int | float) else None
    if found is None or not isinstance(number, int | float) or (node.target in _QUOTIENTS and not number):
        return None
    return Scaled(found, 1 / number if node.target in _QUOTIENTS else number)


def _product(reader: Reader, node: fx.Node) -> Matrix | None:
    if node.target in _CHAINS:
        given: Any = node.args[0] if node.target is torch.linalg.multi_dot else node.args
    else:
        given = node.args if node.target in MATMUL else ()
    found = reader.all(given) if len(given) > 1 else None
    return Product(found) if found else None


def _sum(reader: Reader, node: fx.Node) -> Matrix | None:
    if node.target not in _ADDS or len(node.args) != 2 or node.kwargs or not all(isinstance(n, fx.Node) for n in node.args):
        return None
    found = reader.all(node.args)
    if not found or len({(each.rows, each.columns) for each in found}) != 1:
        return None
    left, right = found
    return Sum(left, right, _ADDS[node.target])


_RULES: tuple[Callable[[Reader, fx.Node], Matrix | None], ...] = (
    _kron, _outer, _blocks, _diagonal, _transpose, _same, _scaled, _product, _sum,
)  # fmt: skip
