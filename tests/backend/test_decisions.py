"""What stays dense says why, under the name the user knows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.backend.graph.names import user_name
from gossamer.backend.report.report import Decision
from gossamer.passes.schedules.machine_speed import Machine
from gossamer.runtime.target import host
from tests.backend.harness import assert_same, compile_and_run, prune_, pruned


def only(decisions: list[Decision]) -> Decision:
    assert len(decisions) == 1, decisions
    return decisions[0]


def test_a_sparse_decision_says_everything() -> None:
    model, x = prune_(nn.Sequential(nn.Linear(512, 256), nn.ReLU()), 0.1).eval(), torch.randn(64, 512)
    decision = only(compile_and_run(model, x, min_gain=1.1).decisions)
    assert decision.sparse and decision.name == "0.weight" and decision.op == "linear"
    assert decision.shape == (256, 512) and 0.08 < decision.density < 0.12
    assert decision.format and decision.schedule and decision.gain and decision.gain > 1.1
    assert decision.reason == "2 ops fused"


def test_too_dense() -> None:
    model, x = prune_(nn.Linear(512, 512), 0.9).eval(), torch.randn(512, 512)
    run = compile_and_run(model, x, min_gain=1.1, regions=0)
    decision = only(run.decisions)
    assert not decision.sparse and decision.reason == "too dense for a gain of 1.1x"
    assert decision.gain is not None and decision.gain < 1.1
    assert_same(run.output, model(x).detach())


def test_too_small() -> None:
    model, x = prune_(nn.Linear(16, 16), 0.1).eval(), torch.randn(4, 16)
    decision = only(compile_and_run(model, x, min_gain=1.1, regions=0).decisions)
    assert not decision.sparse and decision.reason == "too small for a gain of 1.1x"


def test_weights_without_zeros_are_not_mentioned() -> None:
    run = compile_and_run(nn.Linear(64, 64).eval(), torch.randn(4, 64), min_gain=1.1, regions=0)
    assert run.decisions == []


def test_min_gain_of_zero_takes_dense_weights_too() -> None:
    run = compile_and_run(nn.Linear(64, 64).eval(), torch.randn(4, 64), min_gain=0)
    assert only(run.decisions).density == 1


def complex_product(w: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: F.linear(x.to(torch.complex64), w.to(torch.complex64)).real


OTHER_USES: dict[str, tuple[Callable[[Tensor], Callable[[Tensor], Tensor]], tuple[int, ...], Tensor, str]] = {
    "embedding": (
        lambda w: lambda x: F.embedding(x, w), (40, 16), torch.arange(5), "no sparse kernel for embedding",
    ),
    "addition": (lambda w: lambda x: x + w, (32, 32), torch.randn(32, 32), "no sparse kernel for add"),
    "complex": (complex_product, (32, 32), torch.randn(4, 32), "no sparse kernel for complex64 on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("use", OTHER_USES)
def test_uses_without_a_sparse_kernel(use: str) -> None:
    make, shape, x, reason = OTHER_USES[use]
    weight = pruned(*shape)
    function = make(weight)
    run = compile_and_run(function, x, regions=0)
    decision = only(run.decisions)
    assert (decision.name, decision.sparse, decision.reason) == ("w", False, reason)
    assert_same(run.output, function(x))


def test_a_weight_that_the_model_clips_is_dense_in_training_and_the_report_says_so() -> None:
    class Clipped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    model, x = prune_(Clipped(64, 64)), torch.randn(4, 64)
    trained = compile_and_run(model, x, grad=True, regions=0)
    assert only(trained.decisions).reason == "trained dense: the model writes to it in the forward pass"
    assert_same(trained.output, model(x))
    assert only(compile_and_run(model, x).decisions).sparse


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_the_mask_of_attention_is_reported_once_as_attention(grad: bool) -> None:
    lower, x = torch.tril(torch.ones(1, 1, 32, 32)), torch.randn(1, 2, 32, 16, requires_grad=grad)

    def function(x: Tensor) -> Tensor:
        scores = (x @ x.transpose(-2, -1)).masked_fill(lower == 0, float("-inf"))
        return scores.softmax(-1) @ x

    run = compile_and_run(function, x, grad=grad, regions=0, min_gain=1.1)
    assert [each.name for each in run.decisions] == ["attention"]
    assert_same(run.output, function(x))


def test_integer_weights_stay_dense() -> None:
    w, x = torch.randint(0, 2, (32, 32)), torch.randint(0, 5, (4, 32))
    run = compile_and_run(lambda x: x @ w, x, regions=0)
    assert only(run.decisions).reason == "no sparse kernel for int64 on cpu"
    assert torch.equal(run.output, x @ w)


def test_what_torch_multiplies_int8_weights_by_is_mentioned_and_what_it_stands_for_is_sparse() -> None:
    w, x, scales = torch.randint(-9, 9, (64, 128), dtype=torch.int8), torch.randn(4, 128), torch.rand(64)
    w[torch.rand(w.shape) < 0.9] = 0
    packed = compile_and_run(lambda x: torch._weight_int8pack_mm(x, w, scales), x, regions=0)
    written = compile_and_run(lambda x: F.linear(x, w.to(x.dtype)) * scales, x, min_gain=0)
    assert only(packed.decisions).reason.startswith("no sparse kernel for _weight_int8pack_mm: F.linear(x,")
    assert only(written.decisions).sparse
    torch.testing.assert_close(written.output, packed.output, rtol=1e-4, atol=1e-4)


def test_int8_tensors_of_other_uses_are_not_mentioned() -> None:
    mask = torch.zeros(32, 32, dtype=torch.int8)
    assert compile_and_run(lambda x: x * (mask == 0), torch.randn(32, 32), regions=0).decisions == []


def test_arguments_are_not_weights() -> None:
    w, x = pruned(32, 32), torch.randn(4, 32)
    for function, arguments in (
        (lambda x, w: x @ w, (x, w)),
        (lambda x, d: x @ d["w"][0], (x, {"w": [w]})),
    ):
        torch._dynamo.reset()
        run = compile_and_run(function, *arguments, regions=0)
        assert run.decisions == []


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = pruned(32, 32)
        self.listed = [pruned(32, 32)]
        self.register_buffer("buffer", pruned(32, 32))
        self.parameters_ = nn.ParameterList([nn.Parameter(pruned(32, 32))])
        self.block = nn.ModuleDict({"fc": nn.Linear(32, 32, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.block["fc"](x @ self.plain @ self.listed[0])
        return x @ self.buffer @ self.parameters_[0]


WORLD = pruned(32, 32)


def test_names() -> None:
    captured, holder, x = pruned(32, 32), prune_(Holder()), torch.randn(4, 32)
    run = compile_and_run(lambda x: holder(x) @ WORLD @ captured, x)
    assert {d.name for d in run.regions} == {
        "holder.plain", "holder.listed.0", "holder.block.fc.weight", "holder.buffer", "holder.parameters_.0",
        "WORLD", "captured",
    }  # fmt: skip
    torch._dynamo.reset()
    run = compile_and_run(holder, x)
    assert {d.name for d in run.regions} == {"plain", "listed.0", "block.fc.weight", "buffer", "parameters_.0"}


@pytest.mark.parametrize(
    "source, name",
    [
        ("L['self']._modules['encoder']._modules['0']._parameters['weight']", "encoder.0.weight"),
        ("L['fn']._parameters['weight']", "weight"),
        ("G['net']._modules['0']._parameters['weight']", "net.0.weight"),
        ("L['W']", "W"),
        ("L['w_orig']", "w_orig"),
        ("L['self'].d['key'][0]", "d.key.0"),
        ("L['model']._modules['0']._parameters['weight']", "model.0.weight"),
        ("L['self']._modules['fc']._modules['parametrizations']._modules['weight']._parameters['original']", "fc.weight"),
        ("L['self']._modules['fc']._parameters['weight_orig']", "fc.weight"),
    ],
)
def test_user_names(source: str, name: str) -> None:
    assert user_name(source) == name


def test_unreadable_inputs_leave_the_graph_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.backend.graph.inputs import Inputs

    model, x = prune_(nn.Linear(64, 48)).eval(), torch.randn(4, 64)
    original = Inputs.of
    monkeypatch.setattr(Inputs, "of", lambda gm, ex: original(gm, [torch.ones(3)] * len(ex)))
    monkeypatch.setattr("gossamer.backend.graph.inputs._is_static", lambda *_: True)
    with pytest.warns(UserWarning, match="leaves a graph dense: input .* is not the"):
        run = compile_and_run(model, x, regions=0)
    assert_same(run.output, model(x).detach())


def test_a_region_that_fails_to_compile_stays_dense(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from gossamer import CompileError

    def fail(*_: Any, **__: Any) -> None:
        raise CompileError("pass 'schedule' failed: no luck")

    monkeypatch.setattr("gossamer.backend.devices.cpu.compile_region", fail)
    model, x = prune_(nn.Linear(70, 50)).eval(), torch.randn(4, 70)
    with pytest.warns(UserWarning, match=r"region weight: pass 'schedule' failed: no luck; .* are in ") as warned:
        run = compile_and_run(model, x, strict=False, regions=0, dump_ir=str(tmp_path))
    assert len(warned) == 1 and only(run.decisions).reason == "it failed to compile"
    assert_same(run.output, model(x).detach())
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"region weight: .* no luck"):
        compile_and_run(model, x, strict=True)


def test_small_layers_share_the_call_of_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of a kernel takes longer than each of these products. All products together take longer than one call."""
    usual = Machine.usual(host().vector_bits)
    monkeypatch.setattr("gossamer.backend.devices.cpu.this_machine", lambda: replace(usual, call_us=100.0))
    model = nn.Sequential(*(prune_(nn.Linear(128, 128), 0.02) for _ in range(32))).eval()
    x = torch.randn(128, 128)
    alone = compile_and_run(model[0], x, min_gain=1.1, regions=0)
    assert only(alone.decisions).reason == "too small for a gain of 1.1x"
    run = compile_and_run(model, x, min_gain=1.1, regions=32)
    assert all(d.reason.startswith("in a chain of 32; gain of the whole kernel, predicted") for d in run.regions)
    assert_same(run.output, model(x).detach())
