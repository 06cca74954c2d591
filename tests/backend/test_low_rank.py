"""Low ranks beside sparse weights: adapters, and sums of a sparse matrix and factors."""

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


def pruned(rows: int, columns: int, dtype: torch.dtype = torch.float32, density: float = 0.1) -> nn.Linear:
    layer = nn.Linear(columns, rows, dtype=dtype)
    with torch.no_grad():
        layer.weight *= torch.rand(rows, columns) < density
    return layer.requires_grad_(False)


class Adapted(nn.Module):
    """As peft has it: a frozen layer, and `lora_B(lora_A(dropout(x))) * scaling` beside it."""

    def __init__(self, base: nn.Linear, rank: int = 16, scaling: float = 2.0, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.base_layer, self.scaling, self.dropout = base, scaling, nn.Dropout(dropout)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.lora_B = nn.Linear(rank, base.out_features, bias=bias, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(self.dropout(x))) * self.scaling


class Parameters(nn.Module):
    """Factors as plain parameters, of shapes [inputs, rank] and [rank, outputs]."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(base.in_features, rank) * 0.1)
        self.b = nn.Parameter(torch.randn(rank, base.out_features) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, self.base.weight) + self.base.bias + (x @ self.a) @ self.b * 0.5)


class Sum(nn.Module):
    """A weight that is a sum: x (S + U V)."""

    def __init__(self, rows: int = 512, columns: int = 384, rank: int = 16, scale: float = 1.0, trains: bool = False) -> None:
        super().__init__()
        self.s = nn.Parameter(pruned(rows, columns).weight.detach(), requires_grad=trains)
        self.u, self.v = nn.Parameter(torch.randn(rows, rank) * 0.1), nn.Parameter(torch.randn(rank, columns) * 0.1)
        self.bias, self.scale = nn.Parameter(torch.randn(rows)), scale

    def forward(self, x: Tensor) -> Tensor:
        low = self.u @ self.v
        return F.linear(x, self.s + (low * self.scale if self.scale != 1 else low), self.bias)


def run(model: Any, *inputs: Tensor, dynamic: bool | None = None, **options: Any) -> tuple[Tensor, list[Decision]]:
    compiled = torch.compile(model, backend="sparse", fullgraph=True, dynamic=dynamic, options=OPTIONS | options)
    with collect() as found, torch.no_grad():
        return compiled(*inputs), found.decisions


def beside(decisions: list[Decision]) -> int:
    """How many sparse products have a rank beside them in their kernel."""
    return sum(each.sparse and "beside it" in each.reason for each in decisions)


def close(found: Tensor, expected: Tensor, share: float = 1e-5) -> None:
    difference = (found.double() - expected.double()).abs().max()
    assert difference <= share * max(1.0, float(expected.double().abs().max()))


@pytest.mark.parametrize("shape", [(64, 256), (3, 50, 256), (1, 257, 256), (17, 256)])
@pytest.mark.parametrize("rank", [1, 5, 16, 64])
def test_an_adapter_is_in_the_kernel_of_its_layer(shape: tuple[int, ...], rank: int) -> None:
    model, x = Adapted(pruned(384, 256), rank), torch.randn(*shape)
    y, decisions = run(model, x)
    assert beside(decisions) == 1 and sum(each.sparse for each in decisions) == 1
    assert {each.name for each in decisions if each.op == "low rank"} == {"lora_A.weight", "lora_B.weight"}
    close(y, copy.deepcopy(model).double()(x.double()).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_types(dtype: torch.dtype) -> None:
    model, x = Adapted(pruned(384, 256, dtype)), torch.randn(100, 256, dtype=dtype)
    y, decisions = run(model, x, min_gain=0.5)
    assert sum(each.sparse for each in decisions) == 1
    close(y, copy.deepcopy(model).double()(x.double()).detach(), 2e-2 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(
    "make", [Parameters, lambda base: Adapted(base, bias=True), lambda base: Adapted(base, scaling=1.0)], ids=["@", "bias", "1"]
)
def test_spellings(make: Callable[[nn.Linear], nn.Module]) -> None:
    model, x = make(pruned(384, 256)), torch.randn(4, 40, 256)
    y, decisions = run(model, x)
    assert beside(decisions) == 1
    close(y, copy.deepcopy(model).double()(x.double()).detach())


def test_a_residual_and_an_activation_are_in_the_same_kernel() -> None:
    model, x = Adapted(pruned(256, 256)), torch.randn(100, 256)
    y, decisions = run(lambda x: x + torch.tanh(model(x)), x)
    assert beside(decisions) == 1
    close(y, (x + torch.tanh(model(x))).detach())


def test_two_adapters_beside_one_layer() -> None:
    model, other, x = Adapted(pruned(384, 256)), Adapted(pruned(384, 256), 8), torch.randn(100, 256)

    def both(x: Tensor) -> Tensor:
        return model(x) + other.lora_B(other.lora_A(x))

    y, decisions = run(both, x)
    assert beside(decisions) == 1 and "rank of 8 and 16" in " ".join(each.reason for each in decisions)
    close(y, both(x).detach())


def test_adapted_layers_make_a_chain() -> None:
    up, down, x = Adapted(pruned(512, 256)), Adapted(pruned(256, 512)), torch.randn(100, 256)

    def block(x: Tensor) -> Tensor:
        return x + down(F.gelu(up(x)))

    y, decisions = run(block, x)
    assert [each.reason for each in decisions if each.sparse] == ["in a chain of 2, a rank of 16 beside it"] * 2
    close(y, block(x).detach())


def test_other_values_of_the_factors_need_no_compilation() -> None:
    model, x = Adapted(pruned(384, 256)), torch.randn(100, 256)
    compiled = torch.compile(model, backend="sparse", options=OPTIONS)
    with torch.no_grad(), collect() as found:
        compiled(x)
        for _ in range(3):
            model.lora_A.weight.normal_()
            model.lora_B.weight.normal_()
            close(compiled(x), model(x))
    assert sum(each.sparse for each in found.decisions) == 1


def test_other_values_of_the_sparse_weight_are_packed_again() -> None:
    model, x = Adapted(pruned(384, 256)), torch.randn(100, 256)
    compiled = torch.compile(model, backend="sparse", options=OPTIONS)
    with torch.no_grad():
        compiled(x)
        model.base_layer.weight.copy_(pruned(384, 256).weight)
        close(compiled(x), model(x))
        model.base_layer.weight.normal_()  # dense from now on
        close(compiled(x), model(x))


@pytest.mark.parametrize("tokens", [40, 1, 7, 300, 0])
def test_open_numbers_of_tokens(tokens: int) -> None:
    model = Adapted(pruned(384, 256))
    compiled = torch.compile(model, backend="sparse", dynamic=True, options=OPTIONS)
    with torch.no_grad(), collect() as found:
        for count in (100, tokens):
            x = torch.randn(count, 256)
            close(compiled(x), model(x)) if count else compiled(x)
    assert beside(found.decisions) >= 1


def test_a_few_tokens_leave_the_factors_to_torch() -> None:
    """Kernels for a few tokens have no tile of them, and one made for many would be mostly empty."""
    model, x = Adapted(pruned(512, 512)), torch.randn(4, 512)
    y, decisions = run(model, x)
    assert beside(decisions) == 0 and sum(each.sparse for each in decisions) == 1
    close(y, model(x).detach())


def test_numbers_of_tokens_that_nobody_knows() -> None:
    model, x, chosen = Adapted(pruned(384, 256)), torch.randn(100, 256), torch.rand(100) < 0.5

    def some(x: Tensor, chosen: Tensor) -> Tensor:
        return model(x[chosen.nonzero().squeeze(1)])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        y, decisions = run(some, x, chosen)
    assert sum(each.sparse for each in decisions) == 1
    close(y, some(x, chosen).detach())


def test_nan_and_infinity_come_through_the_factors() -> None:
    model, x = Adapted(pruned(384, 256)), torch.randn(64, 256)
    x[3, 5], x[9, 0] = float("nan"), float("inf")
    y, _ = run(model, x)
    expected = model(x).detach()
    assert torch.equal(y[3].isnan(), expected[3].isnan()) and bool(y[3].isnan().all())
    assert not bool(y[9].isfinite().any())
    close(y[:3], expected[:3])


def test_a_rank_of_zero() -> None:
    base, a, b, x = pruned(384, 256), torch.zeros(256, 0), torch.zeros(0, 384), torch.randn(64, 256)
    y, decisions = run(lambda x: base(x) + (x @ a) @ b, x)
    assert sum(each.sparse for each in decisions) == 1
    close(y, base(x))


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    call(x).backward(dy)
    assert x.grad is not None
    return [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("shape", [(100, 256), (2, 50, 256)])
@pytest.mark.parametrize("rank", [4, 16])
def test_training_an_adapter_computes_gradients_as_eager(shape: tuple[int, ...], rank: int) -> None:
    model, x, dy = Adapted(pruned(384, 256), rank), torch.randn(*shape), torch.randn(*shape[:-1], 384)
    expected = gradients(model, model, x, dy)
    with collect() as found:
        got = gradients(model, torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS), x, dy)
    assert len(got) == len(expected) == 3
    for a, b in zip(got, expected, strict=True):
        close(a, b)
    assert {each.op for each in found.decisions if each.sparse} == {"linear", "linear backward"} and beside(
        found.decisions
    ) == 2


def test_training_with_dropout_computes_gradients_of_the_same_draw() -> None:
    """What the adapter multiplies is a product of x and a draw, of which the outputs tell."""
    model, x = Adapted(pruned(384, 256), dropout=0.5), torch.randn(100, 256)
    compiled = torch.compile(model, backend="sparse", options=OPTIONS)
    with collect() as found:
        given = x.clone().requires_grad_()
        y = compiled(given)
        y.sum().backward()
    assert beside(found.decisions) >= 1 and given.grad is not None
    low = (y - model.base_layer(x)).detach() / model.scaling
    assert bool(low.isfinite().all()) and float(low.abs().sum()) > 0
    model.eval()
    with torch.no_grad():
        close(compiled(x), model(x))


def test_steps_of_an_optimizer_change_the_factors_alone() -> None:
    model, x = Adapted(pruned(384, 256)), torch.randn(100, 256)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="sparse", options=OPTIONS)
    for each, call in ((model, compiled), (eager, eager)):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            call(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        close(a.detach(), b.detach(), 1e-4)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_sum_of_a_sparse_matrix_and_a_low_rank_is_computed_in_parts(scale: float) -> None:
    model, x = Sum(scale=scale), torch.randn(4, 50, 384)
    y, decisions = run(model, x)
    assert beside(decisions) == 1 and any(each.reason.startswith("x (S + U V) as x S + (x U) V") for each in decisions)
    close(y, copy.deepcopy(model).double()(x.double()).detach())


def test_a_sum_that_broadcasts_stays_one() -> None:
    s, u, v, x = pruned(512, 384).weight, torch.randn(1, 4), torch.randn(4, 384), torch.randn(64, 384)
    y, decisions = run(lambda x: F.linear(x, s + u @ v), x)
    assert not any(each.op == "low rank" for each in decisions)
    close(y, F.linear(x, s + u @ v))


def test_a_sum_with_a_dense_matrix_stays_one() -> None:
    model, x = Sum(), torch.randn(100, 384)
    with torch.no_grad():
        model.s.normal_()
    y, decisions = run(model, x)
    assert not any(each.sparse for each in decisions)
    close(y, model(x).detach())


@pytest.mark.parametrize("trains", [False, True])
def test_a_sum_trains(trains: bool) -> None:
    model, x, dy = Sum(trains=trains), torch.randn(100, 384), torch.randn(100, 512)
    expected = gradients(model, model, x, dy)
    with collect() as found:
        got = gradients(model, torch.compile(model, backend="sparse", options=OPTIONS), x, dy)
    for a, b in zip(got, expected, strict=True):
        close(a, b)
    # S that changes at every step is packed each time. Its gradient, [512, 384], is made if S trains.
    assert trains or sum(each.sparse for each in found.decisions) == 2
    assert any(each.reason.startswith("a product of 512x384 is not made") for each in found.decisions) is not trains


def test_gradients_of_scales_come_behind_small_products() -> None:
    model, x = Adapted(pruned(384, 256)), torch.randn(100, 256)
    seen: list[str] = []
    compiled = torch.compile(model, backend="sparse", options=OPTIONS)
    with torch.profiler.profile() as profile:
        compiled(x.requires_grad_()).sum().backward()
    seen = [str(event.input_shapes) for event in profile.events() if event.name == "aten::mul"]
    assert "[100, 384]" not in " ".join(seen)


def test_a_saved_and_loaded_adapter(tmp_path: Any) -> None:
    model, x = Adapted(pruned(384, 256)), torch.randn(64, 256)
    torch.save(model.state_dict(), tmp_path / "adapter.pt")
    other = Adapted(pruned(384, 256))
    compiled = torch.compile(other, backend="sparse", options=OPTIONS)
    with torch.no_grad():
        compiled(x)
        other.load_state_dict(torch.load(tmp_path / "adapter.pt"))
        close(compiled(x), model(x))
        close(torch.compile(copy.deepcopy(other), backend="sparse", options=OPTIONS)(x), model(x))


def test_an_adapter_beside_a_quantized_layer() -> None:
    base = nn.Sequential(pruned(512, 512).requires_grad_())
    gossamer.quantize(base, [torch.randn(64, 512)])
    adapter, x = Adapted(pruned(512, 512)), torch.randn(64, 512)

    def both(x: Tensor) -> Tensor:
        return base(x) + adapter.lora_B(adapter.lora_A(x)) * 2.0

    y, decisions = run(both, x, min_gain=0.01)
    assert sum(each.sparse for each in decisions) == 1
    close(y, both(x).detach(), 5e-2)


def test_the_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft")
    made = nn.Sequential(pruned(384, 256), nn.GELU(), pruned(256, 384))
    model = peft.get_peft_model(made, peft.LoraConfig(r=16, lora_alpha=32, target_modules=["0", "2"], init_lora_weights=False))
    x, dy = torch.randn(100, 256), torch.randn(100, 256)
    expected = gradients(model, model, x, dy)
    with collect() as found:
        got = gradients(model, torch.compile(model, backend="sparse", options=OPTIONS), x, dy)
    for a, b in zip(got, expected, strict=True):
        close(a, b)
    assert beside(found.decisions) >= 3
    model.eval()
    y, decisions = run(model, x)
    assert beside(decisions) == 2
    close(y, model(x).detach())


@pytest.mark.parametrize("make", [lambda: Adapted(pruned(384, 256)), lambda: Sum(384, 256)])
@pytest.mark.parametrize("trained", [False, True])
def test_under_autocast_it_gives_what_eager_code_gives_there(make: Callable[[], nn.Module], trained: bool) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(64, 256)
    compiled = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS | {"min_gain": 0})
    with torch.autocast("cpu", dtype=torch.bfloat16), collect() as found, torch.set_grad_enabled(trained):
        expected, y = model(x), compiled(x)
    assert any(each.sparse for each in found.decisions)
    assert y.dtype == expected.dtype == torch.bfloat16
    close(y.detach(), expected.detach(), 2e-2)
    if trained:
        leaves = [each for each in model.parameters() if each.requires_grad]
        own, wanted = (torch.autograd.grad(each.float().square().sum(), leaves) for each in (y, expected))
        for each, other in zip(own, wanted, strict=True):
            assert each.dtype == other.dtype
            close(each, other, 4e-2)
