"""What the backend compiles, `gossamer.explain` explains: compiled and distributed models, attention, graphs, hooks."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import gossamer
from tests.backend.explained import EAGER, Layer, explained
from tests.backend.harness import prune_


def test_fullgraph_and_dynamic_are_those_of_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match="print"):
        gossamer.explain(Layer(broken=True), torch.randn(8, 64), fullgraph=True)
    given = list[Any]()
    monkeypatch.setattr(
        "gossamer.backend.explain.compile_dynamo_graph", lambda gm, inputs, *_: given.extend(inputs) or gm.forward
    )
    for dynamic in (True, False):
        given.clear()
        gossamer.explain(Layer(), torch.randn(8, 64), dynamic=dynamic, both=False)
        assert any(isinstance(each, torch.SymInt) for each in given) is dynamic


def test_compiled_models_are_explained() -> None:
    options, x = EAGER, torch.randn(8, 64)
    in_place = Layer()
    in_place.compile(backend="sparse", options=options)
    by_method = Layer()
    by_method.forward = torch.compile(by_method.forward, backend="sparse", options=options)  # type: ignore[method-assign]
    inside = nn.Sequential(torch.compile(Layer(), backend="sparse", options=options, fullgraph=True))
    for model in (in_place, by_method, inside, torch.compile(inside, backend="sparse", options=options)):
        model(x)
        report = explained(model, x, options=options)
        assert list(report.layers) == ["fc.weight" if model in (in_place, by_method) else "0.fc.weight"]
        model(x)


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_distributed_models_are_explained_bucket_by_bucket() -> None:
    model = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(3))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = prune_(model)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    ddp, x = nn.parallel.DistributedDataParallel(Stack(), bucket_cap_mb=4), torch.randn(8, 1024)
    for subject in (ddp, torch.compile(ddp, backend="sparse", options=EAGER)):
        report = explained(subject, x, sparse=3)
        assert set(report.layers) == {f"layers.{i}.weight" for i in range(3)}
        assert [line for line in report.graph_breaks if "DDPOptimizer" not in line] == []
    ddp(x).sum().backward()  # which torch refuses where a forward pass has been begun and not ended
    ddp(x).sum().backward()


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, block_mask=WINDOW)


WINDOW = create_block_mask(lambda b, h, q, k: (q - k).abs() < 32, None, None, 256, 256, device="cpu")


def test_attention_is_explained_with_its_gradients() -> None:
    given = [torch.randn(1, 2, 256, 16, requires_grad=True) for _ in range(3)]
    report = explained(windowed, *given)
    assert report.training and report.decisions[0].op == "attention" and given[0].grad is None


@pytest.mark.usefixtures("process_group")
def test_attention_in_a_distributed_model_is_explained_with_its_gradients() -> None:
    class Attending(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x).view(1, 1, 256, 64)
            return windowed(y, y, y)

    ddp = nn.parallel.DistributedDataParallel(Attending())
    assert explained(ddp, torch.randn(256, 64), sparse=2).training


def test_a_graph_network_that_samples_edges_is_explained() -> None:
    geometric = pytest.importorskip("torch_geometric.nn")
    model, edges = geometric.SuperGATConv(16, 16, heads=2), torch.randint(0, 50, (2, 200))
    report = gossamer.explain(model, torch.randn(50, 16), edges, options=EAGER)
    assert report.decisions and report.graph_breaks
    copy.deepcopy(model)  # its attention has a gradient, and is kept between calls


def test_hooks_around_a_model_run_as_in_a_call_and_leave_nothing() -> None:
    model, seen = Layer(), []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output))
    explained(model, torch.randn(8, 64))
    assert seen == []
