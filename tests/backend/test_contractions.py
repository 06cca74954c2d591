"""Every way to write a product with a static matrix becomes one region and computes what dense torch computes."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend.harness import assert_same, compile_and_run, prune_, pruned

M, K = 48, 64
torch.manual_seed(0)
W, V, B = pruned(M, K), pruned(K, M), torch.randn(M)
P = nn.Parameter(pruned(M, K))
MASK = torch.rand(M, K) < 0.2

ON_THE_RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "F.linear": lambda x: F.linear(x, W, B),
    "F.linear without bias": lambda x: F.linear(x, W),
    "x @ W.T": lambda x: x @ W.T,
    "x @ V": lambda x: x @ V,
    "matmul": lambda x: torch.matmul(x, V),
    "parameter": lambda x: F.linear(x, P, B),
    "masked": lambda x: F.linear(x, P * MASK),
    "where": lambda x: F.linear(x, torch.where(MASK, P, 0.0)),
}

ONE_SHAPE: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "mv": (lambda x: torch.mv(W, x), (K,)),
    "addmv": (lambda x: torch.addmv(B, W, x, alpha=2, beta=0.5), (K,)),
    "W @ x": (lambda x: W @ x, (K, 5)),
    "W @ vector": (lambda x: W @ x, (K,)),
    "W @ batch": (lambda x: W @ x, (2, K, 3)),
    "W @ batches": (lambda x: W @ x, (2, 2, K, 3)),
    "W @ x + column": (lambda x: W @ x + B[:, None], (K, 5)),
    "addmm": (lambda x: torch.addmm(B, x, W.T), (5, K)),
    "addmm with alpha and beta": (lambda x: torch.addmm(B, x, W.T, alpha=2, beta=0.5), (5, K)),
    "addmm with beta 0": (lambda x: torch.addmm(B, x, W.T, beta=0), (5, K)),
    "addmm with a matrix": (lambda x: torch.addmm(x[:, :M], x, W.T), (5, K)),
    "addmm with a column": (lambda x: torch.addmm(x[:, :1], x, W.T), (5, K)),
    "addmm, W on the left": (lambda x: torch.addmm(B[:, None], W, x, beta=2), (K, 5)),
    "bmm": (lambda x: torch.bmm(x, W.T.expand(x.shape[0], K, M)), (2, 3, K)),
    "bmm, W on the left": (lambda x: torch.bmm(W.expand(x.shape[0], M, K), x), (2, K, 3)),
    "baddbmm": (lambda x: torch.baddbmm(B, x, W.T.expand(x.shape[0], K, M), beta=0.5), (2, 3, K)),
    "baddbmm, W on the left": (lambda x: torch.baddbmm(B[:, None], W.expand(x.shape[0], M, K), x), (2, K, 3)),
    "einsum": (lambda x: torch.einsum("bti,oi->bto", x, W), (2, 3, K)),
    "einsum on matrices": (lambda x: torch.einsum("oi,bi->bo", W, x), (3, K)),
    "einsum to the middle": (lambda x: torch.einsum("oi,bit->bot", W, x), (3, K, 5)),
    "tensordot": (lambda x: torch.tensordot(x, W, dims=([1], [1])), (5, K)),
    "inner": (lambda x: torch.inner(x, W), (5, K)),
    "multi_dot": (lambda x: torch.linalg.multi_dot([x, W.T]), (5, K)),
    "transposed batches": (lambda x: x.transpose(1, 2) @ W.T, (2, 3, 4, K)),
    "transposed x": (lambda x: x.T @ W.T, (K, 7)),
    "every other row": (lambda x: x[::2] @ W.T, (6, K)),
}


SHAPES = [(5, K), (1, K), (K,), (2, 3, K), (2, 2, 3, K), (0, K)]


@pytest.mark.parametrize(
    ("spelling", "shape", "dynamic"),
    [(name, shape, (i + j) % 2 == 1) for i, name in enumerate(ON_THE_RIGHT) for j, shape in enumerate(SHAPES)],
)
def test_weight_on_the_right(spelling: str, shape: tuple[int, ...], dynamic: bool) -> None:
    function, x = ON_THE_RIGHT[spelling], torch.randn(shape)
    run = compile_and_run(function, x, dynamic=dynamic)
    assert len(run.regions) == 1
    assert_same(run.output, function(x).detach())


@pytest.mark.parametrize(("spelling", "dynamic"), [(name, i % 2 == 1) for i, name in enumerate(ONE_SHAPE)])
def test_other_spellings(spelling: str, dynamic: bool) -> None:
    function, shape = ONE_SHAPE[spelling]
    x = torch.randn(shape)
    run = compile_and_run(function, x, dynamic=dynamic)
    assert len(run.regions) == 1
    assert_same(run.output, function(x))


@pytest.mark.parametrize("spelling", ["F.linear", "masked"])
@pytest.mark.parametrize("shape", [(5, K), (K,), (2, 3, K)])
def test_with_inductor(spelling: str, shape: tuple[int, ...]) -> None:
    function, x = ON_THE_RIGHT[spelling], torch.randn(shape)
    run = compile_and_run(function, x, dense="inductor")
    assert len(run.regions) == 1
    assert_same(run.output, function(x).detach())


@pytest.mark.parametrize("spelling", ["mv", "W @ batch", "einsum", "transposed batches"])
def test_other_spellings_with_inductor(spelling: str) -> None:
    function, shape = ONE_SHAPE[spelling]
    x = torch.randn(shape)
    run = compile_and_run(function, x, dense="inductor", dynamic=True)
    assert len(run.regions) == 1
    assert_same(run.output, function(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_float_types(dtype: torch.dtype) -> None:
    w, x = pruned(M, K, dtype=dtype), torch.randn(5, K).to(dtype)
    run = compile_and_run(lambda x: F.linear(x, w), x)
    assert len(run.regions) == 1 and run.output.dtype == dtype
    assert_same(run.output, x @ w.T)


def test_two_products_with_one_weight() -> None:
    w = pruned(K, K)
    x = torch.randn(5, K)
    run = compile_and_run(lambda x: torch.relu(x @ w) @ w.T, x)
    assert len(run.regions) == 2
    assert_same(run.output, torch.relu(x @ w) @ w.T)


def test_of_two_static_factors_the_sparser_is_the_weight() -> None:
    features, adjacency = torch.randn(K, 8), pruned(K, K)
    run = compile_and_run(lambda x: (adjacency @ features) * x, torch.ones(8))
    assert [d.name for d in run.regions] == ["adjacency"]
    assert_same(run.output, adjacency @ features)


def test_shared_layers_share_a_kernel() -> None:
    model = prune_(nn.Sequential(*(nn.Linear(K, K) for _ in range(4)))).eval()
    x = torch.randn(5, K)
    run = compile_and_run(model, x)
    assert len(run.regions) == 4
    assert_same(run.output, model(x).detach())


def test_all_zeros_and_nearly_all() -> None:
    w = torch.zeros(M, K)
    x = torch.randn(5, K)
    assert_same(compile_and_run(lambda x: F.linear(x, w, B), x).output, F.linear(x, w, B))
    torch._dynamo.reset()
    w[3, 5] = 2.0
    run = compile_and_run(lambda x: F.linear(x, w, B), x)
    assert len(run.regions) == 1
    assert_same(run.output, F.linear(x, w, B))


def test_nan_and_infinity_in_the_weight_reach_the_output() -> None:
    w = pruned(M, K)
    w[0, 0], w[1, 1] = float("nan"), float("inf")
    x = torch.rand(5, K) + 1
    run = compile_and_run(lambda x: F.linear(x, w), x)
    assert run.output[:, 0].isnan().all() and run.output[:, 1].isinf().all()
    assert_same(run.output[:, 2:], F.linear(x, w)[:, 2:])
