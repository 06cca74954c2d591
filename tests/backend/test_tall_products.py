"""Dense products of graphs of sparse operations: which take the schedule "tall", and that results are the same."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import gossamer
from gossamer import SparseTensor
from gossamer.backend.measuring import tall_times

NODES = 2000


@pytest.fixture
def a() -> SparseTensor:
    at = torch.randint(NODES, (2, 6000))
    return SparseTensor.from_edge_index(at, torch.rand(6000), NODES)


def layer(a: SparseTensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.relu(a @ F.linear(x, w, b))


def dense(a: SparseTensor, *given: Tensor) -> Tensor:
    return torch.relu(a.to_dense() @ F.linear(*given))


def given(features: int = 40, hidden: int = 24, gradient: bool = False) -> list[Tensor]:
    sizes = (NODES, features), (hidden, features), (hidden,)
    return [torch.randn(size, requires_grad=gradient) for size in sizes]


def test_features_times_weight(a: SparseTensor) -> None:
    operands = given()
    compiled = torch.compile(layer, backend="sparse", fullgraph=True)
    out, (code,) = run_and_get_code(compiled, a, *operands)
    assert code.count("= call_tall_product(") == 1 and "extern_kernels" not in code.partition("def call(")[2]
    torch.testing.assert_close(out, dense(a, *operands), rtol=1e-4, atol=1e-4)


def test_gradients(a: SparseTensor) -> None:
    operands = given(gradient=True)
    compiled = torch.compile(layer, backend="sparse", fullgraph=True)
    found = torch.autograd.grad(compiled(a, *operands).square().sum(), operands)
    expected = torch.autograd.grad(dense(a, *operands).square().sum(), operands)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-2)


def test_the_report_says_so(a: SparseTensor) -> None:
    report = gossamer.explain(layer, a, *given())
    assert [(d.name, d.schedule, d.shape) for d in report.decisions if d.op == "mm"] == [("w", "tall", (24, 40))]


def test_a_product_of_the_gradient_has_the_name_of_the_weight(a: SparseTensor) -> None:
    report = gossamer.explain(layer, a, *given(gradient=True))
    assert {(d.name, d.op, d.shape) for d in report.decisions if "mm" in d.op} == {
        ("w", "mm", (24, 40)),
        ("w", "mm backward", (24, 40)),
    }


@pytest.mark.parametrize(
    ("features", "hidden"),
    [(40, 300), (2100, 24), (1500, 200)],
    ids=["wide", "more columns than rows", "larger than half of a cache"],
)
def test_others_stay(a: SparseTensor, features: int, hidden: int) -> None:
    report = gossamer.explain(layer, a, *given(features, hidden))
    assert not [d for d in report.decisions if d.op == "mm"]


def test_graphs_without_sparse_operations_stay() -> None:
    report = gossamer.explain(F.linear, *given())
    assert not [d for d in report.decisions if d.op == "mm"]


@pytest.mark.parametrize("ratio", [0.8, 2.0])
def test_the_faster_one_is_taken(a: SparseTensor, ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CALIBRATE", "1")
    monkeypatch.setattr(tall_times, "_ratio", lambda *_: ratio)
    operands = given()
    (decision,) = [d for d in gossamer.explain(layer, a, *operands).decisions if d.op == "mm"]
    assert (
        (decision.schedule, "torch's own product is faster" in decision.reason) == ("tall", False)
        if ratio < 1
        else (None, True)
    )
    out = torch.compile(layer, backend="sparse", fullgraph=True)(a, *operands)
    torch.testing.assert_close(out, dense(a, *operands), rtol=1e-4, atol=1e-4)


def test_a_shape_is_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CALIBRATE", "1")
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    rounds: list[int] = []
    monkeypatch.setattr(tall_times, "fastest", lambda calls, *_: (rounds.append(1), dict.fromkeys(calls, 1.0))[1])
    for _ in range(2):
        tall_times._ratio.cache_clear()  # as another process
        assert tall_times.is_faster(3000, 16, 8, torch.float32)
    assert len(rounds) == 1
