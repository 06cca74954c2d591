"""Experts that are modules of a list: every loop over them is one operation, its results and gradients are those of float64."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
from tests.backend import harness
from tests.backend.harness import Run, prune_

EXPERTS, TOP, COLUMNS, HIDDEN = 5, 2, 24, 16


class Gated(nn.Module):
    """w1, w2 and w3, as Mixtral has them."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(COLUMNS, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, COLUMNS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w3(x) * F.silu(self.w1(x)))  # type: ignore[no-any-return]


class Biased(Gated):
    """The same with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(COLUMNS, HIDDEN), nn.Linear(COLUMNS, HIDDEN), nn.Linear(HIDDEN, COLUMNS)


class Fused(nn.Module):
    """Gate and up in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(COLUMNS, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, COLUMNS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.first(x).chunk(2, -1)
        return self.second(F.silu(gate) * up)  # type: ignore[no-any-return]


def ungated() -> nn.Module:
    """No gates, with biases."""
    return nn.Sequential(nn.Linear(COLUMNS, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, COLUMNS))


class Mixture(nn.Module):
    """A router, and experts that a subclass calls in a loop."""

    def __init__(self, expert: Callable[[], nn.Module] = Gated) -> None:
        super().__init__()
        self.router = nn.Linear(COLUMNS, EXPERTS, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, chosen = self.router(x).softmax(-1).topk(TOP, -1)
        return scores / scores.sum(-1, keepdim=True), chosen


class Masked(Mixture):
    """Every expert for all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            y = y + expert(x) * (scores * (chosen == e)).sum(-1, keepdim=True)
        return y


class Scattered(Mixture):
    """The same with the scores of all experts in a matrix, summed by Python."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, COLUMNS)
        scores, chosen = self.route(flat)
        full = torch.zeros(flat.shape[0], EXPERTS).scatter(1, chosen, scores)
        y: Tensor = sum(full[:, e, None] * expert(flat) for e, expert in enumerate(self.experts))  # type: ignore[assignment]
        return y.view(x.shape)


class OneHot(Mixture):
    """Mixtral's loop, before its weights were fused."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        y, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for e in range(EXPERTS):
            slot, token = torch.where(mask[e])
            rows = self.experts[e](x[None, token].reshape(-1, COLUMNS)) * scores[token, slot, None]
            y.index_add_(0, token, rows.to(x.dtype))
        return y


class OneHotTurned(Mixture):
    """DeepSeek's loop, without its `if`."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        y, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 0, 1)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(mask[e])
            y.index_add_(0, token, expert(x[token]) * scores[token, slot].unsqueeze(-1))
        return y


class Assigned(Mixture):
    """Assignments to the tokens of each expert."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            y[token] += scores[token, slot, None] * expert(x[token])
        return y


class Columns(Mixture):
    """A mask of tokens, and the scores of all experts in a matrix."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        y, full = torch.zeros_like(x), torch.zeros(x.shape[0], EXPERTS).scatter(1, chosen, scores)
        for e, expert in enumerate(self.experts):
            token = torch.where((chosen == e).any(-1))[0]
            y.index_add_(0, token, expert(x[token]) * full[token, e].unsqueeze(1))
        return y


WHOLE = [Masked, Scattered]
OPEN = [OneHot, OneHotTurned, Assigned, Columns]
"""Those that need torch._dynamo.config.capture_dynamic_output_shape_ops."""


@pytest.fixture(autouse=True)
def _open_sizes() -> Iterator[None]:
    torch.manual_seed(0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def exact(model: Mixture, x: Tensor) -> Tensor:
    """Every expert of every token, in float64."""
    model, x = (copy.deepcopy(model).double(), x.double()) if x.dtype is not torch.float64 else (model, x)
    scores, chosen = model.route(x)
    each = torch.stack([expert(x) for expert in model.experts], 1)
    return torch.einsum("teh,te->th", each, torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, chosen, scores))


def compile_and_run(model: nn.Module, x: Tensor, *, grad: bool = False, dynamic: bool | None = None, **options: object) -> Run:
    """With the router dense, as no product of it gains anything."""
    return harness.compile_and_run(model, x, grad=grad, dynamic=dynamic, **{"min_gain": 1.1, **options})  # type: ignore[arg-type]


def assert_near(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)


def assert_one_operation(run: Run, activation: str = "silu") -> None:
    assert all(f"{EXPERTS} experts, {TOP} for each token, {activation}, one operation" in d.reason for d in run.regions)
    assert {name.split(".")[1] for name in (d.name for d in run.regions)} == set("01234")


@pytest.mark.parametrize("kind", [*WHOLE, *OPEN])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_loop_over_modules_is_one_operation(kind: type[Mixture], dynamic: bool | None) -> None:
    model = kind().eval()
    run = compile_and_run(model, torch.randn(9, COLUMNS), dynamic=dynamic, regions=3 * EXPERTS)
    assert_one_operation(run)
    with torch.no_grad():
        for tokens in (9, 30, 2):
            x = torch.randn(tokens, COLUMNS)
            assert_near(run.function(x), exact(model, x))


@pytest.mark.parametrize(("expert", "activation"), [(Biased, "silu"), (Fused, "silu"), (ungated, "gelu")])
@pytest.mark.parametrize("kind", [Masked, OneHot])
@pytest.mark.parametrize("grad", [False, True])
def test_experts_of_all_forms_are_found(
    kind: type[Mixture], expert: Callable[[], nn.Module], activation: str, grad: bool
) -> None:
    model, x = kind(expert), torch.randn(9, COLUMNS)
    run = compile_and_run(model, x, grad=grad)
    assert_one_operation(run, activation)
    assert_near(run.output, exact(model, x))


@pytest.mark.parametrize("kind", [*WHOLE, *OPEN])
def test_gradients_reach_each_module(kind: type[Mixture]) -> None:
    model, x = kind(Biased), torch.randn(9, COLUMNS, requires_grad=True)
    wide, far = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    run = compile_and_run(model, x, grad=True)
    assert_one_operation(run)
    upstream = torch.randn_like(run.output)
    run.output.backward(upstream)
    exact(wide, far).backward(upstream.double())
    assert_near(x.grad, far.grad)
    for own, wanted in zip(model.parameters(), wide.parameters(), strict=True):
        assert_near(own.grad, wanted.grad)


def test_weights_that_change_are_read_again() -> None:
    model = OneHot().eval()
    x = torch.randn(9, COLUMNS)
    run = compile_and_run(model, x, regions=3 * EXPERTS)
    with torch.no_grad():
        model.experts[3].w2.weight.mul_(2)
        assert_near(run.function(x), exact(model, x))
        model.experts[1].w1.weight.data = torch.randn(HIDDEN, COLUMNS)
        assert_near(run.function(x), exact(model, x))
        model.load_state_dict(OneHot().state_dict())
        assert_near(run.function(x), exact(model, x))


def test_copies_have_weights_of_their_own() -> None:
    model = Masked().eval()
    x = torch.randn(9, COLUMNS)
    with torch.no_grad():
        one = torch.compile(model, backend="sparse", options={"dense": "eager"})
        one(x)
        other = copy.deepcopy(model)
        other.experts[0].w1.weight.neg_()
        two = torch.compile(other, backend="sparse", options={"dense": "eager"})
        assert_near(two(x), exact(other, x))
        assert_near(one(x), exact(model, x))


@pytest.mark.parametrize("grad", [False, True])
def test_experts_that_share_a_module(grad: bool) -> None:
    model = OneHot()
    model.experts[3] = model.experts[1]
    wide, x = copy.deepcopy(model).double(), torch.randn(30, COLUMNS)
    run = compile_and_run(model, x, grad=grad, regions=3 * (EXPERTS - 1))
    assert_near(run.output, exact(model, x))
    if grad:
        run.output.square().sum().backward()
        exact(wide, x.double()).square().sum().backward()
        for own, wanted in zip(model.parameters(), wide.parameters(), strict=True):
            assert_near(own.grad, wanted.grad)


def test_experts_without_gradients_under_a_router_that_trains() -> None:
    model = OneHot()
    model.experts.requires_grad_(False)
    wide, x = copy.deepcopy(model).double(), torch.randn(9, COLUMNS)
    run = compile_and_run(model, x, grad=True, regions=3 * EXPERTS)
    run.output.square().sum().backward()
    exact(wide, x.double()).square().sum().backward()
    assert_near(model.router.weight.grad, wide.router.weight.grad)
    assert all(parameter.grad is None for parameter in model.experts.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    model = OneHot().to(dtype).eval()
    x = torch.randn(9, COLUMNS).to(dtype)
    run = compile_and_run(model, x, regions=3 * EXPERTS)
    with torch.no_grad():
        harness.assert_same(run.output, model(x))


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one(tokens: int) -> None:
    model, x = OneHot().eval(), torch.randn(tokens, COLUMNS)
    run = compile_and_run(model, x, regions=3 * EXPERTS)
    assert_near(run.output, exact(model, x))


def test_it_is_found_in_what_inductor_takes_apart() -> None:
    model, x = OneHot(Biased), torch.randn(9, COLUMNS)
    wide = copy.deepcopy(model).double()
    run = compile_and_run(model, x, grad=True, regions=3 * EXPERTS, dense="inductor")
    assert_one_operation(run)
    assert_near(run.output, exact(model, x))
    run.output.square().sum().backward()
    exact(wide, x.double()).square().sum().backward()
    for own, wanted in zip(model.parameters(), wide.parameters(), strict=True):
        assert_near(own.grad, wanted.grad)
    with torch.no_grad():
        assert_near(run.function(x), exact(model, x))


def test_pruned_experts_beside_dense_ones_keep_their_layers() -> None:
    model = OneHot().eval()
    for expert in model.experts[:2]:
        prune_(expert)
    x = torch.randn(9, COLUMNS)
    run = compile_and_run(model, x, min_gain=0)
    assert {d.name for d in run.regions} >= {f"experts.{e}.{w}.weight" for e in (0, 1) for w in ("w1", "w2", "w3")}
    assert not any("one operation" in d.reason for d in run.decisions)
    assert_near(run.output, exact(model, x))


def test_experts_that_do_different_things_stay_as_they_are() -> None:
    class Other(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return self.w2(torch.relu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]

    model = OneHot().eval()
    model.experts[2] = Other()
    x = torch.randn(9, COLUMNS)
    run = compile_and_run(model, x, regions=0)
    assert_near(run.output, exact(model, x))


def test_a_loop_that_leaves_an_expert_out_stays_as_it_is() -> None:
    class Short(OneHot):
        def forward(self, x: Tensor) -> Tensor:
            scores, chosen = self.route(x)
            y, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
            for e in (0, 1, 3, 4):
                slot, token = torch.where(mask[e])
                y.index_add_(0, token, self.experts[e](x[token]) * scores[token, slot, None])
            return y

    model, x = Short().eval(), torch.randn(9, COLUMNS)
    run = compile_and_run(model, x, regions=0)
    with torch.no_grad():
        assert_near(run.output, model(x))


def test_the_report_names_each_module() -> None:
    report = " ".join(str(gossamer.explain(Masked(), torch.randn(9, COLUMNS))).split())
    assert "experts.{0-4}.w1.weight (x5)" in report
    assert "5 experts, 2 for each token" in report


class Hit(Mixture):
    """A loop over the experts that are hit, which Dynamo cannot trace."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        y = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            token, slot = torch.where(chosen == e)
            y.index_add_(0, token, self.experts[e](x[token]) * scores[token, slot, None])
        return y


class Asking(Mixture):
    """A loop that asks whether an expert is hit."""

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            if token.numel() > 0:
                y.index_add_(0, token, expert(x[token]) * scores[token, slot, None])
        return y


@pytest.mark.parametrize(("kind", "config"), [(Hit, False), (Asking, False), (Asking, True)])
def test_the_report_says_how_to_write_a_loop_that_breaks(kind: type[Mixture], config: bool) -> None:
    model, x = kind().eval(), torch.randn(9, COLUMNS)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=config), torch.no_grad():
        report = gossamer.explain(model, x)
    assert any("write `for e in range(experts)` without" in reason for reason in report.graph_breaks), report.graph_breaks
