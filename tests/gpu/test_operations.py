"""Every operation on SparseTensors as CUDA tensors have it, against dense torch: values, gradients, launches.

Tensors stay on the CPU, kernels run in the emulator, and a kernel for CPUs is an error.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from gossamer import SparseTensor, einsum, graph_attention
from gossamer.backend import sparse as backend
from gossamer.sparsity.compiler import gpu_kernels, op_kernels
from gossamer.sparsity.operations import dense_results, entry_products
from tests.gpu.emulated_device import STREAM, EmulatedDevice, emulated_device
from tests.sparsity.made import matrix, sparse
from tests.sparsity.operations import OPERATIONS, PRODUCTS, REDUCTIONS, SOFTMAX, expected

pytestmark = [
    pytest.mark.filterwarnings("ignore:SparseTensor has no sparse"),
    pytest.mark.filterwarnings("ignore:Warning only once for all operators"),
]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """A GPU in place of the CPU."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    emulated = emulated_device()
    with emulated.installed(monkeypatch), emulated.operations(monkeypatch):
        yield emulated


LAUNCHED = {
    **dict.fromkeys(PRODUCTS, "rows"),
    **dict.fromkeys([*REDUCTIONS, *SOFTMAX, "SpGEMM", "intersection", "powers"], "segments"),
    "SDDMM": "dots",
    **dict.fromkeys(["sum", "mean", "amax", "prod", "max and min"], ""),  # of all entries at once, which torch does
}
"""What runs; of all other operations nothing, for they are made of torch's."""


def plain(result: Tensor) -> Tensor:
    """All elements."""
    return result.to_dense() if isinstance(result, SparseTensor) else result


@pytest.mark.parametrize("name", OPERATIONS)
def test_values(name: str, gpu: EmulatedDevice) -> None:
    dense, x = matrix(4, 6, 0.6), torch.randn(4, 6)
    for format in ("CSR int32", "BSR"):
        a = sparse(dense, format)
        torch.testing.assert_close(plain(OPERATIONS[name](a, x)), expected(name, dense, x, a), equal_nan=True)
    assert set(gpu.schedules) == {LAUNCHED.get(name, "")} - {""}
    assert {call[9] for call in gpu.driver.named("cuLaunchKernel")} <= {STREAM}


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ("comparison", "over sparse")])
def test_gradients(name: str, gpu: EmulatedDevice) -> None:
    """With respect to stored values and the dense operand."""
    dense = torch.ones(4, 6) if name in ("exp", "functions") else matrix(4, 6, 0.6)
    a, weights = sparse(dense), torch.randn(400)
    stored = a.with_values(torch.ones_like(a.values())).to_dense() != 0
    values, x = a.values().clone().requires_grad_(), torch.randn(4, 6, requires_grad=True)

    def loss(out: Tensor) -> Tensor:
        return (plain(out).flatten() * weights[: plain(out).numel()]).sum()

    loss(OPERATIONS[name](a.with_values(values), x)).backward()
    ours, of_x, x.grad = values.grad, x.grad, None
    dense.requires_grad_()
    loss(expected(name, dense, x, a)).backward()
    torch.testing.assert_close(a.with_values(ours).to_dense(), dense.grad * stored, rtol=1e-4, atol=1e-5)
    assert (of_x is None) == (x.grad is None)
    if of_x is not None:
        torch.testing.assert_close(of_x, x.grad, rtol=1e-4, atol=1e-5)
    if name in ("mm", "dense @ sparse", "transposed", "linear", "addmm"):
        assert set(gpu.schedules) == {"rows", "dots"}


FEW = ["linear", "SDDMM", "SpGEMM", "union", "sum of columns", "amax of rows", "softmax of columns", "cat", "masked_select"]


