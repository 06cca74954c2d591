"""Elementwise work after a contraction goes into its region, as far as nothing else needs what lies between."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend.harness import assert_same, compile_and_run, prune_, pruned

M, K, T = 48, 64, 6
torch.manual_seed(0)
W, B, SCALE = pruned(M, K), torch.randn(M), torch.rand(M) + 0.5
SECOND = pruned(M, K)
RESIDUAL, COLUMN = torch.randn(T, M), torch.randn(T, 1)
NUMBER = torch.tensor(0.7)

WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda y: torch.relu(y),
    "gelu": lambda y: F.gelu(y),
    "gelu, tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": lambda y: F.silu(y),
    "sigmoid": lambda y: torch.sigmoid(y),
    "tanh": lambda y: torch.tanh(y),
    "exp": lambda y: torch.exp(-y.abs()),
    "leaky relu": lambda y: F.leaky_relu(y, 0.1),
    "clamp": lambda y: y.clamp(-0.5, 0.5),
    "relu6": lambda y: F.relu6(y),
    "where": lambda y: torch.where(y > 0.1, y, -y),
    "where with a number": lambda y: torch.where(y > 0.1, y, 0.25),
    "numbers": lambda y: (2 * y + 1 - 0.5) / 3,
    "right operand": lambda y: 1 - y,
    "alpha": lambda y: torch.add(y, RESIDUAL, alpha=3),
    "vector": lambda y: y * SCALE + B,
    "a number a token": lambda y: y * COLUMN + 1,
    "residual": lambda y: RESIDUAL + y,
    "0-d tensor": lambda y: y * NUMBER,
    "powers": lambda y: y**2 + y**3,
    "twice": lambda y: y * torch.sigmoid(1.702 * y),
    "to double": lambda y: y.double() * 2,
    "to bfloat16": lambda y: (y * 2).to(torch.bfloat16),
    "maximum": lambda y: torch.maximum(y, RESIDUAL) - torch.minimum(y, SCALE),
    "through views": lambda y: torch.relu(y.view(2, T // 2, M) + B).reshape(T, M) + RESIDUAL,
}


@pytest.mark.parametrize("dense", ["eager", "inductor"])
@pytest.mark.parametrize("name", WHOLE)
def test_taken_whole(name: str, dense: str) -> None:
    epilogue, x = WHOLE[name], torch.randn(T, K)
    run = compile_and_run(lambda x: epilogue(F.linear(x, W, B)), x, dense=dense)
    assert len(run.regions) == 1
    assert run.regions[0].reason.split()[0] not in ("nothing", "1"), "more than the bias is fused"
    expected = epilogue(F.linear(x, W, B))
    assert run.output.dtype == expected.dtype
    single = expected.dtype is torch.float64  # as precise as the sums before it
    assert_same(run.output.float() if single else run.output, expected.float() if single else expected)


@pytest.mark.parametrize("name", [*WHOLE, "hardtanh", "clamp_min", "clamp_max"])
def test_nan_and_infinity_come_through(name: str) -> None:
    bounds = {"hardtanh": F.hardtanh, "clamp_min": lambda y: y.clamp_min(0.1), "clamp_max": lambda y: y.clamp_max(0.1)}
    epilogue, x = {**WHOLE, **bounds}[name], torch.randn(T, K)
    holes = torch.zeros(T, M)
    holes[0, ::3] = torch.nan
    holes[2, 1::4] = 0 if name == "gelu" else torch.inf  # of which torch makes a NaN
    run = compile_and_run(lambda x: epilogue(F.linear(x, W, B) + holes), x)
    assert len(run.regions) == 1
    expected = epilogue(F.linear(x, W, B) + holes).float()
    torch.testing.assert_close(run.output.float(), expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_a_number_or_bound_of_a_wider_type_widens_the_result() -> None:
    """A body reads a tensor of shape [1] as one without dimensions, which would not count for the type."""
    half, x = W.bfloat16(), torch.randn(T, K).bfloat16()
    number, wide, bound = torch.tensor([0.7]), torch.tensor([0.3], dtype=torch.float64), torch.rand(M) * 0.3

    def layers(x: Tensor) -> tuple[Tensor, ...]:
        return (
            F.linear(x, half) * number,
            torch.relu(F.linear(x, half)) * number.exp(),
            F.linear(x, half) + torch.ones(T, M),
            F.linear(x.float(), W) * wide,
            torch.maximum(F.linear(x, half), bound),
            torch.minimum(torch.tensor(0.25), F.linear(x, half)),
        )

    run = compile_and_run(layers, x, regions=6)
    for y, expected in zip(run.output, layers(x), strict=True):
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)  # checks the type, too


def test_numbers_have_the_types_that_torch_gives_them() -> None:
    """They are exact in f64, and f32 in arithmetic of narrow floats. A comparison rounds them to the other operand's type."""
    half, wide, moments = W.half(), W.double(), 1.7e9 + torch.arange(M).double() / 8
    x = torch.randn(T, K).half()

    def layers(x: Tensor) -> tuple[Tensor, ...]:
        highest, lower = (F.linear(x.float(), W).clamp(max=0.7) for _ in range(2))
        return (
            torch.sigmoid(F.linear(x * 1e-2, half) * 1e5),
            F.linear(x * 1e-2, half) * 65536,
            torch.where(highest >= 0.7, 1.0, 0.0),
            torch.where(lower < 0.7, 1.0, 0.0),
            1700000033.25 - F.linear(x.double(), wide, moments),
        )

    run = compile_and_run(layers, x, regions=5)
    for y, expected in zip(run.output, layers(x), strict=True):
        torch.testing.assert_close(y, expected, rtol=1e-2 if y.dtype is torch.float16 else 1e-6, atol=1e-2)


