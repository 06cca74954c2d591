"""Whether convolutions are left to torch: by how long they take there, measured once a shape and machine."""

from pathlib import Path

import pytest
import torch
from torch import nn

import gossamer
from gossamer.backend.convolution import cost
from gossamer.backend.measuring import convolution_times

X = torch.randn(2, 32, 14, 14)


@torch.no_grad()
def prune_(model: nn.Module) -> nn.Module:
    """Zeroes nine tenths of each kernel."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter[torch.rand_like(parameter) > 0.1] = 0
    return model


def pointwise() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(32, 48, 1), nn.ReLU(), nn.Conv2d(48, 16, 1)).eval()


class Gated(nn.Module):
    """A pointwise layer, and two gates of two convolutions of single pixels each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(32, 32, 1)
        self.gates = nn.ModuleList(nn.Sequential(nn.Conv2d(32, 8, 1), nn.ReLU(), nn.Conv2d(8, 32, 1)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        for gate in self.gates:
            y = y * gate(y.mean((2, 3), keepdim=True)).sigmoid()
        return y


@pytest.mark.parametrize(("us", "sparse"), [(1e5, 2), (1e-3, 0)])
def test_what_is_measured_decides(us: float, sparse: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "torch_us", lambda *_, **__: us)
    model = prune_(pointwise())
    with torch.no_grad():
        found = gossamer.explain(model, X, options={"disable": ["smaller-layers"]}).decisions
    assert sum(each.sparse for each in found) == sparse


def test_networks_with_gates_must_promise_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Gated().eval()
    prune_(model.layer)

    def decided(times: float) -> list[gossamer.Decision]:
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(cost, "torch_us", lambda *_, **__: times)
            patch.setattr(cost, "ours_us", lambda *_: 1.0)
            patch.setattr("gossamer.backend.convolution.planar.ours_us", lambda *_: 1.0)
            return [each for each in gossamer.explain(model, X).decisions if each.shape == (32, 32)]

    (refused,), (taken,) = decided(1.5), decided(1e4)
    assert not refused.sparse and "of 2x for one with gates (squeeze-and-excite)" in refused.reason
    assert taken.sparse


def test_a_shape_is_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CALIBRATE", "1")
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    how = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    rounds: list[int] = []

    def fastest(calls: dict[str, object], *_: object) -> dict[str, float]:
        rounds.append(1)
        (call,) = calls.values()
        assert call().shape == (1, 48, 14, 14)  # type: ignore[operator]
        return {"torch": 7.0}

    monkeypatch.setattr(convolution_times, "fastest", fastest)
    for _ in range(2):
        convolution_times._timed.cache_clear()  # as another process
        assert convolution_times.torch_us(X.shape, (48, 32, 1, 1), torch.float32, *how) == 14.0
    assert len(rounds) == len({1, torch.get_num_threads()})


def test_nothing_is_measured_where_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CALIBRATE", "0")
    assert convolution_times.torch_us((1, 3, 8, 8), (4, 3, 1, 1), torch.float32) is None
