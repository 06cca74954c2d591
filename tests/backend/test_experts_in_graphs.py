"""Mixtures of experts in graphs: every spelling becomes one operation, its results and gradients are those of float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe
from torch import Tensor, nn

import gossamer
from gossamer.backend.measuring import expert_times
from tests.backend import harness
from tests.backend.experts_in_models import (
    COLUMNS,
    HIDDEN,
    OPEN,
    TOP,
    WHOLE,
    Gathered,
    Mixture,
    Sorted,
    SortedAndAssigned,
    exact,
)
from tests.backend.harness import Run


def compile_and_run(function: object, *inputs: object, **options: object) -> Run:
    """With the router dense, as no product of it gains anything."""
    return harness.compile_and_run(function, *inputs, **{"min_gain": 1.1, **options})  # type: ignore[arg-type]


assert transformers.integrations.moe  # has the grouped product


def trained(model: Mixture, x: Tensor, *, dynamic: bool | None = None, **options: object) -> Run:
    """A compiled call and its gradients, compared with those of float64."""
    wide = copy.deepcopy(model).double()
    far, x = x.detach().double().requires_grad_(), x.requires_grad_()
    run = compile_and_run(model, x, grad=True, dynamic=dynamic, **options)
    upstream = torch.randn_like(run.output)
    run.output.backward(upstream)
    expected = exact(wide, far)
    expected.backward(upstream.double())
    assert_near(run.output, expected)
    assert x.grad is not None
    assert far.grad is not None
    assert_near(x.grad, far.grad)
    for own, wanted in zip(model.parameters(), wide.parameters(), strict=True):
        assert own.grad is not None
        assert wanted.grad is not None
        assert_near(own.grad, wanted.grad)
    return run


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def assert_one_operation(run: Run) -> None:
    assert [d.op for d in run.decisions if d.sparse] == ["experts", "experts"]
    assert all("one operation for the layer" in d.reason for d in run.regions)
    assert all(f"{TOP} for each token, silu" in d.reason for d in run.regions)


@pytest.mark.parametrize("kind", [*WHOLE, SortedAndAssigned])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_layer_is_one_operation_however_it_is_written(kind: type[Mixture], dynamic: bool | None) -> None:
    torch.manual_seed(0)
    model = kind()
    run = compile_and_run(model, torch.randn(9, COLUMNS), dynamic=dynamic, regions=2)
    assert_one_operation(run)
    with torch.no_grad():
        for tokens in (9, 30, 4):
            x = torch.randn(tokens, COLUMNS)
            assert_near(run.function(x), exact(copy.deepcopy(model).double(), x.double()))
        model.down.mul_(2)
        assert_near(run.function(x), exact(copy.deepcopy(model).double(), x.double()))


@pytest.mark.parametrize("kind", WHOLE)
def test_a_layer_trains_as_one_operation(kind: type[Mixture]) -> None:
    torch.manual_seed(0)
    assert_one_operation(trained(kind(), torch.randn(9, COLUMNS), regions=2))


@pytest.mark.parametrize("kind", [Sorted, Gathered])
def test_a_layer_is_found_in_what_inductor_takes_apart(kind: type[Mixture]) -> None:
    torch.manual_seed(0)
    assert_one_operation(trained(kind(), torch.randn(9, COLUMNS), regions=2, dense="inductor"))


def test_a_layer_of_open_size_trains_as_one_operation() -> None:
    torch.manual_seed(0)
    assert_one_operation(trained(Sorted(), torch.randn(9, COLUMNS), dynamic=True, regions=2))


@pytest.mark.parametrize("kind", OPEN)
def test_loops_over_the_tokens_of_experts_are_one_operation(kind: type[Mixture]) -> None:
    torch.manual_seed(0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        model = kind()
        run = compile_and_run(model, torch.randn(9, COLUMNS), regions=2)
        assert_one_operation(run)
        assert_near(run.output, run.output.double())
        assert_one_operation(trained(model, torch.randn(9, COLUMNS), regions=2))


@pytest.mark.parametrize("kind", [Sorted, Gathered])
def test_one_expert_for_each_token(kind: type[Mixture]) -> None:
    class Chosen(kind):  # type: ignore[misc, valid-type]
        def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.router(x).softmax(-1).topk(1, -1)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    run = trained(Chosen(top=1), torch.randn(9, COLUMNS), regions=2)
    assert all("1 for each token, silu, one operation" in d.reason for d in run.regions)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("gelu", F.gelu), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")), ("relu", F.relu),
        ("silu", lambda x: x / (1 + torch.exp(-x))), ("sigmoid", torch.sigmoid),
    ],
)  # fmt: skip
def test_an_activation_is_known_by_what_it_computes(name: str, function: object) -> None:
    class Model(Sorted):
        def products(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
            ids, order = torch.sort(chosen.reshape(-1))
            ends = torch.histc(ids.float(), self.experts, 0, self.experts - 1).cumsum(0, dtype=torch.int32)
            product = torch.ops.transformers.grouped_mm_fallback
            sums = product(x[order // self.top], self.gate_up.transpose(-2, -1), ends)
            hidden = sums[:, 1::2] * function(sums[:, ::2])  # type: ignore[operator]
            return product(hidden, self.down.transpose(-2, -1), ends), order

    model = Model()
    run = compile_and_run(model, torch.randn(9, COLUMNS), regions=2)
    assert all(f"{name}, one operation" in d.reason for d in run.regions)
    with torch.no_grad():
        x = torch.randn(9, COLUMNS)
        torch.testing.assert_close(run.function(x), model(x), rtol=1e-4, atol=1e-5)


def test_another_activation_leaves_two_products() -> None:
    class Model(Sorted):
        def products(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
            ids, order = torch.sort(chosen.reshape(-1))
            ends = torch.histc(ids.float(), self.experts, 0, self.experts - 1).cumsum(0, dtype=torch.int32)
            product = torch.ops.transformers.grouped_mm_fallback
            gate, up = product(x[order // self.top], self.gate_up.transpose(-2, -1), ends).chunk(2, -1)
            return product(F.elu(gate) * up, self.down.transpose(-2, -1), ends), order

    torch.manual_seed(0)
    model = Model()
    run = compile_and_run(model, torch.randn(9, COLUMNS), regions=2)
    assert all("its product alone" in d.reason for d in run.regions)
    with torch.no_grad():
        x = torch.randn(9, COLUMNS)
        torch.testing.assert_close(run.function(x), model(x), rtol=1e-4, atol=1e-5)


def test_rows_behind_the_last_end_stay_zeros() -> None:
    weight, ends = torch.randn(3, COLUMNS, HIDDEN), torch.tensor([2, 2, 5], dtype=torch.int32)
    product = torch.ops.transformers.grouped_mm_fallback
    run = compile_and_run(lambda x, ends: product(x, weight, ends), torch.randn(8, COLUMNS), ends, regions=1)
    assert "its product alone" in run.regions[0].reason
    assert run.output[:5].all()
    assert not run.output[5:].any()


def test_shared_experts_and_losses_stay_as_they_are() -> None:
    class Model(Sorted):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(COLUMNS, COLUMNS)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            share = self.router(x).softmax(-1)
            load = F.one_hot(share.topk(self.top, -1).indices, self.experts).float().mean((0, 1))
            return super().forward(x) + self.shared(x), (share.mean(0) * load).sum()

    torch.manual_seed(0)
    model = Model()
    wide = copy.deepcopy(model).double()
    x = torch.randn(9, COLUMNS)
    run = compile_and_run(model, x, grad=True, regions=2)
    y, loss = run.output
    (y.square().sum() + loss).backward()
    shared = wide.shared(x.double())
    far = exact(wide, x.double()) + shared
    share = wide.router(x.double()).softmax(-1)
    load = F.one_hot(share.topk(TOP, -1).indices, wide.experts).double().mean((0, 1))
    (far.square().sum() + (share.mean(0) * load).sum()).backward()
    assert_near(y, far)
    for own, wanted in zip(model.parameters(), wide.parameters(), strict=True):
        assert own.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(own.grad.double(), wanted.grad, rtol=1e-3, atol=1e-4)


def test_a_model_returns_its_routers_results_for_batches_of_any_size() -> None:
    """As those of transformers do for a loss of the router. The number of tokens is then also a size of a tangent."""

    class Model(Sorted):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            tokens = x.flatten(0, 1)
            return super().forward(tokens).view_as(x), self.router(tokens)

    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 5, COLUMNS)
    run = compile_and_run(model, x, grad=True, dynamic=True, regions=2)
    assert_one_operation(run)
    for each in (x, torch.randn(2, 9, COLUMNS)):
        (own, logits), wanted = run.function(each), model(each)
        found = torch.autograd.grad(own.square().sum() + logits.square().sum(), model.parameters())
        expected = torch.autograd.grad(wanted[0].square().sum() + wanted[1].square().sum(), model.parameters())
        assert_near(own, wanted[0].double())
        for gradient, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, theirs, rtol=1e-3, atol=1e-4)


def test_a_value_between_that_the_model_returns_keeps_its_layer_apart() -> None:
    class Model(Sorted):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            scores, chosen = self.route(x)
            rows, order = self.products(x, chosen)
            return torch.zeros_like(x).index_add(0, order // self.top, rows * scores.flatten()[order, None]), rows

    torch.manual_seed(0)
    model = Model()
    run = compile_and_run(model, torch.randn(9, COLUMNS), grad=True, regions=2)
    assert all("its product alone" in d.reason for d in run.regions)


def test_a_token_gets_nothing_from_an_expert_that_does_not_exist() -> None:
    class Dropping(Sorted):
        def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
            scores, chosen = super().route(x)
            return scores, torch.where(scores < 0.4, self.experts, chosen)

    class Zeroing(Mixture):
        def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
            scores, chosen = super().route(x)
            return torch.where(scores < 0.4, 0, scores), chosen

    torch.manual_seed(0)
    model, wide = Dropping(), Zeroing().double()
    wide.load_state_dict(model.state_dict())
    x = torch.randn(30, COLUMNS)
    run = compile_and_run(model, x, grad=True, regions=2)
    assert_one_operation(run)
    expected = exact(wide, x.double())
    assert_near(run.output, expected)
    upstream = torch.randn_like(x)
    run.output.backward(upstream)
    expected.backward(upstream.double())
    for own, wanted in zip(model.parameters(), wide.parameters(), strict=True):
        assert own.grad is not None
        assert wanted.grad is not None
        assert_near(own.grad, wanted.grad)


def test_few_rows_of_gathered_weights_are_left_to_torch() -> None:
    run = compile_and_run(Gathered(), torch.randn(1, COLUMNS), regions=0)
    assert all("so few rows leave no gain" in d.reason for d in run.decisions)


def test_a_size_times_a_result_is_no_score() -> None:
    layer = harness.prune_(nn.Linear(32, 32))

    def scaled(x: Tensor) -> Tensor:
        y = layer(x)
        return y + y * x.shape[0]

    x = torch.randn(7, 32)
    run = harness.compile_and_run(scaled, x, dynamic=True)
    harness.assert_same(run.output, scaled(x))


def test_the_report_names_experts_and_top() -> None:
    torch.manual_seed(0)
    report = str(gossamer.explain(Sorted(), torch.randn(9, COLUMNS)))
    assert "routed rows" in report
    assert "5 experts, 2 for each" in " ".join(report.split())


class _Apart(Sorted):
    """Products with an activation that the operation does not have: each stays a product."""

    def __init__(self) -> None:
        super().__init__(act=F.softsign)


@pytest.mark.parametrize("kind", [Sorted, _Apart])
@pytest.mark.parametrize("ratio", [0.7, 1.02, 1.3])
def test_a_few_tokens_go_the_way_that_was_measured_to_be_faster(
    kind: type[Mixture], ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_CALIBRATE", "1")
    monkeypatch.setattr(expert_times.FewTokens, "ratio", lambda self: ratio)
    torch.manual_seed(0)
    model, x, slower = kind(), torch.randn(3, COLUMNS), ratio > 1.1
    run = compile_and_run(model, x, min_gain=1, regions=0 if slower else 2)
    of_experts = [d for d in run.decisions if d.op == "experts"]
    assert [d.measured for d in of_experts] == [True, True]
    assert all(d.gain == pytest.approx(1 / ratio) for d in of_experts)
    assert all(("measured to be slower" in d.reason) is slower for d in of_experts)
    assert_near(run.output, exact(model, x).double())


@pytest.mark.parametrize(("tokens", "given"), [(3, {"dynamic": True}), (9, {}), (3, {"grad": True})])
def test_what_is_not_close_is_not_measured(tokens: int, given: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CALIBRATE", "1")
    monkeypatch.setattr(expert_times.FewTokens, "ratio", lambda self: 1 / 0)
    run = compile_and_run(Sorted(), torch.randn(tokens, COLUMNS), regions=2, **given)
    assert not any(d.measured for d in run.regions)


@pytest.mark.parametrize("down", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_the_ways_of_a_few_tokens_give_the_same(down: bool, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = lambda *shape: torch.randn(*shape).mT.contiguous().mT if turned else torch.randn(*shape)
    case = expert_times.FewTokens(
        torch.ops.transformers.grouped_mm_fallback, 3, 2, stored(5, 32, 24), stored(5, 24, 16) if down else None,
        "silu" if down else "identity", "halves" if down else "up",
    )  # fmt: skip
    x, chosen = torch.randn(3, 24), torch.tensor([[1, 4], [0, 1], [4, 2]])
    own, theirs = case._by_us(x, chosen), case._by_torch(x, chosen)
    if not down:
        theirs = torch.empty_like(theirs).index_copy(0, chosen.flatten().argsort(), theirs).view(3, 2, -1)
    assert_near(own, theirs.double())
    monkeypatch.setattr(expert_times, "kept", lambda what, key, measure, best: measure())
    assert 0 < case.ratio() < 1e3


@pytest.mark.parametrize("kind", [*WHOLE, SortedAndAssigned])
@pytest.mark.parametrize("grad", [False, True])
def test_under_autocast_a_layer_gives_what_eager_code_gives_there(kind: type[Mixture], grad: bool) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(9, COLUMNS, requires_grad=grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.set_grad_enabled(grad):
            expected = model(x)
        regions = 2 if issubclass(kind, Sorted) else 0  # others convert their weights, as torch does
        run = compile_and_run(model, x, grad=grad, regions=regions)
    assert run.output.dtype == expected.dtype
    torch.testing.assert_close(run.output, expected, rtol=3e-2, atol=3e-2)
    if grad:
        leaves = [x, *model.parameters()]
        own, wanted = (torch.autograd.grad(y.float().sum(), leaves) for y in (run.output, expected))
        for each, other in zip(own, wanted, strict=True):
            assert each.dtype == other.dtype
            torch.testing.assert_close(each, other, rtol=5e-2, atol=5e-2)
