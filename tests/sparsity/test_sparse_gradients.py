"""Gradients of operations on SparseTensors, with respect to stored values and dense operands, by gradcheck."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from gossamer import Format, SparseTensor, einsum
from gossamer.backend import sparse as backend
from gossamer.sparsity.operations.same_pattern import PatternError
from gossamer.sparsity.tensor.sparse_tensor import like
from tests.sparsity.made import FORMATS, matrix, sparse, two_of_four

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, requires_grad=True)


def checked(function: Callable[..., Tensor], pattern: SparseTensor, *others: Tensor) -> None:
    """gradcheck of function(sparse, *others) with respect to the stored values and to the others."""
    values = pattern.components[-1].clone().requires_grad_()

    def of_values(values: Tensor, *others: Tensor) -> Tensor:
        out = function(like(pattern, values), *others)
        return out.values() if isinstance(out, SparseTensor) else out

    assert gradcheck(of_values, (values, *others), fast_mode=True)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("CSR int32", "dense", "loose")])
def test_products_in_every_format(name: str) -> None:
    checked(lambda a, x: (a @ x).sum(1), sparse(matrix(4, 6, dtype=DOUBLE), name), leaf(6, 3))


@pytest.mark.parametrize("dim", [None, 1])
def test_second_derivatives_of_norms_at_stored_zeros(dim: int | None) -> None:
    pattern = sparse(matrix(4, 6, dtype=DOUBLE), "BSR")
    values = pattern.components[-1].clone().requires_grad_()
    assert (values == 0).any()
    assert gradgradcheck(lambda values: like(pattern, values).norm(dim=dim), values)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda a, x, y: torch.sparse.sampled_addmm(a, x, y, beta=2), ((4, 3), (3, 6))),
        (lambda a, x: einsum("ij,jk->i", a, x), ((6, 3),)),
        (lambda a: a.to_format(Format.csf(2)), ()),
        (lambda a: einsum("ij->ij", a) * 2, ()),
        (lambda a: einsum("ij->ij", a, format=Format.CSC), ()),
        (lambda a: einsum("ij->ji", a), ()),
    ],
    ids=["sampled_addmm", "outer sum", "another format", "the same", "the same as CSC", "transposed"],
)
def test_one_sparse_operand(function: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...]) -> None:
    checked(function, sparse(matrix(4, 6, dtype=DOUBLE)), *(leaf(*shape) for shape in shapes))


@pytest.mark.parametrize("names", [("CSR", "BSR")], ids=" ".join)
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a @ b.t(),
        lambda a, b: einsum("ij,kj->ik", a, b, format="dense"),
        lambda a, b: a + b,
        lambda a, b: a * b,
        lambda a, b: 2 * a - b,
    ],
    ids=["product", "dense product", "union", "intersection", "difference"],
)
def test_two_sparse_operands(function: Callable[..., Tensor], names: tuple[str, str]) -> None:
    left, right = (sparse(matrix(4, 6, 0.5, DOUBLE), name) for name in names)
    checked(lambda a: function(a, right), left)
    checked(lambda b: function(left, b), right)


def test_gradients_of_gradients() -> None:
    pattern = sparse(matrix(3, 4, dtype=DOUBLE))
    values = pattern.components[-1].clone().requires_grad_()
    assert gradgradcheck(lambda v, x: torch.tanh(like(pattern, v) @ x), (values, leaf(4, 2)))


def test_the_gradient_of_a_parameter_has_gradients() -> None:
    dense, x = matrix(4, 4, dtype=DOUBLE), torch.randn(4, 3, dtype=DOUBLE)
    theirs, ours = dense.clone().requires_grad_(), nn.Parameter(sparse(dense))
    for weight, kept in ((theirs, theirs * (dense != 0)), (ours, ours)):
        (first,) = torch.autograd.grad(torch.tanh(kept @ torch.tanh(kept @ x)).sum(), weight, create_graph=True)
        with warnings.catch_warnings(action="ignore"):  # that parameter and gradient refer to each other
            ((first @ x).square().sum() + (first * kept).sum() + torch.tanh(kept @ x).sum()).backward(create_graph=True)
        weight.grad.square().sum().backward()  # the gradient of a gradient of a gradient is added
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad.to_dense(), theirs.grad)


def test_a_gradient_may_be_given_in_any_form() -> None:
    a, x = sparse(matrix(4, 4, dtype=DOUBLE)), torch.randn(4, 4, dtype=DOUBLE)
    kept = a.to_dense() != 0
    given = torch.randn(4, 4, dtype=DOUBLE)
    flipped = (kept * 1.0).flip(1)  # as many entries in each row, in other columns
    forms = [given, sparse(given, "CSC"), sparse(given.tril(), "COO"), sparse(flipped), a * 3]
    for form in forms:
        weight = nn.Parameter(a.clone())
        (weight * x).backward(form)
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad.to_dense(), form.to_dense() * x * kept)


def test_a_graph_refuses_gradients_of_another_pattern() -> None:
    a, x = sparse(matrix(4, 4)), torch.randn(4, 4)
    called = torch.compile(lambda a, x: a * x, backend=backend, fullgraph=True)
    weight = nn.Parameter(a)
    called(weight, x).backward(a * 3)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.to_dense(), a.detach().to_dense() * 3 * x)
    with pytest.raises(PatternError, match="is the gradient of the other"):
        called(weight, x).backward(sparse(a.detach().to_dense().flip(1)))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected")
def test_detect_anomaly_finds_nan() -> None:
    a = nn.Parameter(sparse(matrix(3, 4).abs()))
    with torch.autograd.detect_anomaly():
        (a * 2).sqrt().sum().backward()
        assert a.grad is not None
        with pytest.raises(RuntimeError, match="returned nan"):
            (a * -2).sqrt().sum().backward()


def test_from_dense_and_from_parts_are_differentiable() -> None:
    dense = matrix(3, 4, dtype=DOUBLE).requires_grad_()
    SparseTensor.from_dense(dense).to_dense().square().sum().backward()
    torch.testing.assert_close(dense.grad, 2 * dense.detach())
    a = sparse(matrix(3, 4))
    values = a.values().clone().requires_grad_()
    w = SparseTensor.from_parts(Format.CSR, (3, 4), a.positions(1), a.coordinates(1), values)
    (w @ torch.ones(4)).sum().backward()
    torch.testing.assert_close(values.grad, torch.ones(a.nnz))


def test_the_gradient_of_a_parameter_is_sparse_and_accumulates() -> None:
    weight = nn.Parameter(sparse(matrix(3, 4)))
    x = torch.randn(4, 2)
    for times in (1, 2):
        (weight @ x).sum().backward()
        assert isinstance(weight.grad, SparseTensor)
        assert weight.grad.coordinates(1).data_ptr() == weight.coordinates(1).data_ptr()
        expected = times * x.sum(1).expand(3, 4) * (weight.detach().to_dense() != 0)
        torch.testing.assert_close(weight.grad.to_dense(), expected)


def test_what_fills_up_edge_blocks_has_no_gradient() -> None:
    weight = nn.Parameter(SparseTensor.from_dense(torch.ones(3, 4), Format.bsr(2, 3)))
    weight.sum().backward()
    assert weight.grad is not None
    assert weight.grad._stored.sum() == 12


OPTIMIZERS = {
    "SGD": lambda p, **kw: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, **kw),
    "Adam": lambda p, **kw: torch.optim.Adam(p, lr=0.1, **kw),
    "AdamW": lambda p, **kw: torch.optim.AdamW(p, lr=0.1, **kw),
    "Adagrad": lambda p, **kw: torch.optim.Adagrad(p, lr=0.1, **kw),
    "RMSprop": lambda p, **kw: torch.optim.RMSprop(p, lr=0.1, **kw),
}


@pytest.mark.parametrize("way", ["plain", "foreach", "fused"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_train_as_with_a_masked_dense_weight(optimizer: str, way: str) -> None:
    if way == "fused" and optimizer == "RMSprop":
        pytest.skip("torch has none")
    dense, x = matrix(4, 6), torch.randn(5, 6)
    mask = dense != 0
    ours, theirs = nn.Parameter(sparse(dense)), nn.Parameter(dense.clone())
    options = {way: True} if way != "plain" else {"foreach": False}
    ours_step, theirs_step = (OPTIMIZERS[optimizer]([p], **options) for p in (ours, theirs))
    for _ in range(3):
        for parameter, step in ((ours, ours_step), (theirs, theirs_step)):
            step.zero_grad()
            F.linear(x, parameter).square().sum().backward()
            if parameter is theirs:
                parameter.grad *= mask
            step.step()
    torch.testing.assert_close(ours.detach().to_dense(), theirs.detach(), rtol=1e-4, atol=1e-5)


def test_autograd_finds_the_node_of_a_parameter() -> None:
    layer = nn.Module()
    layer.weight = nn.Parameter(sparse(matrix(4, 6)))
    found: list[Any] = []
    assert "AccumulateGrad" in torch.autograd.graph.get_gradient_edge(layer.weight).node.name()
    torch.autograd.graph.register_multi_grad_hook([layer.weight], found.append)
    out = layer.weight @ torch.ones(6, 2)
    out.sum().backward(retain_graph=True)
    assert torch.equal(found[0][0].to_dense(), layer.weight.grad.to_dense())
    layer.weight.grad = None
    layer.double()  # while a graph knows the parameter
    assert layer.weight.dtype == DOUBLE and out.requires_grad


def test_autocast() -> None:
    weight, x = nn.Parameter(sparse(matrix(4, 6))), torch.randn(5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.linear(x, weight)
        product = weight @ x.t()
    assert out.dtype == product.dtype == torch.bfloat16
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


PRODUCTS = {
    "matmul": lambda a, x: a @ x,
    "linear": lambda a, x: F.linear(x.t().contiguous(), a),
    "addmm": lambda a, x: torch.addmm(x[:4], a, x),
    "einsum": lambda a, x: torch.einsum("ij,jk->ik", a, x),
    "einsum of rows": lambda a, x: torch.einsum("ij,jk,kl->il", a, x, x.t()),
    "einsum without a sum": lambda a, x: torch.einsum("ij,jk->ijk", a, x),
    "sum by einsum": lambda a, x: torch.einsum("ij->i", a),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_types_under_autocast_are_those_of_torch(name: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.int64):
        a, x = matrix(4, 6).to(dtype), torch.randn(6, 3).to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = PRODUCTS[name](sparse(a), x), PRODUCTS[name](a, x)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)


@pytest.mark.parametrize(
    "function", [lambda a: (a / torch.full((3, 5), 2.0)).to_dense(), lambda a: (sparse(torch.ones(3, 5)) - a).to_dense()]
)
@pytest.mark.parametrize("name", ["BSR", "BSC", "2:4"])
def test_what_fills_up_blocks_has_no_gradient(function: Callable[[SparseTensor], Tensor], name: str) -> None:
    pattern = sparse(two_of_four(torch.ones(3, 5)), name)
    values = pattern.values().clone().requires_grad_()
    function(pattern.with_values(values)).sum().backward()
    numbers = pattern.with_values(torch.arange(1.0, values.numel() + 1)).to_dense().long()
    inside = torch.zeros(values.numel()).index_fill(0, numbers[numbers > 0] - 1, 1).bool()
    assert values.grad is not None and not values.grad.flatten()[~inside].any()
    assert values.grad.flatten()[inside].abs().gt(0.4).all()
