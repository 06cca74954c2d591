"""Elementwise work after a product with a SparseTensor goes into its kernel, in inference and in training."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import gossamer
from gossamer import Format, SparseTensor, einsum
from gossamer.backend import sparse as backend
from gossamer.backend.rewrite import SparseRewrite
from tests.sparsity.made import FORMATS

Function = Callable[..., Tensor]


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The operations in the graphs that are left after rewriting."""
    found: Counter[str] = Counter()
    real = SparseRewrite._rewrite

    def noting(self: SparseRewrite, graph: fx.Graph, *rest: Any) -> None:
        real(self, graph, *rest)
        graph.lint()
        found.update(str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function" and "." in str(n.target))

    monkeypatch.setattr(SparseRewrite, "_rewrite", noting)
    return found


def compiled(function: Function, dense: str = "eager", **options: Any) -> Function:
    options = {"dense": dense, "strict": True, **options}
    return torch.compile(function, backend=lambda gm, ex: backend(gm, ex, options=options), fullgraph=True)


def operands(format: Format = Format.CSR, dtype: torch.dtype = torch.float32, columns: int = 20) -> list[Tensor]:
    """A [9, 8] with an empty row, x, and what can be read beside them: a vector, a matrix, a number a row."""
    a = (torch.randint(1, 4, (9, 8)) * (torch.rand(9, 8) < 0.5)).to(dtype)
    a[2] = 0
    sizes = ((8, columns), (columns,), (9, columns), (9, 1))
    return [SparseTensor.from_dense(a, format), *(torch.randint(-8, 9, size).to(dtype).div(4) for size in sizes)]


FUSED: dict[str, tuple[Function, int]] = {
    "relu": (lambda a, x, b, r, s: torch.relu(a @ x + b), 2),
    "gelu": (lambda a, x, b, r, s: F.gelu(a @ x), 1),
    "residual and scale": (lambda a, x, b, r, s: F.leaky_relu((a @ x) * s + b, 0.1) + r, 4),
    "in any order": (lambda a, x, b, r, s: (r * einsum("kj,ik->ij", x, a) - s).clamp(-1, 1), 3),
    "transposed": (lambda a, x, b, r, s: torch.tanh(a.t() @ r + b), 2),
    "two products": (lambda a, x, b, r, s: torch.relu(a @ x + (a * 2) @ x), 2),
}
KEPT: dict[str, Function] = {
    "alone": lambda a, x, b, r, s: a @ x,
    "used twice": lambda a, x, b, r, s: (lambda y: torch.cat([y, y + b]))(a @ x),
    "a vector": lambda a, x, b, r, s: torch.relu(a @ x[:, 0]),
    "another layout": lambda a, x, b, r, s: torch.relu(einsum("ik,kj->ji", a, x)),
    "another type": lambda a, x, b, r, s: (a @ x).double(),
}


@pytest.mark.parametrize("name", FUSED)
def test_it_becomes_one_operation(name: str, operations: Counter[str]) -> None:
    function, count = FUSED[name]
    given = operands()
    with gossamer.backend.report.report.collect() as collected:
        result = compiled(function)(*given)
    torch.testing.assert_close(result, function(*given))
    assert operations["region"] == 1
    (fused,) = [d for d in collected.decisions if "fused" in d.reason]
    assert (fused.schedule, fused.reason.split(" op")[0]) == ("rows", str(count))
    assert operations["einsum"] == (name == "two products")


@pytest.mark.parametrize("name", KEPT)
def test_what_is_needed_otherwise_stays(name: str, operations: Counter[str]) -> None:
    given = operands()
    torch.testing.assert_close(compiled(KEPT[name])(*given), KEPT[name](*given))
    assert operations["region"] == 0 < operations["einsum"]


@pytest.mark.parametrize("format", ["COO", "CSR int32", "CSC", "BSR", "DCSC"])
def test_any_format(format: str, operations: Counter[str]) -> None:
    given = operands(FORMATS[format])
    function, _ = FUSED["relu"]
    torch.testing.assert_close(compiled(function)(*given), function(*given))
    assert operations["region"] == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_any_type(dtype: torch.dtype, operations: Counter[str]) -> None:
    given = operands(dtype=dtype)
    function, _ = FUSED["residual and scale"]
    torch.testing.assert_close(compiled(function)(*given), function(*given), rtol=2e-2, atol=2e-2)
    assert operations["region"] == 1


def gradients(function: Function, given: list[Tensor]) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in given]
    out = function(*leaves)
    found = torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel()).view(out.shape), allow_unused=True)
    dense = (each.to_dense() if isinstance(each, SparseTensor) else each for each in found if each is not None)
    return [out.detach(), *dense]


@pytest.mark.parametrize(
    ("name", "step", "fused"), [("relu", "relu", True), ("gelu", "gelu", False), ("transposed", "tanh", True)]
)
def test_training_keeps_what_backward_needs(name: str, step: str, fused: bool, operations: Counter[str]) -> None:
    """Of relu and tanh that is the result, of gelu the argument."""
    function, given = FUSED[name][0], operands()
    expected = gradients(function, given)
    for found, wanted in zip(gradients(compiled(function), given), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert (operations["region"], operations[step]) == (fused, not fused)


class Gcn(nn.Module):
    """relu(A (X W) + b) and a layer without relu, each narrower than what it is given, so that A comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.bias, self.out = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(4))

    def forward(self, a: SparseTensor, x: Tensor) -> Tensor:
        h = torch.relu(a @ self.first(x) + self.bias)
        return a @ self.second(h) + self.out


@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_a_network_is_trained_with_both_layers_fused(dense: str, operations: Counter[str]) -> None:
    model, a = Gcn(), operands()[0].to_dense()
    square = SparseTensor.from_dense(F.pad(a, (0, 1)))
    x = torch.randn(9, 20)
    results = []
    for forward in (model, compiled(model, dense)):
        model.zero_grad()
        y = forward(square, x)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad.clone() for p in model.parameters())])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert operations["region"] == 2 and not operations["relu"]


def test_rows_of_any_number_share_a_graph_and_a_kernel(operations: Counter[str]) -> None:
    function = compiled(FUSED["relu"][0])
    for rows in (9, 30, 50):
        given = [SparseTensor.from_dense(torch.rand(rows, rows).round()), torch.randn(rows, 20), torch.randn(20), None, None]
        torch.testing.assert_close(function(*given), FUSED["relu"][0](*given), rtol=1e-5, atol=1e-4)
    assert operations["region"] == 2  # static, then dynamic sizes


def test_with_the_reference_schedule_nothing_is_fused(operations: Counter[str]) -> None:
    given = operands()
    result = compiled(FUSED["relu"][0], schedule="reference")(*given)
    torch.testing.assert_close(result, FUSED["relu"][0](*given))
    assert operations["region"] == 0