def test_a_compiled_graph(gpu: EmulatedDevice) -> None:
    dense, x = matrix(4, 6, 0.6), torch.randn(4, 6)
    a, graphs = sparse(dense, "COO"), list[fx.GraphModule]()

    def counting(gm: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return backend(gm, inputs, options={"dense": "eager", "strict": True})

    with torch.no_grad():
        run = torch.compile(lambda a, x: [OPERATIONS[name](a, x) for name in FEW], backend=counting, fullgraph=True)
        for name, result in zip(FEW, run(a, x), strict=True):
            torch.testing.assert_close(plain(result), expected(name, dense, x, a))
    assert len(graphs) == 1 and set(gpu.schedules) == {"rows", "dots", "segments"}


# What the table of operations has not


@pytest.mark.parametrize("at_once", [1 << 24, 5])
def test_products_of_any_letters_whole_and_in_pieces(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expanded entries by five at a time give what they give at once."""
    monkeypatch.setattr(entry_products, "_AT_ONCE", at_once)
    a, b, x, y = matrix(5, 6), matrix(6, 4), torch.randn(6, 3), torch.randn(3, 2, 4)
    sparse_a, sparse_b = sparse(a, "DCSR"), sparse(b)
    for expression in ("ij,jk->ik", "ij,jk->k", "ij,jk->", "ij,jk->jik", "ij,kl->ik"):
        torch.testing.assert_close(plain(einsum(expression, sparse_a, sparse_b)), torch.einsum(expression, a, b))
    for expression, dense in (("ij,jk->", [x]), ("ij,jk->ijk", [x]), ("ij,jk,klm->im", [x, y]), ("ij,klm->kj", [y])):
        result = einsum(expression, sparse_a, *dense)
        torch.testing.assert_close(plain(result), torch.einsum(expression, a, *dense), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plain(sparse_a @ sparse_b @ sparse(b.t()) @ x), a @ b @ b.t() @ x)
    third = sparse(matrix(5, 4))
    torch.testing.assert_close(einsum("ij,jk,ik->i", sparse_a, sparse_b, third), ((a @ b) * plain(third)).sum(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int8])
def test_types(dtype: torch.dtype, gpu: EmulatedDevice) -> None:
    dense, x = matrix(5, 8, dtype=dtype), torch.randint(-3, 4, (8, 3)).to(dtype)
    a, same = sparse(dense, "DCSC"), torch.testing.assert_close
    same(a @ x, (dense.double() @ x.double()).to(dtype))
    same(plain(a @ a.t()), (dense.double() @ dense.t().double()).to(dtype))
    same(plain(a + a.t().t()), 2 * dense)
    same(a.sum(1), dense.sum(1))
    same(a.amax(0), dense.amax(0))
    same((-a).amin(1), (-dense).amin(1))
    same(a.prod(1), dense.prod(1))
    if not dtype.is_floating_point:
        assert gpu.schedules == []
        return
    assert {"rows", "segments"} == set(gpu.schedules)
    stored = dense != 0
    for result, oracle in ((a.softmax(1), torch.softmax), (a.log_softmax(1), torch.log_softmax)):
        soft = oracle(dense.double().where(stored, -torch.inf), 1).where(stored, 0)
        same(plain(result), soft.nan_to_num().to(dtype))


def test_a_gpu_too_old_for_our_kernels_computes_all_the_same(gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (dense_results, op_kernels):
        monkeypatch.setattr(room, "loaded_kernel", lambda *_: None)
    dense, x = matrix(4, 6, 0.6), torch.randn(4, 6)
    a = sparse(dense)
    for name in LAUNCHED:
        torch.testing.assert_close(plain(OPERATIONS[name](a, x)), expected(name, dense, x, a))
    assert gpu.schedules == []


def test_what_has_no_kernel_is_not_compiled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_ = gpu_kernels.compile_gpu_region
    monkeypatch.setattr(gpu_kernels, "compile_gpu_region", lambda *a, **k: (compiled.append(""), compile_(*a, **k))[1])
    gpu_kernels.loaded_kernel.cache_clear()
    a = matrix(8, 5).int()
    for _ in range(2):
        assert (sparse(a) @ torch.ones(5, 3, dtype=torch.int32)).equal(a @ torch.ones(5, 3, dtype=torch.int32))
    assert len(compiled) == 1


# Extremes over edges


@pytest.mark.parametrize("kind", ["max", "min"])
def test_extremes_with_gradients(kind: str, gpu: EmulatedDevice) -> None:
    """Of many numbers that are equal, zeros among them; the last two targets have no edges."""
    source, target = torch.randint(0, 5, (40,)), torch.randint(0, 7, (40,)).sort().values
    positions = torch.searchsorted(target, torch.arange(10)).int()
    x = torch.randint(-2, 3, (5, 3)).double().requires_grad_()
    result = torch.ops.gossamer.extremes.default(positions, source.int(), x, kind)
    zeros, index = torch.zeros(9, 3, dtype=x.dtype), target[:, None].expand(-1, 3)
    exact = zeros.scatter_reduce(0, index, x[source], f"a{kind}", include_self=False)
    upstream = torch.randn_like(exact)
    torch.testing.assert_close(result, exact)
    torch.testing.assert_close(*(torch.autograd.grad(each, x, upstream) for each in (result, exact)))
    assert gpu.schedules == []


def test_extremes_with_a_nan_or_without_edges() -> None:
    x = torch.tensor([[1.0, torch.nan], [3.0, 5.0]], requires_grad=True)
    result = torch.ops.gossamer.extremes.default(torch.tensor([0, 2, 2]), torch.tensor([0, 1]), x, "max")
    torch.testing.assert_close(result, torch.tensor([[3.0, torch.nan], [0.0, 0.0]]), equal_nan=True)
    result.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[0, 0], [1, 0]]
    none = torch.ops.gossamer.extremes.default(torch.tensor([0]), torch.tensor([], dtype=torch.int64), x, "min")
    assert none.shape == (0, 2)


def test_a_tall_product() -> None:
    x, w = torch.randn(9, 4), torch.randn(4, 3)
    torch.testing.assert_close(torch.ops.gossamer.tall_product.default(x, w), x @ w)


# Attention

TERMS = {
    "GAT": (("target", "source"), {"slope": 0.2}),
    "transformer": (("queries", "keys"), {"scale": 0.5}),
    "all": (("target", "source", "edge", "queries", "keys"), {"scale": 0.5, "slope": 0.2, "weighted": True}),
    "GATv2": (("edge", "queries", "keys", "direction"), {"scale": 0.5, "slope": 0.2}),
}


@pytest.mark.parametrize("kind", TERMS)
def test_attention_with_gradients(kind: str, gpu: EmulatedDevice) -> None:
    names, options = TERMS[kind]
    dense = matrix(5, 6, 0.5)
    dense[2] = 0
    a = sparse(dense)
    rows, columns = dense.nonzero(as_tuple=True)
    sizes = {
        "target": (5, 2), "source": (6, 2), "edge": (len(rows), 2), "queries": (5, 2, 3), "keys": (6, 2, 3),
        "direction": (2, 3),
    }  # fmt: skip
    given = {"values": torch.randn(6, 2, 4), "weight": a.values()} | {name: torch.randn(sizes[name]) for name in names}
    one, two = ({name: term.clone().requires_grad_() for name, term in given.items()} for _ in range(2))
    ours = {name: term for name, term in one.items() if name not in ("values", "weight")}
    result = graph_attention(a.with_values(one["weight"]), one["values"], **ours, **options)

    scores = torch.zeros(len(rows), 2)
    if "direction" in names:
        joined = torch.nn.functional.leaky_relu(two["queries"][rows] + two["keys"][columns], options["slope"])
        scores = options["scale"] * (joined * two["direction"]).sum(2)
    elif "keys" in names:
        scores = options["scale"] * (two["queries"][rows] * two["keys"][columns]).sum(2)
        scores = scores * two["weight"][:, None] if "weighted" in options else scores
    scores = scores + (two["target"][rows] + two["source"][columns] if "target" in names else 0) + two.get("edge", 0)
    if "direction" not in names:
        scores = torch.nn.functional.leaky_relu(scores, options.get("slope", 1.0))
    full = torch.full((5, 6, 2), -torch.inf).index_put((rows, columns), scores)
    weights = torch.where(dense.any(1)[:, None, None], full, 0).softmax(1).where((dense != 0)[:, :, None], 0)
    exact = torch.einsum("ijh,jhf->ihf", weights, two["values"])
    torch.testing.assert_close(result, exact)
    assert set(gpu.schedules) == {"segments", "rows"} | ({"dots"} if kind in ("transformer", "all") else set())
    upstream = torch.randn_like(exact)
    result.backward(upstream)
    exact.backward(upstream)
    for name in given:
        if two[name].grad is not None:
            torch.testing.assert_close(one[name].grad, two[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def test_dropout_of_attention_is_the_same_forward_and_backward() -> None:
    """The result is linear in the values, so that its gradient gives it back."""
    a, values = sparse(matrix(9, 8, 0.9)), torch.randn(8, 2, 4, requires_grad=True)
    terms = {"target": torch.randn(9, 2), "source": torch.randn(8, 2)}
    result = graph_attention(a, values, **terms, dropout=0.5)
    upstream = torch.randn_like(result)
    result.backward(upstream)
    torch.testing.assert_close((values.grad * values).sum(), (result * upstream).sum())
    assert not torch.allclose(result, graph_attention(a, values, **terms, dropout=0.5))
    ones = torch.ones(8, 1, 1)
    shares = graph_attention(a, ones.expand(8, 200, 1), target=torch.zeros(9, 200), source=torch.zeros(8, 200), dropout=0.5)
    assert 0.8 < shares.mean() < 1.2