def test_a_number_that_was_an_integer_has_no_fraction() -> None:
    def layer(x: Tensor) -> Tensor:
        return F.linear(x, W) * torch.full((1,), 2.7).to(torch.int32).to(torch.float32)

    x = torch.randn(T, K)
    run = compile_and_run(layer, x, dense="inductor", regions=1)
    assert run.regions[0].reason == "1 op fused"
    assert_same(run.output, layer(x))


def test_the_larger_of_two_bools_is_true_if_one_is() -> None:
    def layers(x: Tensor) -> tuple[Tensor, ...]:
        y, z = F.linear(x, W), F.linear(x, SECOND)
        outside, inside = torch.maximum(y > 0.5, y < -0.5), torch.minimum(z > -0.5, z < 0.5)
        return torch.where(outside, y, 0.0), torch.where(inside, z, 0.0)

    x = torch.randn(T, K)
    run = compile_and_run(layers, x, regions=2)
    for y, expected in zip(run.output, layers(x), strict=True):
        assert_same(y, expected)


def test_tanh_gelu_in_double() -> None:
    """The importer's own expansion rounds sqrt(2/pi) to three digits."""
    x, w = torch.randn(T, K, dtype=torch.double), W.double()
    run = compile_and_run(lambda x: F.gelu(F.linear(x, w), approximate="tanh"), x, dense="eager")
    torch.testing.assert_close(run.output, F.gelu(F.linear(x, w), approximate="tanh"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dynamic", [False, True])
def test_residual_in_three_dimensions(dynamic: bool) -> None:
    def function(x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, W, B)) + x[..., :M]

    x = torch.randn(2, 3, K)
    run = compile_and_run(function, x, dynamic=dynamic)
    assert [d.reason for d in run.regions] == ["3 ops fused"]
    assert_same(run.output, function(x))


def test_a_value_that_is_used_elsewhere_ends_the_region() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, W, B)
        return torch.relu(y), y.sum()

    x = torch.randn(T, K)
    run = compile_and_run(function, x)
    assert [d.reason for d in run.regions] == ["1 op fused"]
    for actual, expected in zip(run.output, function(x), strict=True):
        assert_same(actual, expected)


def test_a_diamond_that_closes_is_taken() -> None:
    def function(x: Tensor) -> Tensor:
        y = F.linear(x, W)
        return (y * 2 + torch.tanh(y)).sum(-1)

    x = torch.randn(T, K)
    run = compile_and_run(function, x)
    assert [d.reason for d in run.regions] == ["3 ops fused"]
    assert_same(run.output, function(x))


def test_a_diamond_with_other_work_inside_is_not() -> None:
    def function(x: Tensor) -> Tensor:
        y = F.linear(x, W)
        return y - y.mean(-1, keepdim=True)

    x = torch.randn(T, K)
    run = compile_and_run(function, x)
    assert [d.reason for d in run.regions] == ["nothing to fuse"]
    assert_same(run.output, function(x))


@pytest.mark.parametrize("operand", [torch.randn(2, T, M), torch.arange(M)])
def test_operands_that_a_region_cannot_read_end_it(operand: Tensor) -> None:
    x = torch.randn(T, K)
    run = compile_and_run(lambda x: F.linear(x, W) * operand, x)
    assert [d.reason for d in run.regions] == ["nothing to fuse"]
    assert_same(run.output, F.linear(x, W) * operand)


@pytest.mark.usefixtures("no_chains")
def test_a_gated_unit_is_two_regions() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(K, M), nn.Linear(K, M), nn.Linear(M, K)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.silu(self.gate(x)) * self.up(x)) + x

    model, x = prune_(Gated()).eval(), torch.randn(1, T, K)
    run = compile_and_run(model, x)
    assert [(d.name, d.reason) for d in run.regions] == [
        ("gate.weight", "3 ops fused"),
        ("up.weight", "1 op fused"),
        ("down.weight", "2 ops fused"),
    ]
    assert_same(run.output, model(x).detach())


@pytest.mark.parametrize("density", [0.1, 0.5])
def test_transformer_layer(density: float) -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    layer = prune_(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu"), density).eval()
    x = torch.randn(2, 7, 64)
    run = compile_and_run(layer, x, dense="inductor")
    assert {d.name for d in run.regions} == {
        "self_attn.in_proj_weight",
        "self_attn.out_proj.weight",
        "linear1.weight",
        "linear2.weight",
    }
    assert_same(run.output, layer(x).detach())
    torch.backends.mha.set_fastpath_enabled(True)
