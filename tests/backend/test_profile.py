"""gossamer.profile: the time of a call by what it is spent on, with names, and without a trace in the model."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

import gossamer
from gossamer.backend.profiling.clock import Call, Round
from gossamer.backend.profiling.measured import of_rounds
from gossamer.backend.profiling.moved import Moved
from gossamer.backend.profiling.trace import module_path
from gossamer.runtime.direct_call import direct
from gossamer.runtime.watching.names import name_of, name_tensors
from tests.backend.harness import prune_

EAGER = {"dense": "eager", "min_gain": 0, "strict": True}


class Block(nn.Module):
    """Two sparse layers, and what is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = prune_(nn.Linear(64, 96)), prune_(nn.Linear(96, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(self.down(nn.functional.gelu(self.up(x))), 0)


@pytest.fixture
def model() -> nn.Module:
    return Block().eval().requires_grad_(False)


def test_regions_have_the_names_of_modules_and_kinds(model: nn.Module) -> None:
    found = gossamer.profile(model, torch.randn(5, 64), options=EAGER, calls=2)
    assert [part.label for part in found.parts] == ["up to down + gelu, chain of 2"]
    (part,) = found.parts
    assert part.operation == "region" and not part.backward and not part.dense and found.whole
    assert 0 < part.kernel_us < part.us and part.call_us > 0 and part.packing_us == 0
    assert part.activations == 2 * 5 * 64 * 4 + (96 + 64) * 4  # x, the result, and both biases
    assert 0 < part.weights < 2 * 64 * 96 * 4
    assert found.us > 0 and found.backward_us == 0 and found.calls == 2


def test_code_of_inductor_is_watched_as_well(model: nn.Module) -> None:
    found = gossamer.profile(model, torch.randn(5, 64), options={**EAGER, "dense": "inductor"}, calls=2)
    assert [part.label for part in found.parts] == ["up to down + gelu, chain of 2"]
    assert found.parts[0].kernel_us > 0


def test_the_backward_pass_is_part_of_it() -> None:
    model = Block()
    found = gossamer.profile(model, torch.randn(5, 64), options=EAGER, calls=2, backward=True)
    assert [part.label for part in found.parts if not part.backward] == ["up", "down"]
    assert "down, backward" in [part.label for part in found.parts if part.backward]
    assert found.backward_us > 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_equal_layers_share_a_row() -> None:
    model = nn.Sequential(*[layer for _ in range(3) for layer in (prune_(nn.Linear(32, 32)), nn.Softmax(-1))])
    found = gossamer.profile(model.eval().requires_grad_(False), torch.randn(4, 32), options=EAGER, calls=1)
    assert [part.label for part in found.parts] == ["0", "2", "4"]
    assert "{0,2,4} (x3)" in str(found)
    assert max(map(len, str(found).splitlines())) <= 100


def test_the_profile_is_data(model: nn.Module) -> None:
    data = json.loads(json.dumps(gossamer.profile(model, torch.randn(5, 64), options=EAGER, calls=1).data()))
    assert data["parts"][0]["label"] == "up to down + gelu, chain of 2" and data["parts"][0]["call_us"] >= 0
    assert data["machine"]["threads"] == torch.get_num_threads()


def test_arrows_lead_from_modules_to_kernel_calls(model: nn.Module, tmp_path: Path) -> None:
    outer = nn.ModuleDict({"block": model})
    found = gossamer.profile(lambda x: outer["block"](x), torch.randn(5, 64), options=EAGER, calls=1)
    label = "outer.block: up to down + gelu, chain of 2"
    assert [part.label for part in found.parts] == [label]
    found.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (kernel,) = (each for each in events if each["name"] == label)
    modules = [each for each in events if each.get("pid") == "modules" and each["ph"] == "X"]
    assert [each["name"] for each in modules] == ["outer", "block"]
    assert all((each["ts"], each["dur"]) == (kernel["ts"], pytest.approx(kernel["dur"], abs=1)) for each in modules)
    begin, end = (next(each for each in events if each["ph"] == phase and each.get("cat") == "modules") for phase in "sf")
    assert begin["id"] == end["id"] and (end["pid"], end["tid"]) == (kernel["pid"], kernel["tid"])


def test_a_profiler_of_torch_shows_the_names(model: nn.Module) -> None:
    compiled, x = torch.compile(model, backend="sparse", options=EAGER), torch.randn(5, 64)
    compiled(x)
    with torch_profile(activities=[ProfilerActivity.CPU]) as trace:
        compiled(x)
    names = [event.key for event in trace.key_averages()]
    assert "gossamer::region" in names and "up to down + gelu, chain of 2" in names


def test_the_model_and_its_calls_stay_as_they_are(model: nn.Module) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.norm = model, nn.BatchNorm1d(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.block(x)) * x.add_(1)[:, :1]

    counting, x = Counting().train(), torch.randn(5, 64)
    before, given = {name: value.clone() for name, value in counting.state_dict().items()}, x.clone()
    random = torch.get_rng_state()
    gossamer.profile(counting, x, options=EAGER, calls=2)
    assert all(torch.equal(value, before[name]) for name, value in counting.state_dict().items())
    assert torch.equal(x, given) and torch.equal(torch.get_rng_state(), random)
    call = direct("region")
    cells = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True))
    assert cells["kernel"].cell_contents.__name__ == "on_cpu"  # no clock is left behind


