"""Parameters under masks train in compiled models: what is packed takes their new values over, without the masked matrix."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gossamer.backend.run.packed_weights import Packings
from gossamer.sparsity.compiler.kept_entries import KeptEntries
from gossamer.sparsity.prepare import Mask
from tests.backend.harness import assert_same, compile_and_run, losses_of_steps


def masked(soft: bool = False) -> nn.Sequential:
    """Two layers; of the second one the mask keeps zeros, too, and may be more than 0 and 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 50))
    for layer in (model[0], model[2]):
        mask = (torch.rand_like(layer.weight) < 0.2).float()
        parametrize.register_parametrization(layer, "weight", Mask(mask * (1.5 if soft else 1)))
    with torch.no_grad():
        model[2].parametrizations.weight.original[:, ::3] = 0
    return model


def train(model: nn.Module, call: Callable[..., Tensor], steps: int = 4, fused: bool = False) -> list[float]:
    torch.manual_seed(1)
    x, target = torch.randn(48, 64), torch.randn(48, 50)
    return losses_of_steps(call, torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused), x, target, steps)


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each time that new values came from a parameter under a mask whether that went without the matrix."""
    seen: list[bool] = []
    gather = Packings._gathered
    monkeypatch.setattr(Packings, "_gathered", lambda *given: seen.append((w := gather(*given)) is not None) or w)
    return seen


@pytest.mark.parametrize("schedule", ["auto", "rowpairs"])
def test_new_values_are_gathered_from_the_parameter(schedule: str, gathered: list[bool]) -> None:
    for soft in (False, True):
        model, twin = masked(soft), masked(soft)
        run = compile_and_run(model, torch.randn(48, 64), grad=True, regions=5, schedule=schedule)
        for fused in (False, True):
            assert_same(torch.tensor(train(model, run.function, fused=fused)), torch.tensor(train(twin, twin, fused=fused)))
        assert_same(model[2].weight.detach(), twin[2].weight.detach())
    assert gathered and all(gathered)


def test_all_packings_of_a_parameter_take_what_was_read_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = masked(), list[int]()
    values = KeptEntries.values
    monkeypatch.setattr(KeptEntries, "values", lambda kept, matrix: read.append(matrix.data_ptr()) or values(kept, matrix))
    run = compile_and_run(model, torch.randn(48, 64), grad=True, regions=5)
    train(model, run.function)
    read.clear()
    train(model, run.function, steps=3)
    assert len(read) == 6 and len(set(read)) == 2  # two layers, forward and the gradient of the second one's input


def test_another_mask_and_another_parameter_between_steps(gathered: list[bool]) -> None:
    """Fewer, others and more are kept; and the parameter's memory is another one: all without compiling again."""
    model, twin = masked(), masked()
    run = compile_and_run(model, torch.randn(48, 64), grad=True, regions=5)
    torch.manual_seed(2)
    for share in (0.1, 0.3, 0.2):
        mask = (torch.rand(96, 64) < share).float()
        for each in (model, twin):
            each[0].parametrizations.weight[0].mask.copy_(mask)
        assert_same(torch.tensor(train(model, run.function)), torch.tensor(train(twin, twin)))
    assert any(gathered)
    for each in (model, twin):
        with torch.no_grad():
            each[0].parametrizations.weight.original.set_(torch.full((96, 64), 0.01))
    assert_same(torch.tensor(train(model, run.function)), torch.tensor(train(twin, twin)))


@pytest.mark.parametrize("shared, written, verify", [(False, 96, "version"), (True, 2, "version"), (False, 2, "full")])
def test_a_mask_that_changes_uncounted_together_with_its_parameter(shared: bool, written: int, verify: str) -> None:
    weight, mask, x = nn.Parameter(torch.randn(96, 64)), (torch.rand(96, 64) < 0.2).float(), torch.randn(48, 64)
    mask = mask.share_memory_() if shared else mask
    run = compile_and_run(lambda x: F.linear(x, weight * mask), x, regions=1, verify=verify)
    with torch.no_grad():
        for step in range(4):
            weight.mul_(1.01)
            if step == 2:
                mask.data[:written] = torch.rand(written, 64) < 0.2
            assert_same(run.function(x), F.linear(x, weight * mask))


def test_nan_of_a_parameter_reaches_the_result() -> None:
    model, twin = masked(), masked()
    run = compile_and_run(model, torch.randn(48, 64), grad=True, regions=5)
    train(model, run.function, 2)
    train(twin, twin, 2)
    mask = twin[2].parametrizations.weight[0].mask
    row = int(mask.any(1).nonzero()[0])
    for each in (model, twin):
        with torch.no_grad():
            each[2].parametrizations.weight.original[row, int(mask[row].nonzero()[0])] = torch.nan
    x = torch.ones(48, 64)
    assert torch.equal(run.function(x).isnan(), twin(x).isnan())
