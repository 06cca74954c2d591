"""Einsums of sparse and dense operands that are no single product of two matrices; all of them f32.

chain    ij,jk,kl->il     two pruned matrices of 2,048 x 2,048 and a dense one
mttkrp   ijk,jr,kr->ir    a tensor of 200 x 200 x 200 times two matrices, the step of a CP decomposition (MTTKRP)

`by-hand` is PyTorch with what a person writes instead: products in CSR from the right to the left, or rows that are gathered,
multiplied and added (compiled by Inductor).
"""

from __future__ import annotations

from argparse import Namespace, _ActionsContainer
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import gossamer
from benchmarks.arguments import add_list, counted, sizes, some_of
from benchmarks.contenders.sparse import missing
from benchmarks.models import largest_error
from benchmarks.registry import Case, Contender, Prepared, Unsupported, Work, Workload
from gossamer import Format

_SHAPES = {"chain": (2048, 2048), "mttkrp": (200, 200, 200)}
_EXPRESSIONS = {"chain": "ij,jk,kl->il", "mttkrp": "ijk,jr,kr->ir"}
_DENSITIES = {"chain": 0.01, "mttkrp": 0.005}


@dataclass(frozen=True, eq=False)
class Problem:
    """An einsum: its sparse operands come first, as dense tensors that are mostly zeros."""

    name: str
    sparse: list[Tensor]
    dense: list[Tensor]
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"f32": 2e-5})
    precision: str = "f32"

    @property
    def expression(self) -> str:
        return _EXPRESSIONS[self.name]

    def reference(self) -> tuple[Tensor, Work]:
        columns = self.dense[-1].shape[1]
        operands = [each.double() for each in (*self.sparse, *self.dense)]
        if self.name == "chain":
            result = operands[0] @ (operands[1] @ operands[2])
        else:
            pairs = torch.einsum("jr,kr->jkr", *operands[1:]).flatten(0, 1)
            result = operands[0].flatten(1) @ pairs
        each = 2.0 if self.name == "chain" else 3.0
        nonzeros = sum(int(tensor.count_nonzero()) for tensor in self.sparse)
        stored, moved = sum(tensor.nbytes for tensor in self.sparse), sum(tensor.nbytes for tensor in self.dense)
        elements = sum(tensor.numel() for tensor in self.sparse)
        return result, Work(each * elements * columns, each * nonzeros * columns, stored, moved)

    def error(self, result: Any, expected: Tensor) -> float:
        return largest_error(torch.as_tensor(result), expected)


def build(name: str, columns: int) -> Problem:
    draw = torch.Generator().manual_seed(0)
    shape, density = _SHAPES[name], _DENSITIES[name]

    def pruned() -> Tensor:
        return torch.randn(shape, generator=draw) * (torch.rand(shape, generator=draw) < density)

    sparse = [pruned() for _ in range(2 if name == "chain" else 1)]
    return Problem(name, sparse, [torch.randn(shape[0], columns, generator=draw) for _ in range(3 - len(sparse))])


def _torch(compiled: Callable[[Any], Any], problem: Problem) -> Prepared:
    return Prepared(partial(compiled(torch.einsum), problem.expression, *problem.sparse, *problem.dense))


def _as_it_is(function: Any) -> Any:
    return function


def by_hand(problem: Problem) -> Prepared:
    if problem.name == "chain":
        (a, b), (c,) = [each.to_sparse_csr() for each in problem.sparse], problem.dense
        return Prepared(lambda: a @ (b @ c))
    (tensor,), (x, y) = problem.sparse, problem.dense
    at, size = tensor.nonzero(as_tuple=True), tensor.shape[0]
    values = tensor[at]

    def mttkrp(values: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return x.new_zeros(size, x.shape[1]).index_add(0, at[0], values[:, None] * x[at[1]] * y[at[2]])

    return Prepared(partial(torch.compile(mttkrp), values, x, y))


def scipy(problem: Problem) -> Prepared:
    if problem.name != "chain":
        raise Unsupported("SciPy has no einsum, and no sparse tensors of three dimensions in products")
    from scipy.sparse import csr_array

    (a, b), c = [csr_array(each.numpy()) for each in problem.sparse], problem.dense[0].numpy()
    return Prepared(lambda: a @ (b @ c))


def pydata(problem: Problem) -> Prepared:
    if problem.name != "chain":
        raise Unsupported("its einsum expands all operands to all letters, which takes minutes")
    import sparse

    (a, b), c = [sparse.GCXS.from_numpy(each.numpy()) for each in problem.sparse], problem.dense[0].numpy()
    return Prepared(lambda: a @ (b @ c))


def ours(problem: Problem) -> Prepared:
    format = Format.CSR if problem.name == "chain" else Format.csf(3)
    operands = [gossamer.SparseTensor.from_dense(each, format) for each in problem.sparse]
    return Prepared(partial(gossamer.einsum, problem.expression, *operands, *problem.dense, format="dense"))


def _needs(package: str) -> Callable[[], str | None]:
    return lambda: None if find_spec(package) else f"pip install {package}"


def contenders() -> Mapping[str, Contender]:
    return {
        "eager": Contender("PyTorch, dense einsum", partial(_torch, _as_it_is)),
        "inductor": Contender("Inductor, dense einsum", partial(_torch, torch.compile)),
        "by-hand": Contender("PyTorch, by hand", by_hand),
        "scipy": Contender("SciPy", scipy, missing=_needs("scipy")),
        "pydata": Contender("PyData sparse", pydata, own_threads=True, missing=_needs("sparse")),
        "sparse": Contender("Gossamer", ours, missing=missing),
    }


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--einsums", some_of(*_SHAPES), ",".join(_SHAPES), "which")
    add_list(parser, "--columns", sizes, "16,64,256", "of the last operand")


def cases(args: Namespace) -> list[Case]:
    return [
        Case(
            f"{name}, {counted(columns, 'column')}",
            {"einsum": name, "columns": columns},
            partial(build, name, columns),
            2e-9 * columns * torch.Size(_SHAPES[name]).numel(),
        )
        for name in args.einsums
        for columns in args.columns
    ]


WORKLOAD = Workload(
    "einsums of sparse and dense operands",
    add_arguments,
    cases,
    contenders=contenders,
    baselines=("eager", "by-hand"),
    preparing=5.0,
)
