"""Products with Kronecker products, block diagonals, diagonals and sums of these multiply with the factors."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
from gossamer.backend.report.report import Decision, collect

OPTIONS = {"strict": True, "dense": "eager"}


class Factors(nn.Module):
    """Parameters of all cases, and a function of them and x."""

    def __init__(self, function: Callable[["Factors", Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function = function
        self.a, self.b = nn.Parameter(torch.randn(16, 24, dtype=dtype)), nn.Parameter(torch.randn(20, 12, dtype=dtype))
        self.c = nn.Parameter(torch.randn(3, 5, dtype=dtype))
        self.blocks = nn.ParameterList([torch.randn(3, 4, dtype=dtype) for _ in range(60)])
        self.d, self.bias = nn.Parameter(torch.randn(288, dtype=dtype)), nn.Parameter(torch.randn(320, dtype=dtype))
        self.w = nn.Parameter(torch.randn(320, 288, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def run(model: nn.Module, x: Tensor, **options: Any) -> tuple[list[Tensor], list[Tensor], list[Decision]]:
    """Results and gradients of the compiled model, those of the same in float64, and the decisions."""
    settings = {"dynamic": options.pop("dynamic", None)}
    compiled = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS | options, **settings)
    with collect() as found:
        return outcome(model, compiled, x), outcome(twin := copy.deepcopy(model).double(), twin, x.double()), found.decisions


def outcome(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_(torch.is_grad_enabled())
    y = call(x)
    if not torch.is_grad_enabled():
        return [y]
    (y * (torch.arange(y.numel()) % 3 - 1).view_as(y)).sum().backward()
    found = [each.grad for each in (x, *model.parameters()) if each.grad is not None]
    model.zero_grad()
    return [y.detach(), *found]


def close(got: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def factored(decisions: list[Decision]) -> list[str]:
    return [each.reason for each in decisions if each.format == "factors"]


kron = torch.kron
KRON, TURNED = "x times kron of 24x16 and 12x20", "x times kron of 16x24 and 20x12"
CASES: dict[str, tuple[Callable[[Factors, Tensor], Tensor], tuple[int, ...], list[str]]] = {
    "linear": (lambda m, x: F.linear(x, kron(m.a, m.b), m.bias), (7, 9, 288), [KRON]),
    "matmul": (lambda m, x: x @ kron(m.a, m.b).T, (64, 288), [KRON]),
    "no tokens but one": (lambda m, x: torch.mm(x, kron(m.a, m.b).t()), (1, 288), [KRON]),
    "left": (lambda m, x: kron(m.a, m.b) @ x, (288, 64), [KRON]),
    "vector": (lambda m, x: torch.mv(kron(m.a, m.b), x), (288,), [KRON]),
    "three factors": (lambda m, x: F.linear(x, 0.5 * kron(kron(m.a, m.b), m.c)), (8, 1440), [f"{KRON} and 5x3"]),
    "einsum": (lambda m, x: F.linear(x, torch.einsum("ij,kl->ikjl", m.a, m.b).reshape(320, 288)), (64, 288), [KRON]),
    "einsum, the other first": (
        lambda m, x: F.linear(x, torch.einsum("kl,ij->ikjl", m.b, m.a).view(320, 288)), (64, 288), [KRON],
    ),
    "with a diagonal": (
        lambda m, x: F.linear(x, kron(m.a, m.b) @ torch.diag(m.d)), (64, 288), ["x times a diagonal times" + KRON[7:]],
    ),
    "beside a matrix": (lambda m, x: F.linear(x, m.w - kron(m.a, m.b) / 2), (4, 288), [KRON]),
    "two products": (lambda m, x: (x @ kron(m.a, m.b).T) @ kron(m.a, m.b), (64, 288), [TURNED, KRON]),
    "a product of two": (
        lambda m, x: x @ (kron(m.a, m.b).mT @ kron(m.a, m.b)), (64, 288), [f"{KRON} times kron of 16x24 and 20x12"],
    ),
    "multi_dot": (
        lambda m, x: x @ torch.linalg.multi_dot([m.w.T, kron(m.a, m.b)]), (64, 288), [TURNED],
    ),
    "identity": (
        lambda m, x: F.linear(x, kron(torch.eye(90), m.c)), (256, 450), ["x times kron of an identity and 5x3"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_product_with_a_structured_matrix_takes_its_factors(case: str, grad: bool) -> None:
    function, sizes, reasons = CASES[case]
    model, x = Factors(function), torch.randn(sizes)
    with torch.set_grad_enabled(grad):
        got, expected, decisions = run(model, x)
        assert got[0].stride() == model(x).stride()
    close(got, expected)
    assert factored(decisions) == reasons


def block_diagonal(m: Factors, x: Tensor) -> Tensor:
    return x @ torch.block_diag(*m.blocks).T


def test_blocks_that_train_are_multiplied_one_by_one() -> None:
    got, expected, decisions = run(Factors(block_diagonal), torch.randn(64, 240))
    close(got, expected)
    assert factored(decisions) == ["x times 60 blocks on the diagonal"]


def test_blocks_that_do_not_change_are_a_sparse_weight() -> None:
    with torch.no_grad():
        got, expected, decisions = run(Factors(block_diagonal), torch.randn(64, 240))
    close(got, expected)
    assert not factored(decisions) and [each.sparse for each in decisions] == [True]


def test_blocks_of_several_sizes() -> None:
    model = Factors(lambda m, x: torch.block_diag(*[m.a, m.b, m.c] * 8) @ x)
    got, expected, decisions = run(model, torch.randn(328, 256), min_gain=0.1)
    close(got, expected)
    assert factored(decisions) == ["x times 24 blocks on the diagonal"]


def linear(m: Factors, x: Tensor) -> Tensor:
    return F.linear(x, kron(m.a, m.b), m.bias)


@pytest.mark.parametrize("dynamic", [True, False])
def test_other_numbers_of_tokens(dynamic: bool) -> None:
    model = Factors(linear)
    compiled = torch.compile(model, backend="sparse", fullgraph=True, dynamic=dynamic, options=OPTIONS)
    with collect() as found:
        for tokens in (33, 64, 1, 2, 0):
            x = torch.randn(tokens, 288)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-3)
    assert set(factored(found.decisions)) == {KRON}


def test_a_number_of_tokens_that_nobody_knows() -> None:
    model, x = Factors(lambda m, x: linear(m, x[x[:, 0] > 0])), torch.randn(100, 288)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), collect() as found:
        y = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS)(x)
    torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-3)
    assert factored(found.decisions) == [KRON]


@pytest.mark.parametrize(("dtype", "taken"), [(torch.bfloat16, True), (torch.float64, True), (torch.float16, False)])
def test_other_types(dtype: torch.dtype, taken: bool) -> None:
    """Products of factors may leave the range of float16 where those with the whole matrix do not."""
    got, expected, decisions = run(Factors(linear, dtype), torch.randn(64, 288, dtype=dtype))
    close(got, expected, 3e-2)
    assert bool(factored(decisions)) == taken


def test_autocast() -> None:
    model, x = Factors(linear), torch.randn(64, 288)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), collect() as found:
        y = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS)(x)
        expected = model(x)
    assert y.dtype == torch.bfloat16 and factored(found.decisions) == [KRON]
    torch.testing.assert_close(y, expected, rtol=3e-2, atol=3.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.linear(x, kron(m.a, m.b.add_(1))),
        lambda m, x: F.linear(x, kron(m.a, m.b).add_(1)),
    ],
)
def test_a_matrix_that_is_written_to_stays_whole(function: Callable[[Factors, Tensor], Tensor]) -> None:
    model, x = Factors(function), torch.randn(64, 288)
    with torch.no_grad():
        expected = copy.deepcopy(model)(x)
        with collect() as found:
            torch.testing.assert_close(
                torch.compile(model, backend="sparse", options=OPTIONS)(x), expected, rtol=1e-4, atol=1e-3
            )
    assert not factored(found.decisions)


def test_a_matrix_without_gradients_stays_whole() -> None:
    """Its factors would get gradients if they were multiplied outside of the block."""

    def function(m: Factors, x: Tensor) -> Tensor:
        with torch.no_grad():
            w = kron(m.a, m.b)
        return F.linear(x, w, m.bias)

    got, expected, decisions = run(Factors(function), torch.randn(64, 288))
    close(got, expected)
    assert len(got) == 3 and not factored(decisions)


def test_a_matrix_that_is_a_result_too() -> None:
    model, x = Factors(lambda m, x: x), torch.randn(64, 288)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        w = kron(model.a, model.b)
        return F.linear(x, w), w

    with collect() as found:
        got = torch.compile(function, backend="sparse", fullgraph=True, options=OPTIONS)(x)
    for a, b in zip(got, function(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
    assert factored(found.decisions) == [KRON]


def test_other_factors_and_copies() -> None:
    model, x = Factors(linear), torch.randn(64, 288)
    compiled = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS)
    with torch.no_grad():
        for change in (lambda: None, lambda: model.a.mul_(2), lambda: model.load_state_dict(Factors(linear).state_dict())):
            change()
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-3)
        other = copy.deepcopy(model)
        other.b.neg_()
        torch.testing.assert_close(torch.compile(other, backend="sparse", options=OPTIONS)(x), other(x), rtol=1e-4, atol=1e-3)


def test_gradients_of_gradients() -> None:
    model, x = Factors(linear, torch.float64), torch.randn(40, 288, dtype=torch.float64)
    compiled = torch.compile(lambda x, a, b: F.linear(x, kron(a, b)), backend="sparse", fullgraph=True, options=OPTIONS)

    def penalty(call: Callable[..., Tensor]) -> Tensor:
        return call(x, model.a, model.b).square().sum()

    with collect() as found:
        got = torch.autograd.grad(penalty(compiled), [model.a, model.b])
    expected = torch.autograd.grad(penalty(lambda x, a, b: F.linear(x, kron(a, b))), [model.a, model.b])
    assert factored(found.decisions) == [KRON]
    torch.testing.assert_close(got, expected)


def test_a_nan_reaches_what_it_reaches_densely() -> None:
    model, x = Factors(linear), torch.randn(64, 288)
    x[3, 7] = float("nan")
    with torch.no_grad():
        y = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS)(x)
    assert bool(y[3].isnan().all()) and int(y.isnan().any(1).sum()) == 1


def test_small_matrices_are_made() -> None:
    model = Factors(lambda m, x: F.linear(x, kron(m.c, m.c)))
    got, expected, decisions = run(model, torch.randn(4, 25))
    close(got, expected)
    assert not factored(decisions)
    assert [each.reason for each in decisions] == ["kron of 5x3 and 5x3: the whole matrix is as fast"]


def test_the_option_disable_keeps_whole_matrices() -> None:
    got, expected, decisions = run(Factors(linear), torch.randn(64, 288), disable=["structured-weights"])
    close(got, expected)
    assert not decisions


def test_explain_names_the_structure() -> None:
    report = gossamer.explain(Factors(linear), torch.randn(64, 288))
    assert KRON.replace(" ", "") in "".join(str(report).split())


def test_a_fault_of_the_search_leaves_matrices_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.backend.structures.reader.Reader.matrix", lambda *_: 1 / 0)
    model, x = Factors(linear), torch.randn(64, 288)
    with pytest.warns(UserWarning, match=r"structured matrices failed \(ZeroDivisionError: division by zero\)"):
        y = torch.compile(model, backend="sparse", options={"dense": "eager"})(x)
    torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-3)
