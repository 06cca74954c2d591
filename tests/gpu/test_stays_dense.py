"""Graphs that use a GPU stay dense until its kernels have run on one, unless the user asks for them."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gossamer
from gossamer import Options
from gossamer.backend.devices import unproven
from gossamer.backend.report.report import collect
from tests.backend.harness import prune_

REASON = 'kernels for GPUs have not run on a GPU yet; options={"gpu": "untested"} takes them'


@pytest.fixture
def cpus_are_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unproven, "_PLACES", ("cpu",))


def model() -> nn.Module:
    layers = nn.Sequential(prune_(nn.Linear(64, 48), 0.1), nn.ReLU(), prune_(nn.Linear(48, 32), 0.1))
    with torch.no_grad():
        layers[0].weight[::2] = 0  # whole rows, for which there is a smaller dense layer
    return layers


def test_one_tensor_on_a_gpu_keeps_the_graph_dense() -> None:
    with FakeTensorMode():
        values = [torch.ones(2), 3, torch.ones(2, device="cuda:1")]
    assert unproven.stays_dense(values, Options()) == REASON
    assert unproven.stays_dense(values, Options(gpu="untested")) is None
    assert unproven.stays_dense(values[:2], Options()) is None


@pytest.mark.usefixtures("cpus_are_unproven")
@pytest.mark.parametrize("training", [False, True])
def test_a_dense_graph_is_right_and_the_report_gives_the_reason(training: bool) -> None:
    network, x = model().train(training), torch.randn(5, 64)
    report = gossamer.explain(network, x)
    assert not any(d.sparse for d in report.decisions)
    assert {d.name: d.reason for d in report.decisions} == {"0.weight": REASON, "2.weight": REASON}
    for _ in range(2):  # the second time from torch's cache
        torch.compiler.reset()
        with collect() as found:
            y = torch.compile(network, backend="sparse", fullgraph=True)(x)
        assert [d.reason for d in found.decisions] == [REASON, REASON]
        torch.testing.assert_close(y, network(x))
        y.sum().backward()
        got = [p.grad.clone() for p in network.parameters() if p.grad is not None]
        network.zero_grad()
        network(x).sum().backward()
        torch.testing.assert_close(got, [p.grad for p in network.parameters()])
        network.zero_grad()


@pytest.mark.usefixtures("cpus_are_unproven")
def test_a_user_who_asks_gets_the_kernels() -> None:
    network, x = model().eval(), torch.randn(5, 64)
    options = {"gpu": "untested", "min_gain": 0, "disable": ["smaller-layers"]}
    with collect() as found, torch.no_grad():
        y = torch.compile(network, backend="sparse", fullgraph=True, options=options)(x)
    assert sum(d.sparse for d in found.decisions) == 2
    torch.testing.assert_close(y, network(x))
