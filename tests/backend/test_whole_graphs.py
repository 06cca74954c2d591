"""Graphs whose convolutions together are predicted to gain little are compiled with and without them, and both are timed."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import gossamer
from gossamer.backend.convolution import cost
from gossamer.backend.measuring import measure
from tests.backend.doubts import directory

__all__ = ["directory"]

IMAGES = torch.randn(2, 32, 12, 12)


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the predicted gain of every convolution."""

    def set_gain(gain: float) -> None:
        for place in ("cost", "planar"):
            monkeypatch.setattr(f"gossamer.backend.convolution.{place}.ours_us", lambda *_: 10.0)
            monkeypatch.setattr(f"gossamer.backend.convolution.{place}.dense_us", lambda *_: gain * 10.0)
        monkeypatch.setattr(cost, "torch_us", lambda *_, **__: gain * 10.0)

    monkeypatch.setattr("gossamer.backend.convolution.planar.measured_us", lambda *_, **__: None)
    monkeypatch.setattr("gossamer.backend.convolution.convolutions.timed", lambda judged, *_: judged)
    return set_gain


class Timer:
    """Stands for measurements of whole graphs: checks that both versions agree, and says how long each takes."""

    def __init__(self, sparse: float) -> None:
        self.sparse, self.asked = sparse, 0

    def __call__(self, calls: Mapping[str, Callable[[], list[torch.Tensor]]], *_: int) -> dict[str, float]:
        self.asked += 1
        (sparse,), (dense,) = calls["sparse"](), calls["dense"]()
        torch.testing.assert_close(sparse, dense)
        return {"sparse": self.sparse, "dense": 100.0}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(32, 48, 3, padding=1), nn.SiLU(), nn.Conv2d(48, 16, 1))
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", 0.8)
        prune.remove(layer, "weight")
    return model.eval()


def compiled_regions(model: nn.Module, x: torch.Tensor = IMAGES) -> int:
    """Compiles and runs the model, compares it with eager, and returns the number of its sparse convolutions."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="sparse", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["gossamer"]["graphs"] == 1  # the version that lost is not counted
    return torch._dynamo.utils.counters["gossamer"]["regions"]


@pytest.mark.parametrize(("us", "sparse"), [(90.0, 2), (110.0, 0)])
def test_the_faster_version_is_taken(
    us: float, sparse: int, predicted: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted(1.2)
    monkeypatch.setattr(measure, "fastest", timer := Timer(us))
    model = network()
    assert compiled_regions(model) == sparse
    assert timer.asked == 1
    timer.sparse = 200.0 - us
    assert compiled_regions(model) == sparse
    with torch.no_grad():
        report = gossamer.explain(model, IMAGES)
    assert sum(each.sparse for each in report.decisions) == sparse
    assert bool(sparse) or all("its graph was timed" in each.reason for each in report.decisions)
    assert timer.asked == 1  # the gain is kept, and explain tells what the user gets


def test_similar_sizes_are_timed_once(predicted: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    predicted(1.2)
    monkeypatch.setattr(measure, "fastest", timer := Timer(90.0))
    model = network()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="sparse", fullgraph=True)
    with torch.no_grad():
        for images in (torch.randn(2, 32, 12, 12), torch.randn(2, 32, 12, 11), torch.randn(1, 32, 16, 14)):
            torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-4)
        assert timer.asked == 1
        compiled(IMAGES[:0])
        assert timer.asked == 1
        images = torch.randn(2, 32, 40, 41)
        torch._dynamo.mark_dynamic(images, 2)
        torch.compiler.reset()
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-4)
        assert timer.asked == 2
        assert compiled_regions(model, IMAGES.to(memory_format=torch.channels_last)) == 2
    assert timer.asked == 3


@pytest.mark.parametrize(("gain", "sparse"), [(5.0, 2), (0.2, 0)])
def test_clear_predictions_decide(
    gain: float, sparse: int, predicted: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted(gain)
    monkeypatch.setattr(measure, "fastest", timer := Timer(100.0))
    assert compiled_regions(network()) == sparse
    assert not timer.asked


def test_graphs_that_must_not_run_twice_are_not_timed(
    predicted: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted(1.2)
    monkeypatch.setattr(measure, "fastest", timer := Timer(100.0))
    model = network()
    compiled = torch.compile(nn.Sequential(model, nn.BatchNorm2d(16)), backend="sparse", fullgraph=True)
    with torch.no_grad():
        compiled(IMAGES)  # it writes statistics
    compiled = torch.compile(model.train(), backend="sparse", fullgraph=True)
    compiled(IMAGES).sum().backward()
    assert not timer.asked
