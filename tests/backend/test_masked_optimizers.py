"""Whole runs of compiled models under masks: torch's own optimizer steps kept entries, with the results of plain torch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.optim import SGD, AdamW, Optimizer

import gossamer
from gossamer.backend.weights import masked_gradients
from gossamer.sparsity.pruning.mask import Mask
from gossamer.sparsity.training.kept_state import KeptState
from tests.backend.harness import compile_and_run, losses_of_steps


class Where(nn.Module):
    """A parametrization of a user's own."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return self.mask * weight


MASKS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "hook": lambda layer, mask: prune.custom_from_mask(layer, "weight", mask),
    "mask": lambda layer, mask: parametrize.register_parametrization(layer, "weight", Mask(mask)),
    "own": lambda layer, mask: parametrize.register_parametrization(layer, "weight", Where(mask)),
}


def masked(put: Callable[[nn.Module, Tensor], Any]) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 160), nn.GELU(), nn.Linear(160, 130))
    for layer in (model[0], model[2]):
        put(layer, (torch.rand_like(layer.weight) < 0.1).float())
    return model


def originals(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """The parameters under masks, with these."""
    buffers = [each for name, each in model.named_buffers() if "mask" in name]
    parameters = [each for name, each in model.named_parameters() if "bias" not in name]
    return list(zip(parameters, buffers, strict=True))


def train(call: Callable[[Tensor], Tensor], optimizer: Optimizer, steps: int = 5) -> list[float]:
    torch.manual_seed(1)
    x, target = torch.randn(80, 128), torch.randn(80, 130)
    return losses_of_steps(call, optimizer, x, target, steps)


def is_by_kept(optimizer: Optimizer, model: nn.Module) -> list[bool]:
    """Whether the last step of each parameter was by its kept entries."""
    states = [optimizer.state[parameter] for parameter, _ in originals(model)]
    return [isinstance(state, KeptState) and state.is_ahead for state in states]


def assert_equal(model: nn.Module, optimizer: Optimizer, twin: nn.Module, plain: Optimizer) -> None:
    for (found, mask), (expected, _) in zip(originals(model), originals(twin), strict=True):
        kept = mask != 0
        torch.testing.assert_close(found[kept], expected[kept], rtol=1e-4, atol=1e-5)
        states = optimizer.state[found], plain.state[expected]
        for key in states[1]:
            one, other = (state[key] if state[key].dim() == 0 else state[key][kept] for state in states)
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("put", MASKS.values(), ids=MASKS)
def test_a_compiled_model_trains_by_kept_entries(put: Callable[[nn.Module, Tensor], Any]) -> None:
    model, twin = masked(put), masked(put)
    run = compile_and_run(model, torch.randn(80, 128), grad=True, regions=5)
    optimizer, plain = AdamW(model.parameters(), lr=0.01), AdamW(twin.parameters(), lr=0.01)
    assert train(run.function, optimizer) == pytest.approx(train(twin, plain), rel=1e-4)
    assert is_by_kept(optimizer, model) == [True, True] and is_by_kept(plain, twin) == [False, False]
    for each in (model, twin):  # pruned further
        for n, (_, mask) in enumerate(originals(each)):
            torch.manual_seed(n)
            mask.mul_(torch.rand_like(mask) < 0.6)
    assert train(run.function, optimizer) == pytest.approx(train(twin, plain), rel=1e-4)
    assert is_by_kept(optimizer, model) == [True, True]
    assert_equal(model, optimizer, twin, plain)


def test_copies_of_a_compiled_model_and_its_optimizer_train_by_themselves() -> None:
    model, twin = masked(MASKS["mask"]), masked(MASKS["mask"])
    run = compile_and_run(model, torch.randn(80, 128), grad=True, regions=5)
    optimizer, plain = AdamW(model.parameters(), lr=0.01), AdamW(twin.parameters(), lr=0.01)
    train(run.function, optimizer)
    train(twin, plain)
    other, others = copy.deepcopy((model, optimizer))
    second = compile_and_run(other, torch.randn(80, 128), grad=True, regions=0)  # the same code
    found, expected = train(second.function, others), train(twin, plain)
    assert found == pytest.approx(expected, rel=1e-4)
    assert is_by_kept(others, other) == [True, True]
    assert_equal(other, others, twin, plain)
    assert train(run.function, optimizer) == pytest.approx(expected, rel=1e-4)
    assert_equal(model, optimizer, twin, plain)


def test_gradients_that_stay_dense_are_stepped_by_kept_entries_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_gradients.MaskedGradients, "run", lambda *_: [])
    model, twin = masked(MASKS["mask"]), masked(MASKS["mask"])
    run = compile_and_run(model, torch.randn(80, 128), grad=True, regions=3)
    optimizer, plain = AdamW(model.parameters(), lr=0.01), AdamW(twin.parameters(), lr=0.01)
    assert train(run.function, optimizer) == pytest.approx(train(twin, plain), rel=1e-4)
    assert is_by_kept(optimizer, model) == [True, True]
    assert_equal(model, optimizer, twin, plain)


