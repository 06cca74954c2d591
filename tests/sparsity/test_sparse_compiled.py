"""SparseTensors in compiled models: one graph, our operations in it, the same results and gradients, few recompilations."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import aot_module_simplified

from gossamer import Format, SparseTensor, einsum
from gossamer.backend import sparse as backend
from gossamer.backend.report.report import collect
from gossamer.sparsity.compiler.operands import Spec
from gossamer.sparsity.operations import dense_results, sparse_kernels
from tests.sparsity.made import matrix, sparse

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of kernels of ours, by the letters of their operands."""
    calls: list[str] = []
    launch, call_of = sparse_kernels.launch, dense_results.call_of

    def note(spec: Spec) -> None:
        calls.append(",".join(o.letters for o in spec.operands) + "->" + spec.result.letters)

    def launching(build: Any, operands: Any, spec: Spec, out: Tensor) -> None:
        note(spec)
        launch(build, operands, spec, out)

    def calling(build: Any, classify: Any, text: str, *arrays: Any) -> Any:
        note(Spec.parse(text))
        return call_of(build, classify, text, *arrays)

    monkeypatch.setattr(sparse_kernels, "launch", launching)
    monkeypatch.setattr(dense_results, "call_of", calling)
    return calls


def graphs(function: Callable[..., Any], *arguments: Any, grad: bool = False, dense: str = "eager") -> tuple[Any, Any, int]:
    """The compiled function, its result, and the number of graphs that the backend got, compiled without a graph break."""
    count = 0

    def counting(gm: fx.GraphModule, inputs: Any) -> Any:
        nonlocal count
        count += 1
        return backend(gm, inputs, options={"dense": dense, "strict": True})

    compiled = torch.compile(function, backend=counting, fullgraph=True)
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        result = compiled(*arguments)
    assert not counters["graph_break"]
    return compiled, result, count


def close(actual: Tensor, expected: Tensor) -> None:
    if isinstance(expected, SparseTensor):
        assert isinstance(actual, SparseTensor)
        assert actual.format == expected.format
        actual, expected = actual.to_dense(), expected.to_dense()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


FUNCTIONS: dict[str, Callable[[SparseTensor, Tensor], Tensor]] = {
    "SDDMM then SpMM": lambda a, x: einsum("ij,ik,jk->ij", a, x[:4], x) @ x,
    "sparse product of a union": lambda a, x: (a + a.to_format(Format.DCSR)) @ a.t(),
}