def test_weights_that_change_are_packed_in_the_time_that_is_shown() -> None:
    layer = prune_(nn.Linear(64, 48)).requires_grad_(False)

    def step(x: torch.Tensor) -> torch.Tensor:
        layer.weight.mul_(1.01)
        return layer(x)

    before = layer.weight.clone()
    found = gossamer.profile(step, torch.randn(5, 64), options={**EAGER, "verify": "full"}, calls=2)
    assert torch.equal(layer.weight, before)
    assert len(found.parts) <= 1
    changed = [part for part in found.parts if not part.dense]
    assert all(part.packing_us > 0 for part in changed)


def test_graph_breaks_and_sparse_tensors(model: nn.Module) -> None:
    matrix = gossamer.SparseTensor.from_dense(torch.eye(5))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        return matrix @ y

    found = gossamer.profile(function, torch.randn(5, 64), options=EAGER, calls=1)
    assert [part.operation for part in found.parts] == ["region", "einsum"]
    assert found.outside_us > 0


def test_what_cannot_be_profiled_is_refused(model: nn.Module) -> None:
    x = torch.randn(5, 64)
    with pytest.raises(gossamer.OptionError, match="calls is 0"):
        gossamer.profile(model, x, calls=0)
    with pytest.raises(gossamer.OptionError, match="min_gian"):
        gossamer.profile(model, x, options={"min_gian": 1})
    with pytest.raises(gossamer.GossamerError, match="no parameter and no input requires gradients"):
        gossamer.profile(model, x, backward=True)
    with torch.no_grad(), pytest.raises(gossamer.GossamerError, match="no result of the call has gradients"):
        gossamer.profile(Block(), x, options=EAGER, backward=True)


def test_parts_and_what_remains_make_up_a_call() -> None:
    def call(start: int, taken: int) -> Call:
        return Call("region", start, start + taken, kernel=taken - 200)

    rounds = [Round(0, 10_000, 15_000, 9_000, [call(1_000, 2_000 + n), call(12_000, 1_000)]) for n in (0, 500)]
    named = [Moved("fc", 10, 20, least_us=0.5), Moved("fc, backward", 10, 20)]
    found = of_rounds(10.0, 5.0, rounds, named, ["region", "region"], 3.0, [])
    assert [part.backward for part in found.parts] == [False, True]
    assert found.parts[0].us == pytest.approx(2.25) and found.parts[0].call_us == pytest.approx(0.2)
    assert found.parts[0].roofline == pytest.approx(0.5 / 2.05)
    assert found.outside_us == 1.0 and found.guards_us == 1.0  # which are a part of it
    assert found.dense_us == pytest.approx(10 - 1 - 2.25) and found.dense_backward_us == pytest.approx(4)
    assert found.whole
    rounds[0].calls.pop()
    assert not of_rounds(10.0, 5.0, rounds, named, ["region", "region"], 3.0, []).whole


@pytest.mark.parametrize(
    ("label", "path"),
    [
        ("encoder.layer.0: query to output.dense + gelu, chain of 6", ["encoder", "layer", "0"]),
        ("fc, backward", ["fc"]),
        ("routed_mlp of experts.gate_up, experts.down", ["experts", "gate_up"]),
        ("einsum", []),
        ("region of 3x4 and 4x5, chain of 2", []),
    ],
)
def test_a_label_says_its_module(label: str, path: list[str]) -> None:
    assert module_path(label) == path


def test_names_are_those_of_memory_and_go_with_it() -> None:
    tensor = torch.ones(3, 4)
    name_tensors([(tensor, "a.weight")])
    assert name_of(tensor.view(-1)) == "a.weight" and name_of(tensor[1:]) is None and name_of(tensor.clone()) is None
    address = tensor.data_ptr()
    del tensor
    again = torch.ones(3, 4)
    assert again.data_ptr() != address or name_of(again) is None
