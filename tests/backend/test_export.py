"""gossamer.export: programs with packed weights, and packages of AOTInductor that load without Gossamer."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.export import Dim

import gossamer
from gossamer.backend.deploy import archive
from tests.backend.harness import prune_

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
OPTIONS = {"min_gain": 0, "strict": True}
BATCH = ({0: Dim("batch", min=1, max=4096)},)


class Classifier(nn.Module):
    """Two sparse layers in a dense model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.layers = prune_(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 48)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.layers(self.table(tokens)).mean(1), -1)


def classifier() -> tuple[Classifier, torch.Tensor]:
    torch.manual_seed(0)
    return Classifier().eval(), torch.randint(50, (3, 7))


def calls(program: torch.export.ExportedProgram) -> int:
    """The number of regions in a program."""
    return len(program.graph_module.graph.find_nodes(op="call_function", target=torch.ops.gossamer.exported.default))


def test_a_program_has_packed_weights_in_place_of_dense_ones() -> None:
    model, tokens = classifier()
    program = gossamer.export(model, (tokens,), dynamic_shapes=BATCH, options=OPTIONS)
    assert calls(program) == 1
    assert set(program.state_dict) == {"table.weight", "layers.0.bias", "layers.2.bias"}
    called = program.module()
    for batch in (1, 3, 40):
        given = torch.randint(50, (batch, 7))
        torch.testing.assert_close(called(given), model(given), rtol=1e-4, atol=1e-5)


class Streaming(nn.Module):
    """Only writes to its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = prune_(nn.Linear(64, 48))
        self.register_buffer("fresh", torch.ones(1))
        self.register_buffer("last", torch.ones(8, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.fresh.zero_()
        self.last.copy_(y)
        return y * 2


@torch.no_grad()
def test_a_program_keeps_buffers_that_it_only_writes_to() -> None:
    torch.manual_seed(0)
    model, x = Streaming().eval(), torch.randn(8, 64)
    program = gossamer.export(model, (x,), options=OPTIONS)
    assert calls(program) == 1
    called, expected = program.module(), model.linear(x)
    torch.testing.assert_close(called(x), expected * 2, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(called.get_buffer("last"), expected, rtol=1e-4, atol=1e-5)
    assert called.get_buffer("fresh").item() == 0


def test_a_program_keeps_the_weights_that_it_was_exported_with() -> None:
    model, tokens = classifier()
    before = model(tokens)
    program = gossamer.export(model, (tokens,), options=OPTIONS)
    with torch.no_grad():
        model.layers[0].weight.mul_(2)
    torch.testing.assert_close(program.module()(tokens), before, rtol=1e-4, atol=1e-5)


def test_a_copy_of_a_program_runs_when_the_program_is_gone() -> None:
    model, tokens = classifier()
    module = copy.deepcopy(gossamer.export(model, (tokens,), options=OPTIONS)).module()
    gc.collect()
    torch.testing.assert_close(module(tokens), model(tokens), rtol=1e-4, atol=1e-5)


def test_keyword_arguments_and_several_results_are_exported() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = prune_(nn.Linear(64, 48))

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.layer(x) * scale
            return {"y": y, "sum": y.sum(-1)}

    torch.manual_seed(0)
    model, x, scale = Two().eval(), torch.randn(4, 64), torch.randn(48)
    program = gossamer.export(model, (x,), {"scale": scale}, options=OPTIONS)
    assert calls(program) == 1
    torch.testing.assert_close(program.module()(x, scale=scale), model(x, scale=scale), rtol=1e-4, atol=1e-5)


def test_a_model_without_zeros_is_refused() -> None:
    with pytest.raises(gossamer.CompileError, match=r"no layer of the model is sparse.*torch\.export\.export"):
        gossamer.export(nn.Linear(64, 64).eval(), (torch.randn(4, 64),))


def test_a_region_of_a_program_that_is_gone_is_told_so() -> None:
    with pytest.raises(gossamer.CompileError, match="belongs to a program that is gone"):
        torch.ops.gossamer.exported([torch.randn(2, 2)], "0123")


def test_a_package_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(archive, "get_cpp_compiler", missing)
    model, tokens = classifier()
    program = gossamer.export(model, (tokens,), options=OPTIONS)
    with pytest.raises(gossamer.CompileError, match="linked by a C\\+\\+ compiler, and there is none"):
        torch._inductor.aoti_compile_and_package(program)