@pytest.mark.parametrize("name", ["CSR", "BSR"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_kernels_are_those_of_eager_code(function: str, name: str, launched: list[str]) -> None:
    a, x = sparse(matrix(4, 6), name), torch.randn(6, 3)
    expected = FUNCTIONS[function](a, x)
    eager = list(launched)
    launched.clear()
    _, result, count = graphs(FUNCTIONS[function], a, x)
    assert count == 1
    assert launched == eager
    close(result, expected)


@pytest.mark.parametrize("format", [Format.CSR, Format.DCSR, Format.csf(2)])
def test_attention_on_a_graph_is_three_operations(format: Format) -> None:
    a, q, k = SparseTensor.from_dense(matrix(5, 5), format), torch.randn(5, 3), torch.randn(5, 3)

    def attention(a: SparseTensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.softmax(einsum("ij,ir,jr->ij", a, q, k), 1) @ k

    operations: list[str] = []

    def noting(gm: fx.GraphModule, inputs: Any) -> Any:
        def inside(gm: fx.GraphModule, inputs: Any) -> Any:
            operations.extend(str(node.target) for node in gm.graph.nodes if "gossamer" in str(node.target))
            return gm.forward

        return aot_module_simplified(gm, inputs, fw_compiler=inside)

    with torch.no_grad():
        result = torch.compile(attention, backend=noting, fullgraph=True)(a, q, k)
    assert operations == ["gossamer.sample.default", "gossamer.softmax.default", "gossamer.einsum.default"]
    close(result, attention(a, q, k))


class Gcn(nn.Module):
    """Two layers of graph convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, a: Tensor, x: Tensor) -> Tensor:
        return a @ self.second(torch.relu(a @ self.first(x)))


@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_training_with_a_sparse_input(dense: str, launched: list[str]) -> None:
    model, x = Gcn(), torch.randn(6, 5)
    a = SparseTensor.from_edge_index(torch.randint(0, 6, (2, 12)), size=6)
    wanted = model(a, x)
    wanted.square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    launched.clear()
    with collect() as collected:
        _, result, count = graphs(model, a, x, grad=True, dense=dense)
    result.square().sum().backward()
    assert count == 1
    (fused,) = [d for d in collected.decisions if "fused" in d.reason]
    assert (fused.op, fused.reason) == ("einsum ik,kj->ij", "1 op fused, in parallel by rows"), "the first, with relu"
    assert launched == ["ik,kj->ij"] + ["ik,ij->kj"] * 2
    close(result, wanted)
    for name, parameter in model.named_parameters():
        close(parameter.grad, expected[name])


def test_training_with_a_sparse_parameter(launched: list[str]) -> None:
    layer, x = nn.Linear(6, 4), torch.randn(5, 6, requires_grad=True)
    layer.weight = nn.Parameter(sparse(matrix(4, 6)))
    layer(x).square().sum().backward()
    expected, of_x = layer.weight.grad, x.grad
    assert expected is not None and of_x is not None
    layer.zero_grad()
    x.grad = None
    launched.clear()
    compiled, result, count = graphs(layer, x, grad=True)
    result.square().sum().backward()
    assert count == 1
    assert sorted(launched) == ["mk,tk,tm->p"] or "tk,mk->tm" in launched
    assert isinstance(layer.weight.grad, SparseTensor)
    close(layer.weight.grad, expected)
    close(x.grad, of_x)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    close(compiled(x), layer(x))


def test_gradients_of_values_flow_through_sparse_intermediates() -> None:
    a, x = sparse(matrix(4, 6)), torch.randn(6, 3)
    weight = nn.Parameter(a)

    def attention(weight: Tensor, x: Tensor) -> Tensor:
        return (torch.tanh(einsum("ij,ik,jk->ij", weight, x[:4], x)) * 2) @ x

    attention(weight, x).sum().backward()
    expected, weight.grad = weight.grad, None
    assert expected is not None
    _, result, count = graphs(attention, weight, x, grad=True)
    result.sum().backward()
    assert count == 1
    close(weight.grad, expected)


def test_two_compilations_serve_every_shape_and_number_of_nonzeros() -> None:
    count = 0

    def counting(gm: fx.GraphModule, inputs: Any) -> Any:
        nonlocal count
        count += 1
        return backend(gm, inputs, options={"dense": "eager"})

    compiled = torch.compile(lambda a, x: torch.relu(a @ x), backend=counting, fullgraph=True)
    with torch.no_grad():
        for m, k, n in ((40, 60, 3), (50, 70, 4), (90, 80, 5), (31, 12, 6)):
            dense, x = matrix(m, k, 0.4), torch.randn(k, n)
            close(compiled(sparse(dense), x), torch.relu(dense @ x))
    assert count <= 2


def test_a_tensor_is_made_of_its_parts_in_a_graph() -> None:
    a, x = sparse(matrix(6, 5), "CSR int32"), torch.randn(5, 3)

    def product(positions: Tensor, coordinates: Tensor, values: Tensor, x: Tensor) -> Tensor:
        return SparseTensor.from_parts(Format.CSR, (6, 5), positions, coordinates, values, check=False) @ x

    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*a.components, x), a.to_dense() @ x)


@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_an_operand_that_gets_no_gradient(dense: str, launched: list[str]) -> None:
    """Where only its comparison is used, autograd has none for it, and not zeros that are dense."""
    a, b = sparse(matrix(6, 5), "CSR"), sparse(matrix(6, 5), "CSR")
    leaves = [x.values().clone().requires_grad_() for x in (a, b)]
    compiled = torch.compile(lambda a, b: a * (b > 0), backend=backend, fullgraph=True, options={"dense": dense})
    compiled(*(x.with_values(leaf) for x, leaf in zip((a, b), leaves, strict=True))).to_dense().sum().backward()
    assert launched and leaves[1].grad is None
    expected = (b.to_dense() > 0).double()
    found = a.with_values(leaves[0].grad).to_dense().double()
    torch.testing.assert_close(found, expected * (a.to_dense() != 0))


@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_gradients_through_results_of_open_size(dense: str) -> None:
    """The gradients of what positions are found have their size, and the forward pass must not take it from them."""
    a = sparse(matrix(4, 6), "COO")
    leaf = a.values().clone().requires_grad_()
    compiled = torch.compile(lambda a: a.flatten() * 3, backend=backend, fullgraph=True, options={"dense": dense})
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = compiled(a.with_values(leaf))
    assert isinstance(found, SparseTensor) and found.shape == (24,)
    torch.testing.assert_close(found.to_dense(), a.to_dense().flatten() * 3)
    found.to_dense().sum().backward()
    torch.testing.assert_close(leaf.grad, torch.full_like(leaf, 3))


def test_linear_of_a_tensor_of_three_dimensions() -> None:
    dense, weight, bias = matrix(4, 6)[:, None].repeat(1, 2, 1), torch.randn(3, 6), torch.randn(3)
    a = SparseTensor.from_dense(dense, Format.csf(3))
    compiled = torch.compile(nn.functional.linear, backend=backend, fullgraph=True, options={"dense": "eager"})
    close(compiled(a, weight, bias), nn.functional.linear(dense, weight, bias))


@pytest.mark.parametrize("function", [torch.lerp, torch.addcmul, torch.addcdiv], ids=lambda f: f.__name__)
def test_sizes_of_what_is_between_stay_inside(function: Callable[..., Tensor]) -> None:
    """What a function of several steps computes on its way has open sizes, which its result does not show."""
    a, b = sparse(matrix(6, 5), "dense"), sparse(matrix(6, 5), "BSR")
    more = (0.5,) if function is torch.lerp else (b,) if function is torch.addcmul else (torch.ones(6, 5),)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = torch.compile(lambda a, b: function(a, b, *more), backend=backend, fullgraph=True)(a, b)
    assert isinstance(found, SparseTensor)
    dense = [x.to_dense() if isinstance(x, SparseTensor) else x for x in (a, b, *more)]
    torch.testing.assert_close(found.to_dense(), function(*dense))


PARTS_OF_OPEN_SIZE: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "every other of what a mask takes": ("CSR", lambda a: a.masked_select(a > 0)[::2]),
    "a mask of columns in groups": ("2:4", lambda a: a[0, a.to_dense()[1] > 0]),
    "a mask of rows in blocks": ("BSR", lambda a: a[a.to_dense()[:, 1] > 0]),
    "the first of what a mask takes": ("CSR", lambda a: a.masked_select(a > 0)[:2]),
}


@pytest.mark.parametrize("name", PARTS_OF_OPEN_SIZE)
def test_parts_of_open_size(name: str) -> None:
    format, function = PARTS_OF_OPEN_SIZE[name]
    dense = matrix(6, 8)
    if format == "2:4":
        dense = torch.where(torch.arange(8) % 4 < 2, dense, 0)
    a = SparseTensor.from_dense(dense, Format.nm(2, 4)) if format == "2:4" else sparse(dense, format)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = torch.compile(function, backend=backend, fullgraph=True, options={"dense": "eager"})(a)
    found = found.to_dense() if isinstance(found, SparseTensor) else found
    torch.testing.assert_close(found, function(dense))


PARTS_BY_MASKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "rows": ("dense", lambda a, rows, columns: a[rows]),
    "rows and columns": ("dense", lambda a, rows, columns: a[rows][:, columns]),
    "columns of blocks": ("hybrid", lambda a, rows, columns: a[:, columns] * 2),
    "all in a row": ("BSR", lambda a, rows, columns: a[rows].to_dense().flatten()),
}


@pytest.mark.parametrize("name", PARTS_BY_MASKS)
def test_gradients_of_parts_that_masks_take(name: str) -> None:
    """They have the sizes of the parts, multiplied with each other, and nothing else in the backward graph may have these."""
    format, function = PARTS_BY_MASKS[name]
    dense = matrix(6, 9).double()
    masks = dense[:, 0] >= 0, dense.abs().sum(0) > 1
    a = sparse(dense.float(), format)
    leaf, reference = a.values().clone().requires_grad_(), dense.requires_grad_()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = torch.compile(function, backend=backend, fullgraph=True)(a.with_values(leaf), *masks)
    found = found.to_dense() if isinstance(found, SparseTensor) else found
    expected = function(reference, *masks)
    torch.testing.assert_close(found.double(), expected)
    weights = torch.arange(expected.numel(), dtype=torch.float64).reshape(expected.shape)
    (found * weights.float()).sum().backward()
    (expected * weights).sum().backward()
    stored = a.with_values(torch.ones_like(leaf)).to_dense()
    torch.testing.assert_close(a.with_values(leaf.grad).to_dense().double(), reference.grad * stored)


@pytest.mark.parametrize("shape", [(), (5,), (1, 1, 5), (3, 1), (2, 1, 1)], ids=str)
def test_gradients_of_an_addend_that_broadcasts(shape: tuple[int, ...]) -> None:
    a = SparseTensor.from_dense(torch.randn(2, 3, 4) * (torch.rand(2, 3, 4) < 0.5), Format.csf(3))
    leaves = [torch.randn(shape).requires_grad_(), a.values().clone().requires_grad_(), torch.randn(2, 4, 5).requires_grad_()]

    def product(addend: Tensor, values: Tensor, x: Tensor) -> Tensor:
        return torch.baddbmm(addend, a.with_values(values), x)

    found = torch.compile(product, backend=backend, fullgraph=True, options={"dense": "inductor"})(*leaves)
    expected = product(*leaves)
    close(found, expected)
    grads = [torch.autograd.grad(each.square().sum(), leaves) for each in (found, expected)]
    for ours, theirs in zip(*grads, strict=True):
        close(ours, theirs)


def test_sums_of_bools_stay_bools() -> None:
    """torch 2.13's Inductor writes past the end of a sum of bools whose factor is a number."""
    left, right = matrix(16, 24, 0.5).bool(), matrix(16, 24, 0.5).bool()

    def sums(a: Any, b: Any, x: Tensor) -> Any:
        return [torch.add(a, a, alpha=2), torch.add(a, b, alpha=0), torch.add(a, b, alpha=3), torch.add(a, x, alpha=2)]

    _, found, count = graphs(sums, sparse(left), sparse(right), right, dense="inductor")
    assert count == 1
    for ours, theirs in zip(found, sums(left, right, right), strict=True):
        assert torch.equal(ours.to_dense() if isinstance(ours, SparseTensor) else ours, theirs)
