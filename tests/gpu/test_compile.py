"""torch.compile with a GPU: what is decided, and what comes out of the kernels, which the emulator runs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gossamer.backend.devices import cuda_cost
from gossamer.backend.devices.cpu import CPU
from gossamer.backend.devices.cuda_device import Gpu
from gossamer.backend.regions import compiled_kernel
from gossamer.backend.report.options import SCHEDULES
from gossamer.backend.run import packed_weights, region_op
from gossamer.passes.framework.family import Matrix
from gossamer.runtime import cuda
from gossamer.sparsity.compiler import gpu_kernels
from tests.backend.harness import Run, assert_same, compile_and_run, prune_, pruned
from tests.gpu.emulated_device import STREAM, EmulatedDevice, emulated_device


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """A GPU in place of the CPU."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    emulated = emulated_device()
    region_op._regions.clear()
    with emulated.installed(monkeypatch):
        yield emulated


class Layer(nn.Module):
    """relu(x w^T + b)"""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(torch.randn(weight.shape[0]).to(weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(nn.functional.linear(x, self.weight, self.bias))


def blocks(rows: int, columns: int, size: int) -> torch.Tensor:
    """Normal values in a third of the blocks."""
    kept = torch.rand(rows // size, columns // size) < 0.3
    return torch.randn(rows, columns) * kept.repeat_interleave(size, 0).repeat_interleave(size, 1)


def two_four(rows: int, columns: int) -> torch.Tensor:
    """Normal values, two of every four neighbours of a row."""
    kept = torch.rand(rows, columns // 4, 4).argsort(2) < 2
    return torch.randn(rows, columns) * kept.view(rows, columns)


def two_of_eight(rows: int, columns: int) -> torch.Tensor:
    """Normal values, two of every eight neighbours of a row, out of four that all rows share (64:2:8)."""
    shared = torch.rand(1, columns // 8, 8).argsort(2).argsort(2) < 4
    kept = torch.where(shared, torch.rand(rows, columns // 8, 8), 2).argsort(2).argsort(2) < 2
    return torch.randn(rows, columns) * kept.view(rows, columns)


def key_of(run: Run) -> str:
    """The key of the one region of a test."""
    (key,) = region_op._regions
    assert len(run.regions) == 1
    return key


def test_two_layers_become_two_launches_on_torch_s_stream(gpu: EmulatedDevice) -> None:
    model = prune_(nn.Sequential(nn.Linear(72, 40), nn.GELU(), nn.Linear(40, 24)))
    x = torch.randn(2, 9, 72)
    run = compile_and_run(model, x)
    assert [(d.schedule, d.reason) for d in run.regions] == [("gpu-kblock", "2 ops fused"), ("gpu-kblock", "1 op fused")]
    launches = gpu.driver.named("cuLaunchKernel")
    assert len(launches) == 2 and {call[9] for call in launches} == {STREAM}
    assert_same(run.output, model(x))


@pytest.mark.parametrize(
    ("schedule", "weight", "tokens"),
    [
        ("gpu-kblock", lambda: pruned(48, 64), 40),
        ("gpu-gather", lambda: pruned(48, 64), 3),
        ("gpu-deltas", lambda: pruned(64, 96, density=0.4).half(), 2),
        ("gpu-blocks", lambda: blocks(64, 96, 16).bfloat16(), 33),
        ("gpu-twofour", lambda: two_four(64, 64).half(), 70),
        ("gpu-vnm", lambda: two_of_eight(64, 96).bfloat16(), 70),
        ("gpu-expand", lambda: pruned(64, 96, density=0.6).bfloat16(), 9),
    ],
)
def test_the_schedule_suits_pattern_type_and_tokens(schedule: str, weight: Any, tokens: int, gpu: EmulatedDevice) -> None:
    model = Layer(weight())
    x = torch.randn(tokens, model.weight.shape[1]).to(model.weight.dtype)
    run = compile_and_run(model, x)
    assert [d.schedule for d in run.regions] == [schedule] == gpu.schedules
    assert_same(run.output, model(x))


def test_an_open_number_of_tokens_takes_a_kernel_for_few_and_one_for_many(
    gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Launches are most of what so small a layer takes.
    monkeypatch.setattr(cuda_cost, "EXPECTED", cuda_cost.Rates(kernel_us=0, call_us=0))
    model = Layer(pruned(48, 64))
    run = compile_and_run(model, torch.randn(37, 64), dynamic=True)
    (decision,) = run.regions
    assert decision.schedule == "gpu-gather, gpu-kblock"
    for tokens in (1, 70):
        x = torch.randn(tokens, 64)
        with torch.no_grad():
            assert_same(run.function(x), model(x))
    assert gpu.schedules == ["gpu-kblock", "gpu-gather", "gpu-kblock"]


def test_training_multiplies_by_the_packed_weight_in_both_directions(gpu: EmulatedDevice) -> None:
    layers = [Layer(pruned(40, 48)), Layer(pruned(32, 40))]
    model, reference = nn.Sequential(*layers), nn.Sequential(*(Layer(layer.weight.detach().clone()) for layer in layers))
    reference.load_state_dict(model.state_dict())
    x = torch.randn(20, 48)
    run = compile_and_run(model, x, grad=True)
    run.output.sum().backward()
    expected = reference(x)
    expected.sum().backward()
    assert [d.op for d in run.regions] == ["linear", "linear", "linear backward"]
    assert len(gpu.schedules) == 3
    assert_same(run.output, expected)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert_same(parameter.grad, other.grad)


def test_changed_weights_are_noticed(gpu: EmulatedDevice) -> None:
    model, x = Layer(pruned(40, 48)), torch.randn(20, 48)
    run = compile_and_run(model, x)
    with torch.no_grad():
        model.weight.mul_(2)
        assert_same(run.function(x), model(x))
        run.function(x)
        model.weight.copy_(pruned(40, 48))
        assert_same(run.function(x), model(x))
    assert gpu.schedules == ["gpu-kblock"] * 4


def test_an_input_that_is_part_of_another_tensor(gpu: EmulatedDevice) -> None:
    model = Layer(pruned(40, 48))
    x = torch.randn(20 * 48 + 1)[1:].view(20, 48)
    assert x.data_ptr() % 16
    assert_same(compile_and_run(model, x).output, model(x))


def test_what_has_no_kernel_on_a_gpu_stays_dense() -> None:
    weight, x = pruned(40, 48), torch.randn(20, 48)
    run = compile_and_run(Layer(weight), x, schedule="lookup", regions=0)
    assert [d.reason for d in run.decisions] == ["schedule lookup is not for cpu"]  # where the tensors of this GPU are
    run = compile_and_run(Layer(weight.double()), x.double(), regions=0)
    assert [d.reason for d in run.decisions] == ["no sparse kernel for float64 on cpu"]


def test_a_kernel_that_the_driver_refuses_leaves_the_layer_dense(gpu: EmulatedDevice) -> None:
    model, x = Layer(pruned(41, 49)), torch.randn(20, 49)
    gpu.driver.failures["cuLinkComplete"] = 218
    try:
        with pytest.warns(UserWarning, match=r"refuses a kernel with \.version .*CUDA_ERROR_218(.|\n)*It stays dense"):
            run = compile_and_run(model, x, strict=False, regions=0)
    finally:
        gpu.driver.failures.clear()
    assert [d.reason for d in run.decisions] == ["it failed to compile"]
    assert_same(run.output, model(x))


def test_kernels_are_found_on_disk(gpu: EmulatedDevice, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    for directory in ((gpu_kernels, "_by_contract"), (gpu_kernels, "_by_key"), (compiled_kernel, "_kernels")):
        monkeypatch.setattr(*directory, {})
    model, x = Layer(pruned(24, 40)), torch.randn(20, 40)
    compile_and_run(model, x)
    for directory in ((gpu_kernels, "_by_contract"), (gpu_kernels, "_by_key"), (compiled_kernel, "_kernels")):
        monkeypatch.setattr(*directory, {})
    monkeypatch.setattr("gossamer.passes.pipelines.plan", lambda *_: pytest.fail("compiled again"))
    torch._dynamo.reset()
    run = compile_and_run(model, x)
    assert len(run.regions) == 1 and gpu.schedules == ["gpu-kblock"] * 2
    assert_same(run.output, model(x))


# CUDA graphs


def test_regions_are_captured_as_they_are_and_dense_in_training(gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model, x = Layer(pruned(40, 48)), torch.randn(20, 48)
    for grad, launches in ((False, 1), (True, 0)):
        torch._dynamo.reset()
        region_op._regions.clear()
        key = key_of(compile_and_run(model, x, grad=grad))
        gpu.schedules.clear()
        result = region_op.on_cuda([x, model.weight.detach(), model.bias.detach()], key)
        assert len(gpu.schedules) == launches
        assert_same(torch.relu(result), model(x).detach())


def test_nothing_waits_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:

    model, x = Layer(pruned(40, 48)), torch.randn(20, 48)
    run = compile_and_run(model, x)
    monkeypatch.setattr(packed_weights, "_capturing", lambda leaves: True)
    monkeypatch.setattr(packed_weights, "pack", lambda *_: pytest.fail("packed"))
    with torch.no_grad():
        model.weight.copy_(pruned(40, 48))
        assert_same(run.function(x), model(x))


def test_inductor_keeps_regions_out_of_its_graphs() -> None:
    assert torch.Tag.cudagraph_unsafe in region_op.region.tags


# What the dispatcher does with CUDA tensors


def test_the_op_has_an_implementation_for_cuda_and_its_fake_results_are_there() -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key("gossamer::region", "CUDA")
    key = key_of(compile_and_run(Layer(pruned(40, 48)), torch.randn(20, 48)))
    with FakeTensorMode():
        result = region_op.region([torch.empty(7, 48, device="cuda:1")], key)
    assert result.shape == (7, 40) and result.device == torch.device("cuda:1")


def test_a_number_on_the_cpu_is_not_read_by_a_gpu_s_kernel() -> None:
    from torch import fx

    from gossamer.backend.regions.grow_region import _readable

    graph = fx.Graph()
    with FakeTensorMode():
        value = torch.empty(7, 48, device="cuda")
        for device, readable in (("cuda", True), ("cpu", False)):
            node = graph.placeholder("scale")
            node.meta["val"] = torch.empty((), device=device)
            assert _readable(node, value, axis=1) is readable


def test_the_reason_says_if_there_is_no_driver_or_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.backend.devices import cuda_device, device
    from gossamer.backend.regions import decide

    monkeypatch.setattr(device, "_KINDS", {"cuda": cuda_device.gpu})
    monkeypatch.setattr(cuda, "_devices", {})
    monkeypatch.setattr(cuda, "_LIBRARY", "libno-such-driver.so.1")
    cuda.driver.cache_clear()
    with FakeTensorMode():
        weight = torch.empty(32, 32, device="cuda")
    assert (decide._refusal(weight, weight) or "").startswith("there is no NVIDIA driver on this machine")
    assert decide._refusal(weight.to("meta"), weight) == "there are no sparse kernels for meta, only for cuda"


def test_the_option_knows_every_schedule_of_every_device() -> None:
    assert set(SCHEDULES) == {"auto", *CPU.schedules, *Gpu.schedules}


# Predictions, for the H100 that the driver tells of


@pytest.mark.parametrize(
    ("element", "density", "tokens", "pays"),
    [("f32", 0.1, 4096, True), ("bf16", 0.1, 4096, False), ("bf16", 0.2, 1, True), ("f32", 0.5, 4096, False)],
)
def test_where_sparse_pays(element: str, density: float, tokens: int, pays: bool, gpu: EmulatedDevice) -> None:
    from gossamer.backend.devices.device import device_of

    predicted = device_of(torch.device("cpu")).predict(Matrix(4096, 4096, 1, element, 1024, density), tokens)
    assert (predicted.gain > 1.1) is pays


def test_dense_is_predicted_as_fast_as_cublas_is() -> None:
    """An H100 was seen to reach 600 to 800 TFLOP/s in bf16, about 50 in f32, and most of its 3.35 TB/s."""
    from gossamer.backend.devices.device import device_of

    device = device_of(torch.device("cpu"))
    dense_us = lambda element, tokens: device.predict(Matrix(8192, 8192, 1, element, 1024), tokens).dense_us
    assert 600e6 < 2 * 8192**3 / dense_us("bf16", 8192) < 800e6
    assert 40e6 < 2 * 8192**3 / dense_us("f32", 8192) < 60e6
    assert 2.2e6 < 2 * 8192**2 / dense_us("bf16", 1) < 3.35e6
