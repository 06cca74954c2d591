"""Mixtures of experts in exported programs are kernels, which need nothing of Gossamer."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe
from torch import Tensor, nn
from torch.export import Dim

import gossamer
from gossamer.backend.report.report import collect
from tests.backend.experts_in_models import COLUMNS, Sorted, exact, grouped
from tests.backend.packages import check_in_a_fresh_process
from tests.backend.test_export import calls
from tests.backend.test_listed_experts import Masked, ungated

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
OPTIONS = {"min_gain": 0, "strict": True, "disable": ["sparse-weights"]}
assert transformers.integrations.moe  # has defined the products that are grouped
TOKENS = ({0: Dim("tokens", min=1, max=999)},)


class Alone(Sorted):
    """A product of each token with its expert, and nothing around it."""

    def forward(self, x: Tensor) -> Tensor:
        _, chosen = self.route(x)
        ids, order = torch.sort(chosen.reshape(-1))
        ends = torch.histc(ids.float(), self.experts, 0, self.experts - 1).cumsum(0, dtype=torch.int32)
        return grouped(x[order // self.top], self.gate_up.transpose(-2, -1), ends)


class Network(nn.Module):
    """Two mixtures and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.second = Sorted(), nn.Linear(COLUMNS, COLUMNS), Sorted(act=F.gelu)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x + F.relu(self.between(self.first(x))))  # type: ignore[no-any-return]


def exported(model: nn.Module, x: Tensor, kernels: int, experts: int = 2) -> torch.export.ExportedProgram:
    """The program, with so many calls of kernels, and so many products of experts."""
    with collect() as found:
        program = gossamer.export(model, (x,), dynamic_shapes=TOKENS, options=OPTIONS)
    assert sum(each.op == "experts" and each.sparse for each in found.decisions) == experts, found.decisions
    assert calls(program) == kernels
    ours = {str(node.target) for node in program.graph.nodes if "gossamer" in str(node.target)}
    assert ours == {"gossamer.exported.default"}
    return program


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_is_kernels(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Sorted().eval().to(dtype)
    program = exported(model, torch.randn(40, COLUMNS, dtype=dtype), 3)
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    for tokens in (1, 7, 300):
        x = torch.randn(tokens, COLUMNS, dtype=dtype)
        torch.testing.assert_close(program.module()(x), exact(model, x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("biased", [False, True])
def test_experts_in_a_list_are_kernels_of_one_weight(biased: bool) -> None:
    torch.manual_seed(0)
    model = (Masked(ungated) if biased else Masked()).eval()
    with collect() as found:
        program = gossamer.export(model, (torch.randn(40, COLUMNS),), dynamic_shapes=TOKENS, options=OPTIONS)
    assert calls(program) == 3, found.decisions
    assert not [name for name in program.state_dict if "experts" in name]
    for tokens in (1, 33):
        x = torch.randn(tokens, COLUMNS)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-4)


def test_products_with_experts_are_kernels() -> None:
    torch.manual_seed(0)
    model = Alone().eval()
    program = exported(model, torch.randn(40, COLUMNS), 2, 1)
    for tokens in (1, 33):
        x = torch.randn(tokens, COLUMNS)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-4)


def test_pruned_experts_are_exported_with_their_zeros() -> None:
    torch.manual_seed(0)
    model, x = Sorted().eval(), torch.randn(40, COLUMNS)
    with torch.no_grad():
        for weight in (model.gate_up, model.down):
            weight *= torch.rand_like(weight) < 0.1
    program = exported(model, x, 3)
    torch.testing.assert_close(program.module()(x), exact(model, x), rtol=1e-4, atol=1e-4)


def test_experts_that_no_kernel_multiplies_are_refused() -> None:
    model, x = Sorted().eval().double(), torch.randn(40, COLUMNS, dtype=torch.float64)
    with pytest.raises(gossamer.CompileError, match=r"no kernel multiplies experts of torch\.float64"):
        gossamer.export(model, (x,), options=OPTIONS)


def test_a_package_has_mixtures_inside(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Network().eval()
    program = exported(model, torch.randn(40, COLUMNS), 6, 4)
    check_in_a_fresh_process(program, model, [(torch.randn(tokens, COLUMNS),) for tokens in (40, 1, 7)], tmp_path)