def test_a_weight_that_is_used_without_its_mask_steps_as_a_whole() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(128, 128)
            self.register_buffer("mask", (torch.rand(128, 128) < 0.1).float())

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.first.weight * self.mask).tanh(), self.first.weight)

    torch.manual_seed(0)
    model = Tied()
    twin = copy.deepcopy(model)
    x = torch.randn(80, 128)
    run = compile_and_run(model, x, grad=True)
    optimizer, plain = AdamW(model.first.parameters(), lr=0.01), AdamW(twin.first.parameters(), lr=0.01)
    for _ in range(4):
        for call, each in ((run.function, optimizer), (twin, plain)):
            each.zero_grad()
            call(x).square().mean().backward()
            each.step()
    assert not isinstance(optimizer.state[model.first.weight], KeptState)
    torch.testing.assert_close(model.first.weight, twin.first.weight, rtol=1e-4, atol=1e-5)


def test_a_sparsifier_of_torch_ao_prunes_further_between_steps() -> None:
    from torch.ao.pruning import WeightNormSparsifier

    losses, trained = list[list[float]](), list[tuple[nn.Module, Optimizer]]()
    for compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 160), nn.GELU(), nn.Linear(160, 130))
        sparsifier = WeightNormSparsifier(0.8, (1, 1), 1)
        sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.weight"}])
        sparsifier.step()
        run: Any = model
        if compiled:
            run = compile_and_run(gossamer.prepare(model), torch.randn(80, 128), grad=True, regions=5).function
        optimizer = AdamW(model.parameters(), lr=0.01)
        losses.append(train(run, optimizer))
        for group in sparsifier.groups:
            group["sparsity_level"] = 0.95
        sparsifier.step()  # gives each mask new memory
        losses[-1] += train(run, optimizer)
        trained.append((model, optimizer))
        assert is_by_kept(optimizer, model) == [compiled, compiled]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert_equal(*trained[0], *trained[1])


def test_a_weight_under_nested_masks_steps_as_a_whole() -> None:
    """Steps of the narrow network apply momentum and decay to the entries that only the wide one keeps."""

    class Slimmable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(160, 128) * 0.1)
            kept = torch.rand(2, 160, 128) < torch.tensor([0.25, 0.1]).view(2, 1, 1)
            self.register_buffer("wide", kept.any(0).float())
            self.register_buffer("narrow", kept[1].float())

        def forward(self, x: Tensor, narrow: bool) -> Tensor:
            return F.linear(x, self.weight * (self.narrow if narrow else self.wide))

    torch.manual_seed(0)
    model = Slimmable()
    twin, x = copy.deepcopy(model), torch.randn(64, 128)
    run = compile_and_run(model, x, False, grad=True, regions=2)
    optimizer, plain = (SGD(each.parameters(), 0.5, momentum=0.9, weight_decay=0.01) for each in (model, twin))
    for narrow in (False, False, True, True, False, True):
        for call, each in ((run.function, optimizer), (twin, plain)):
            each.zero_grad()
            call(x, narrow).square().mean().mul(20).backward()
            each.step()
    assert not optimizer.state[model.weight].is_ahead
    kept: Any = model.wide != 0
    torch.testing.assert_close(model.weight[kept], twin.weight[kept], rtol=1e-4, atol=1e-5)


def test_a_compiled_step_goes_on_from_kept_entries() -> None:
    model, twin = masked(MASKS["mask"]), masked(MASKS["mask"])
    run = compile_and_run(model, torch.randn(80, 128), grad=True, regions=5)
    optimizer, plain = AdamW(model.parameters(), lr=0.01), AdamW(twin.parameters(), lr=0.01)
    train(run.function, optimizer)
    train(twin, plain)
    step = optimizer.step
    optimizer.step = torch.compile(step, backend="sparse", options={"dense": "eager"})  # type: ignore[method-assign]
    assert train(run.function, optimizer) == pytest.approx(train(twin, plain), rel=1e-4)
    assert is_by_kept(optimizer, model) == [False, False]
    assert_equal(model, optimizer, twin, plain)
