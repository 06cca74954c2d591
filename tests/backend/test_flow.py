"""The flow of a graph: its sparse calls, what lies between them, and what leads to what, in inference and in training."""

from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer.backend.page import saved
from tests.backend.harness import prune_

EAGER = {"dense": "eager", "min_gain": 0}


class Residual(nn.Module):
    """Two sparse layers with a function between them that no kernel computes, and a way around both."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(self.down(torch.cumsum(self.up(x), 0)), 0) + x


def flow_of(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> list[dict[str, Any]]:
    (flow,) = gossamer.explain(model, *inputs, options=EAGER | options).data()["flows"]
    return flow


def assert_runs_in_order(flow: list[dict[str, Any]]) -> None:
    """No part needs a result of a later one, and all but the first have something before them."""
    assert [part["kind"] for part in (flow[0], flow[-1])] == ["input", "output"]
    for at, part in enumerate(flow[1:], 1):
        assert part["from"] and all(source < at for source in part["from"]), part


def test_sparse_calls_and_what_lies_between_them_are_parts() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        flow = flow_of(prune_(Residual()).eval(), torch.randn(8, 32))
    assert_runs_in_order(flow)
    assert [part["kind"] for part in flow] == ["input", "sparse", "dense", "sparse", "dense", "output"]
    assert [part["weights"] for part in flow] == [[], ["up.weight", "up.bias"], [], ["down.weight", "down.bias"], [], []]
    assert [part["from"] for part in flow] == [[], [0], [1], [2], [0, 3], [4]]
    assert flow[2]["about"] == "cumsum"
    assert not any(part["backward"] for part in flow)


def test_the_backward_pass_has_parts_of_its_own() -> None:
    torch.manual_seed(0)
    flow = flow_of(prune_(Residual()).train(), torch.randn(8, 32))
    assert_runs_in_order(flow)
    assert {part["kind"] for part in flow if part["backward"]} == {"sparse", "dense"}
    assert sum(part["kind"] == "sparse" and not part["backward"] for part in flow) == 2


def test_a_dense_model_is_one_part_of_the_module_that_computes_it() -> None:
    with torch.no_grad():
        flow = flow_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4), min_gain=1.1)
    assert [part["kind"] for part in flow] == ["input", "dense", "output"]
    assert "relu" in flow[1]["about"]


@pytest.mark.parametrize("unused", [False, True])
def test_a_graph_that_returns_an_input_or_a_constant_has_a_flow(unused: bool) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (torch.ones(3), x + 1) if unused else (x, x + 1)

    (flow,) = gossamer.explain(function, torch.randn(4), options=EAGER).data()["flows"]
    assert [flow[0]["kind"], flow[-1]["kind"]] == ["input", "output"] and "arithmetic" in [part["about"] for part in flow[1:-1]]


def test_a_dump_keeps_the_flows_of_all_graphs(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = prune_(Residual()).eval()
    compiled = torch.compile(model, backend="sparse", dynamic=False, options=EAGER | {"dump_ir": str(tmp_path)})
    with torch.no_grad():
        for rows in (8, 16):
            compiled(torch.randn(rows, 32))
    report = saved.read(tmp_path)
    assert report is not None and len(report["flows"]) == 2
    for flow in report["flows"]:
        assert_runs_in_order(flow)
