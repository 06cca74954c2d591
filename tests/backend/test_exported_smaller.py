"""Exported programs without the rows, columns and filters of zeros, and with factors of structured weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import gossamer
from gossamer.backend.report.report import Decision, collect
from gossamer.runtime import torch_internals, torch_names
from tests.backend.harness import prune_
from tests.backend.packages import check_in_a_fresh_process
from tests.backend.smaller import Pair, empty_, small_layers_pay

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
__all__ = ["small_layers_pay"]  # a fixture
OPTIONS = {"strict": True}
BATCH = {0: Dim("batch", min=0, max=999)}


def exported(model: nn.Module, *inputs: Any, **named: Any) -> tuple[torch.export.ExportedProgram, list[Decision]]:
    """The program, and the decisions about its layers."""
    with collect() as found:
        program = gossamer.export(model, inputs, options=OPTIONS, **named)
    return program, list(found.decisions)


def schedules(decisions: list[Decision]) -> dict[str, str | None]:
    return {each.name: each.schedule for each in decisions}


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_rows_of_zeros_are_not_in_a_program() -> None:
    torch.manual_seed(0)
    model = Pair().eval()
    empty_(model.first.weight)
    program, decisions = exported(model, torch.randn(4, 16), dynamic_shapes=(BATCH,))
    assert schedules(decisions) == {"first.weight": "smaller", "second.weight": "smaller"}
    assert sorted(tuple(value.shape) for value in program.state_dict.values()) == [(16,), (16, 16), (24,), (24, 16)]
    for rows in (0, 1, 3, 70):
        x = torch.randn(rows, 16)
        close(program.module()(x), model(x))


def test_filters_before_a_batch_norm_are_not_in_a_program() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
    model[1].running_mean.normal_()
    empty_(model[0].weight)
    program, decisions = exported(model, torch.randn(2, 3, 9, 9))
    assert schedules(decisions)["3.weight"] == "smaller"
    assert max(value.numel() for value in program.state_dict.values()) == 8 * 8 * 9
    x = torch.randn(2, 3, 9, 9)
    close(program.module()(x), model(x))


class Structured(nn.Module):
    """A product with a Kronecker product, of which it has the factors."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(16, 24)), nn.Parameter(torch.randn(20, 12))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.kron(self.a, self.b))


def test_a_structured_matrix_is_its_factors() -> None:
    torch.manual_seed(0)
    model, x = Structured().eval(), torch.randn(200, 288)
    program, decisions = exported(model, x)
    assert [each.reason for each in decisions] == ["x times kron of 24x16 and 12x20"]
    assert {*program.state_dict} == {"a", "b"}
    close(program.module()(x), model(x))


def test_a_weight_that_is_a_product_is_its_factors() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(288, 320)).eval(), torch.randn(200, 288)
    with torch.no_grad():
        model[0].weight.copy_(torch.kron(torch.randn(16, 24), torch.randn(20, 12)))
    program, decisions = exported(model, x)
    assert "its weight is kron of 16x24 and 20x12" in {each.reason for each in decisions}
    assert max(value.numel() for value in program.state_dict.values()) <= 16 * 24
    close(program.module()(x), model(x))


class Several(nn.Module):
    """Inputs of several kinds around one smaller layer, and a dictionary of results."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, unread: Tensor, times: int, both: list[Tensor], *, scale: Tensor) -> dict[str, Any]:
        self.calls.add_(1)
        x, y = both
        return {"first": self.pair(x + y) * times, "second": (scale, self.calls.clone())}


def test_inputs_and_results_stay_as_they_were() -> None:
    torch.manual_seed(0)
    model = Several().eval()
    empty_(model.pair.first.weight)
    x, scale = torch.randn(4, 16), torch.randn(3)
    given = torch.zeros(1), 2, [x, x]
    with collect() as found:
        program = gossamer.export(model, given, {"scale": scale}, options=OPTIONS)
    assert schedules(found.decisions)["pair.first.weight"] == "smaller"
    expected = model.pair(x + x) * 2
    called = program.module()
    for count in (1, 2):
        results = called(*given, scale=scale)
        close(results["first"], expected)
        assert results["second"][1] == count and torch.equal(results["second"][0], scale)


def test_a_model_that_dynamo_cannot_trace_has_all_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no graph")

    torch.manual_seed(0)
    model, x = Pair().eval(), torch.randn(4, 16)
    prune_(model)
    empty_(model.first.weight)
    monkeypatch.setattr("gossamer.backend.deploy.smaller_module.export_to_torch_ir", refuse)
    with collect() as found:
        program = gossamer.export(model, (x,), options={"strict": True, "min_gain": 0})
    assert "smaller" not in schedules(found.decisions).values()
    close(program.module()(x), model(x))


def test_a_package_has_smaller_layers_and_factors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 288), Structured(), nn.ReLU(), nn.Linear(320, 16), Pair()).eval()
    empty_(model[4].first.weight)
    prune_(model[3])
    with collect() as found:
        program = gossamer.export(model, (torch.randn(40, 24),), dynamic_shapes=({0: Dim("batch", max=999)},), options=OPTIONS)
    assert {"smaller", "dense products"} <= {*schedules(found.decisions).values()}
    check_in_a_fresh_process(program, model, [(torch.randn(rows, 24),) for rows in (40, 1, 7)], tmp_path)


def test_torch_has_what_traces_for_dynamo() -> None:
    assert torch_internals.off(torch_names.WITHOUT_ZEROS) is None
