"""Weights that torchao has quantized alone, in groups: their integers are what kernels for few tokens read."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.backend.run.compiled_region import CompiledRegion
from gossamer.backend.run.packed_weights import Packings
from gossamer.dialects.errors import FormatError
from gossamer.dialects.quantized_packings import Groups
from tests.backend.harness import Run, compile_and_run, prune_

BITS = (4, 8)
FEW = {1: "auto", 2: "auto", 8: "groups"}
"""Numbers of tokens, and the schedule to ask for: for 8 of them others may be predicted to be faster in layers so small."""


class WeightOnly(nn.Module):
    """A layer as torchao writes it: integers of 8 bits, also where they have 4; scales and zero points for groups of a row."""

    def __init__(self, inputs: int, outputs: int, bits: int, group: int = 32, kept: float = 0.5) -> None:
        super().__init__()
        self.sizes, self.most = (outputs, inputs // group, group), 1 << bits - 1
        self.q, self.scale = nn.Buffer(self.integers(kept)), nn.Buffer(torch.rand(outputs, inputs // group) * 1e-2 + 1e-3)
        self.zero = nn.Buffer(torch.zeros(outputs, inputs // group, dtype=torch.int8))
        self.bias = nn.Parameter(torch.randn(outputs))

    def integers(self, kept: float = 0.5) -> Tensor:
        rows, columns = self.sizes[0], self.sizes[1] * self.sizes[2]
        q = torch.randint(-self.most, self.most, (rows, columns), dtype=torch.int8)
        chosen = torch.rand(rows, -(-columns // 16)) < kept
        return q * chosen.repeat_interleave(16, 1)[:, :columns]

    @property
    def weight(self) -> Tensor:
        q, zero = (each.to(self.scale.dtype) for each in (self.q.view(self.sizes), self.zero.view(*self.sizes[:2], 1)))
        return ((q - zero) * self.scale.view(*self.sizes[:2], 1)).view(self.sizes[0], -1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def model_of(bits: int, inputs: int = 256, hidden: int = 192, **how: Any) -> nn.Sequential:
    return nn.Sequential(WeightOnly(inputs, hidden, bits, **how), nn.SiLU(), WeightOnly(hidden, inputs, bits, **how))


def check(model: nn.Module, compiled: Any, x: Tensor) -> None:
    """Against float64, of the floats that the integers stand for."""
    with torch.no_grad():
        y, wide = compiled(x), x.double()
        for layer in model:  # type: ignore[attr-defined]
            wide = F.linear(wide, layer.weight.double(), layer.bias.double()) if isinstance(layer, WeightOnly) else layer(wide)
    torch.testing.assert_close(y.double(), wide, rtol=1e-4, atol=1e-5, equal_nan=True)


def formats(run: Run) -> set[str]:
    assert all((d.schedule == "groups") is d.format.startswith("groups(") for d in run.regions)
    return {d.format for d in run.regions}


def groups(bits: int, scale: int = 32) -> str:
    return f"groups(reduction=1, bits={bits}, places=8, scale={scale})"


@pytest.fixture
def densely(monkeypatch: pytest.MonkeyPatch) -> list[CompiledRegion]:
    """The regions that have run densely."""
    ran, dense = [], CompiledRegion.dense

    def noted(self: CompiledRegion, operands: Any) -> Any:
        ran.append(self)
        return dense(self, operands)

    monkeypatch.setattr(CompiledRegion, "dense", noted)
    return ran


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tokens", FEW)
def test_few_tokens(tokens: int, bits: int, no_chains: None) -> None:
    model, x = model_of(bits), torch.randn(tokens, 256)
    run = compile_and_run(model, x, regions=2, schedule=FEW[tokens])
    assert formats(run) == {groups(bits)}
    assert all(d.packed_bytes < 0.25 * d.dense_bytes for d in run.regions)
    check(model, run.function, x)


@pytest.mark.parametrize("bits", BITS)
def test_scales_of_bfloat16(bits: int) -> None:
    model, x = model_of(bits), torch.randn(1, 256)
    for layer in model[::2]:
        layer.scale.copy_(layer.scale.bfloat16())  # type: ignore[operator, union-attr]
    run = compile_and_run(model, x, regions=2)
    assert formats(run) == {groups(bits, 16)}
    check(model, run.function, x)


@pytest.mark.parametrize("dense", ["eager", "inductor"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_sizes_that_change(dynamic: bool, dense: str, no_chains: None) -> None:
    model = model_of(4)
    run = compile_and_run(model, torch.randn(3, 256), dynamic=dynamic, dense=dense, regions=2)
    assert all("groups" in d.schedule.split(", ") for d in run.regions)
    for tokens in (3, 1, 8, 20, 0):
        check(model, run.function, torch.randn(tokens, 256))


def test_layers_of_one_shape_and_other_bits() -> None:
    model, x = nn.Sequential(*(WeightOnly(128, 128, bits) for bits in (4, 8, 4))), torch.randn(2, 128)
    run = compile_and_run(model, x, regions=3)
    assert [d.format for d in run.regions] == [groups(4), groups(8), groups(4)]
    check(model, run.function, x)


def test_a_scale_for_each_row_after_the_product(no_chains: None) -> None:
    class ByRows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.scale = nn.Buffer(WeightOnly(128, 96, 8).q), nn.Buffer(torch.rand(96) * 1e-2)

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.q.t().to(x.dtype)) * self.scale

    model, x = ByRows(), torch.randn(2, 128)
    run = compile_and_run(model, x, regions=1)
    assert formats(run) == {groups(8, 16)}
    torch.testing.assert_close(run.output, model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("columns", "group", "by_groups"), [(40, 40, True), (7, 7, True), (72, 24, False), (40, 8, False)])
def test_columns_that_are_no_groups_of_16(columns: int, group: int, by_groups: bool) -> None:
    model, x = nn.Sequential(WeightOnly(columns, 64, 4, group)), torch.randn(2, columns)
    run = compile_and_run(model, x, regions=1, schedule="groups" if by_groups else "auto")
    assert (formats(run) == {groups(4)}) is by_groups
    check(model, run.function, x)


def test_rows_of_zeros() -> None:
    model, x = model_of(4), torch.randn(2, 256)
    model[0].q[10:40] = 0  # type: ignore[index, operator, union-attr]
    model[2].q[:] = 0  # type: ignore[index, operator, union-attr]
    run = compile_and_run(model, x, regions=2)
    check(model, run.function, x)
    model[2].q.copy_(model[2].integers())  # type: ignore[operator, union-attr]
    for _ in range(3):
        check(model, run.function, x)


@pytest.mark.parametrize("schedule", ["auto", "groups"])
@pytest.mark.parametrize("bits", BITS)
def test_integers_and_scales_that_change(bits: int, schedule: str, densely: list[CompiledRegion]) -> None:
    model, x = model_of(bits), torch.randn(1, 256)
    run = compile_and_run(model, x, regions=2, schedule=schedule)
    first: Any = model[0]
    for change in (
        lambda: first.scale.mul_(3.7),
        lambda: first.q.copy_(-first.q.clamp(min=1 - first.most)),
        lambda: first.q.copy_(first.integers(0.3)),
        lambda: first.scale.copy_(first.scale.bfloat16()),
        lambda: first.scale.uniform_(1e-3, 1e-2),
    ):
        for _ in range(3):
            check(model, run.function, x)
        change()
        check(model, run.function, x)
        densely.clear()
        check(model, run.function, x)
        assert not densely


@pytest.mark.parametrize("verify", ["version", "full"])
def test_what_no_longer_fits_runs_densely_until_it_does(verify: str, densely: list[CompiledRegion], no_chains: None) -> None:
    model, x = nn.Sequential(WeightOnly(256, 64, 4)), torch.randn(2, 256)
    run = compile_and_run(model, x, regions=1, verify=verify)
    layer: Any = model[0]
    fitting = copy.deepcopy(layer.state_dict())
    for change in (
        lambda: layer.q.mul_(3),
        lambda: layer.zero.fill_(7),
        lambda: layer.scale[3].fill_(torch.nan),
        lambda: layer.scale[:, 1].fill_(torch.inf),
    ):
        assert formats(run) == {groups(4)}
        change()
        for _ in range(4):
            densely.clear()
            check(model, run.function, x)
            assert densely
        layer.load_state_dict(fitting)
        for _ in range(3):
            densely.clear()
            check(model, run.function, x)
        assert not densely
    layer.load_state_dict({**fitting, "q": layer.q * 3}, assign=True)  # tensors that nothing was packed of
    check(model, run.function, x)
    assert densely


def test_a_format_that_does_not_hold_a_weight_is_told_when_a_region_is_built() -> None:
    packings, leaves = Packings("floats", lambda w: w, Groups(1, 4, 8, 32)), [torch.randn(16, 32)]
    with pytest.raises(FormatError, match="no integers of 4 bits"):
        packings.first(leaves, 1.0)
    assert packings.current(leaves, 1.0) is None


@pytest.mark.parametrize("scale", [torch.nan, torch.inf])
def test_scales_that_are_no_numbers(scale: float) -> None:
    model, x = nn.Sequential(WeightOnly(256, 64, 4)), torch.randn(2, 256)
    model[0].scale[3, 2] = scale  # type: ignore[index, operator, union-attr]
    run = compile_and_run(model, x, regions=1)
    assert not any("groups" in each for each in formats(run))
    check(model, run.function, x)


@pytest.mark.parametrize(("zeros", "by_groups"), [(7, True), (100, False)])
def test_zero_points(zeros: int, by_groups: bool) -> None:
    """Where no integer is farther from its zero point than 8 bits can tell, the groups have that."""
    layer, x = WeightOnly(256, 64, 4 if by_groups else 8), torch.randn(2, 256)
    integers = layer.q.view(layer.sizes)
    layer.zero.random_(-zeros, zeros + 1)
    layer.q.copy_(torch.where(integers == 0, layer.zero[:, :, None], integers).view(64, 256))
    model = nn.Sequential(layer)
    run = compile_and_run(model, x, regions=1)
    assert (formats(run) == {groups(8)}) is by_groups
    check(model, run.function, x)


def test_weights_of_bfloat16_run_as_floats() -> None:
    model, x = model_of(4).bfloat16(), torch.randn(2, 256).bfloat16()
    run = compile_and_run(model, x, regions=2)
    assert not any("groups" in each for each in formats(run))
    torch.testing.assert_close(run.output, model(x), rtol=3e-2, atol=3e-2)


def test_weights_of_few_zeros_run_as_floats() -> None:
    model, x = nn.Sequential(WeightOnly(256, 64, 4, kept=0.95)), torch.randn(2, 256)
    run = compile_and_run(model, x, regions=1)
    assert not any("groups" in each for each in formats(run))
    check(model, run.function, x)


def test_gradients() -> None:
    model, x = model_of(4), torch.randn(4, 256, requires_grad=True)
    other, wide = copy.deepcopy(model), x.detach().clone().requires_grad_()
    run = compile_and_run(model, x, grad=True)
    run.output.square().sum().backward()
    other(wide).square().sum().backward()
    torch.testing.assert_close(x.grad, wide.grad, rtol=1e-4, atol=1e-4)


def test_many_tokens_have_another_schedule() -> None:
    model = nn.Sequential(WeightOnly(1024, 1024, 4))
    for tokens, few in ((1, True), (256, False)):
        run = compile_and_run(model, torch.randn(tokens, 1024), min_gain=1.1)
        assert (run.regions[0].schedule == "groups") == few
        check(model, run.function, torch.randn(tokens, 1024))
        torch._dynamo.reset()


@torch.no_grad()
@pytest.mark.parametrize("tokens", FEW)
@pytest.mark.parametrize("config", ["intx4", "intx8", "int8", "int8 rows"])
def test_torchao_s_layers(config: str, tokens: int, no_chains: None) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = prune_(nn.Sequential(nn.Linear(256, 192), nn.SiLU(), nn.Linear(192, 256, bias=False)), 0.5, (1, 16)).eval()
    by_groups, bits = torchao.PerGroup(32), 4 if config == "intx4" else 8
    configs = {
        "intx4": lambda: torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=by_groups),
        "intx8": lambda: torchao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=by_groups),
        "int8": lambda: torchao.Int8WeightOnlyConfig(granularity=by_groups),
        "int8 rows": lambda: torchao.Int8WeightOnlyConfig(),
    }
    torchao.quantize_(model, configs[config]())
    x = torch.randn(tokens, 256)
    run = compile_and_run(model, x, regions=2, schedule=FEW[tokens])
    assert formats(run) == {groups(bits, 16 if config == "int8 rows" else 32)}
    torch.testing.assert_close(run.output, model(x), rtol=1e-5, atol=1e-5)
