"""Optimizers step the entries that masks keep: the kept entries, and what is remembered of them, are those of plain torch."""

import copy
import io
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.nn.utils import prune
from torch.optim import Optimizer

from gossamer.sparsity.pruning.mask import Mask
from gossamer.sparsity.pruning.parametrizations import register_parametrization
from gossamer.sparsity.training import kept_steps
from gossamer.sparsity.training.kept_state import KeptState
from gossamer.sparsity.training.kept_steps import note_mask

Make = Callable[[Iterable[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": partial(optim.AdamW, lr=0.01),
    "AdamW, foreach": partial(optim.AdamW, lr=0.01, foreach=True, amsgrad=True),
    "AdamW, fused": partial(optim.AdamW, lr=0.01, fused=True),
    "AdamW, a tensor as rate": lambda parameters: optim.AdamW(parameters, lr=torch.tensor(0.01)),
    "AdamW, one by one": partial(optim.AdamW, lr=0.01, foreach=False, fused=False),
    "Adam": partial(optim.Adam, lr=0.01, weight_decay=0.1, maximize=True),
    "Adam, fused": partial(optim.Adam, lr=0.01, weight_decay=0.1, fused=True, amsgrad=True),
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD, momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, fused": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, fused=True),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01, foreach=True),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": partial(optim.Adagrad, lr=0.01, initial_accumulator_value=0.1),
    "Adadelta": partial(optim.Adadelta, foreach=True),
}


_taken: dict[Optimizer, int] = {}
"""How many parameters an optimizer has stepped by kept entries since somebody looked."""


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    step = kept_steps._step

    def counting(optimizer: Optimizer, groups: Any, taken: Any) -> None:
        step(optimizer, groups, taken)
        _taken[optimizer] = _taken.get(optimizer, 0) + len(taken)

    _taken.clear()
    monkeypatch.setattr(kept_steps, "_step", counting)
    monkeypatch.setattr(kept_steps, "_DENSEST_FUSED", 1.0)


class Training:
    """A model under masks with its optimizer: one whose steps are by kept entries, or its twin by plain torch."""

    def __init__(self, make: Make, by_kept: bool, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(128, 150), nn.Tanh(), nn.Linear(150, 130)).to(dtype)
        for layer in self.layers:
            mask = (torch.rand_like(layer.weight) < 0.1).to(dtype)
            register_parametrization(layer, "weight", Mask(mask))
        self.by_kept = by_kept
        self.optimizer = make(self.model.parameters())
        self.x, self.target = torch.randn(32, 128, dtype=dtype), torch.randn(32, 130, dtype=dtype)
        self.note()

    @property
    def layers(self) -> list[Any]:
        return [self.model[0], self.model[2]]

    @property
    def masked(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [(each.parametrizations.weight.original, each.parametrizations.weight[0].mask) for each in self.layers]

    def note(self) -> None:
        """What a compiled model does when it packs a weight."""
        for parameter, mask in self.masked if self.by_kept else ():
            note_mask(parameter, mask)

    def loss(self) -> Tensor:
        return F.mse_loss(self.model(self.x), self.target)

    def steps(self, many: int = 3, taken: int = 2) -> None:
        for _ in range(many):
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()
            self.check_path(taken)

    def check_path(self, taken: int = 2) -> None:
        """The steps since the last look were by the kept entries of so many layers."""
        assert _taken.pop(self.optimizer, 0) == (taken if self.by_kept else 0)

    def values(self) -> list[Tensor]:
        """All parameters, and all tensors of the state; of masked ones what is kept."""
        kept, found = dict(self.masked), list[Tensor]()
        for parameter in self.model.parameters():
            known = self.optimizer.state[parameter]
            tensors = [parameter.detach(), *(known[key] for key in sorted(known) if isinstance(known[key], Tensor))]
            found += [each[kept[parameter] != 0] if parameter in kept and each.dim() else each for each in tensors]
        return found


def pair(make: Make = OPTIMIZERS["AdamW"], dtype: torch.dtype = torch.float32) -> tuple[Training, Training]:
    return Training(make, True, dtype), Training(make, False, dtype)


def assert_equal(one: Training, other: Training) -> None:
    tolerance = 1e-12 if one.x.dtype is torch.float64 else 1e-6
    torch.testing.assert_close(one.values(), other.values(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_kept_entries_are_those_of_plain_torch(make: Make, dtype: torch.dtype) -> None:
    ours, plain = pair(make, dtype)
    for each in (ours, plain):
        schedule = optim.lr_scheduler.ExponentialLR(each.optimizer, 0.9)
        for n in range(8):
            each.steps(1)
            schedule.step()
            if n == 3:
                each.optimizer.param_groups[0]["weight_decay"] = 0.05
    assert_equal(ours, plain)
    assert_equal(ours, plain)  # what was looked at stays


def test_what_the_mask_hides_is_left_as_it_is() -> None:
    ours, plain = pair()
    before = [parameter.detach().clone() for parameter, _ in ours.masked]
    for each in (ours, plain):
        each.steps()
    for (parameter, mask), (decayed, _), old in zip(ours.masked, plain.masked, before, strict=True):
        assert torch.equal(parameter[mask == 0], old[mask == 0]) and not torch.equal(decayed[mask == 0], old[mask == 0])
        for value in ours.optimizer.state[parameter].values():
            assert value.shape in ((), mask.shape) and (value.dim() == 0 or not value[mask == 0].any())


def test_a_saved_run_goes_on_as_a_plain_one_and_the_other_way_round() -> None:
    ours, plain = pair()
    for each in (ours, plain):
        each.steps(4)
    saved = list[dict[str, Any]]()
    for each in (ours, plain):
        file = io.BytesIO()
        torch.save([each.model.state_dict(), each.optimizer.state_dict()], file)
        file.seek(0)
        saved.append(torch.load(file, weights_only=True))
    assert [type(each) for each in saved[0][1]["state"].values()] == [dict] * 4
    others = Training(OPTIMIZERS["AdamW"], False), Training(OPTIMIZERS["AdamW"], True)
    for each, (model, optimizer) in zip(others, saved, strict=True):
        each.model.load_state_dict(model)
        each.optimizer.load_state_dict(optimizer)
    for each in (ours, plain, *others):
        each.steps(4)
    for each in (ours, *others):
        assert_equal(each, plain)


def test_a_run_goes_on_after_its_own_state_is_loaded_back() -> None:
    ours, plain = pair()
    for each in (ours, plain):
        each.steps(3)
        model, optimizer = copy.deepcopy((each.model.state_dict(), each.optimizer.state_dict()))
        each.steps(3)
        each.model.load_state_dict(model)
        each.optimizer.load_state_dict(optimizer)
        each.steps(3)
    assert_equal(ours, plain)


def test_copies_of_model_and_optimizer_go_on_by_themselves() -> None:
    ours, plain = pair()
    twins = list[Training]()
    for each in (ours, plain):
        each.steps(3)
        twin = copy.copy(each)
        twin.model, twin.optimizer = copy.deepcopy((each.model, each.optimizer))
        twins.append(twin)
        assert not any(isinstance(state, KeptState) for state in twin.optimizer.state.values())
        twin.note()
        twin.steps(2)
        each.steps(5)
        twin.steps(1)
    assert_equal(ours, plain)
    assert_equal(*twins)


def test_gradients_are_accumulated_and_clipped() -> None:
    ours, plain = pair()
    for each in (ours, plain):
        for n in range(5):
            each.optimizer.zero_grad(set_to_none=n % 2 == 0)
            for part in range(3):
                F.mse_loss(each.model(each.x[part::3]), each.target[part::3]).backward()
            nn.utils.clip_grad_norm_(each.model.parameters(), 0.05)
            each.optimizer.step()
            each.check_path()
    assert_equal(ours, plain)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_skips_and_unscales(fused: bool) -> None:
    ours, plain = pair(partial(optim.AdamW, lr=0.01, fused=fused))
    for each in (ours, plain):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for n in range(6):
            each.optimizer.zero_grad()
            scaler.scale(each.loss() * (torch.inf if n == 3 else 1)).backward()
            if n % 2:
                scaler.unscale_(each.optimizer)
            scaler.step(each.optimizer)
            scaler.update()
        assert scaler.get_scale() == 512
        each.check_path(10)
    assert_equal(ours, plain)
    for one, other in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_closures_are_called_once() -> None:
    ours, plain = pair()
    for each in (ours, plain):
        losses = list[float]()

        def closure(each: Training = each, losses: list[float] = losses) -> Tensor:
            each.optimizer.zero_grad()
            loss = each.loss()
            loss.backward()
            losses.append(loss.item())
            return loss

        found = [each.optimizer.step(closure).item(), each.optimizer.step(closure=closure).item()]  # type: ignore[arg-type]
        each.check_path(4)
        assert found == losses
    assert_equal(ours, plain)


def test_layers_are_frozen_and_trained_again() -> None:
    ours, plain = pair()
    for each in (ours, plain):
        for trains in (True, False, True):
            each.masked[0][0].requires_grad_(trains)
            each.steps(2, taken=2 if trains else 1)
    assert_equal(ours, plain)


def test_masks_that_keep_less_and_revive_entries() -> None:
    """What a mask hides goes on from where it was when it was hidden, once it is kept again."""
    ours, plain = pair()
    torch.manual_seed(3)
    fewer = [mask * (torch.rand_like(mask) < 0.5) for _, mask in ours.masked]
    for each in (ours, plain):
        each.steps(3)
        for (_, mask), less in zip(each.masked, fewer, strict=True):
            mask.copy_(less)
        each.steps(3)
    assert_equal(ours, plain)
    parameter, mask = ours.masked[0]
    hidden = mask == 0
    before = parameter.detach()[hidden].clone()
    mask.fill_(0).view(-1)[::5] = 1
    ours.steps(2)
    moved = parameter.detach()[hidden & (mask != 0)]
    assert moved.isfinite().all() and (moved != before[mask[hidden] != 0]).any()
    assert torch.equal(parameter.detach()[hidden & (mask == 0)], before[mask[hidden] == 0])


@pytest.mark.parametrize("entries", [0, 1, 17])
def test_masks_that_keep_little_and_have_factors(entries: int) -> None:
    ours, plain = pair()
    for each in (ours, plain):
        for _, mask in each.masked:
            mask.fill_(0).view(-1)[:entries] = 1.5
        each.steps(4)
    assert_equal(ours, plain)


def test_a_parameter_that_is_used_without_its_mask_steps_as_a_whole() -> None:
    ours, plain = pair()
    for each in (ours, plain):
        for n in range(4):
            each.optimizer.zero_grad()
            each.loss().backward()
            if n == 2:
                (each.masked[0][0].square().sum() + each.masked[1][0].square().sum()).backward()
            each.optimizer.step()
            each.check_path(2 if n < 2 else 0)
    assert_equal(ours, plain)


def test_values_that_are_written_without_torch_counting_it_are_seen() -> None:
    ours, plain = pair()
    for each in (ours, plain):
        for _ in range(4):
            each.steps(1)
            for parameter, _ in each.masked:
                parameter.data.clamp_(-0.05, 0.05)
                parameter.grad.data.mul_(0.5)  # type: ignore[union-attr]
            each.optimizer.step()
            each.check_path()
    assert_equal(ours, plain)


def test_tensors_of_the_state_that_others_hold_are_up_to_date() -> None:
    ours, plain = pair()
    for each in (ours, plain):
        each.steps(2)
        parameter = each.masked[0][0]
        held, view = each.optimizer.state[parameter]["exp_avg"], each.optimizer.state[parameter]["exp_avg_sq"].view(-1)
        each.steps(2)
        kept = each.masked[0][1] != 0
        held[kept] *= 0.5
        view *= 2
        each.steps(2)
        assert held.data_ptr() == each.optimizer.state[parameter]["exp_avg"].data_ptr()
        assert torch.equal(held, each.optimizer.state[parameter]["exp_avg"])
    assert_equal(ours, plain)


def test_the_state_is_a_dictionary_of_dense_tensors() -> None:
    ours, plain = pair()
    for each in (ours, plain):
        each.steps(2)
    state, expected = (each.optimizer.state[each.masked[0][0]] for each in (ours, plain))
    assert list(state) == list(expected) and len(state) == 3 and "exp_avg" in state
    for found in (dict(state), {**state}, state.copy(), {} | state, copy.copy(state), copy.deepcopy(state)):
        assert type(found) is dict
        torch.testing.assert_close(found, dict(expected))
    ours.steps(1)
    assert state.pop("exp_avg").shape == ours.masked[0][1].shape and len(state) == 2


def test_hooks_of_the_optimizer_come_before_and_see_gradients_after() -> None:
    ours, plain = pair()
    for each in (ours, plain):

        def halve(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(0.5)

        def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            assert all(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])

        each.optimizer.register_step_post_hook(look)
        each.steps(1)
        each.optimizer.register_step_pre_hook(halve)
        each.steps(3)
    assert_equal(ours, plain)


def test_a_step_that_fails_leaves_the_optimizer_usable() -> None:
    ours, plain = pair()
    for each in (ours, plain):
        each.steps(1)

        def fail(*_: Any) -> None:
            raise RuntimeError("no step")

        hook = each.optimizer.register_step_post_hook(fail)
        with pytest.raises(RuntimeError, match="no step"):
            each.steps(1)
        each.check_path()
        hook.remove()
        each.steps(3)
    assert_equal(ours, plain)


def test_other_optimizers_and_subclasses_step_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(optim.AdamW):
        pass

    ours = Training(partial(Mine, lr=0.01), True)
    with caplog.at_level("INFO", "gossamer"):
        for _ in range(2):
            ours.loss().backward()
            ours.optimizer.step()
    ours.check_path(0)
    assert caplog.text.count("Mine steps all entries of 2 weights under masks") == 1


def test_pruning_that_is_removed_leaves_a_plain_weight() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(128, 128), nn.Linear(128, 128)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(16, 128)
    for layer in layers:
        prune.l1_unstructured(layer, "weight", 0.9)
        if layer is layers[0]:
            note_mask(layer.weight_orig, layer.weight_mask)
        optimizer = optim.AdamW(layer.parameters(), lr=0.01)
        for n in range(6):
            if n == 3:
                assert _taken.pop(optimizer, 0) == (3 if layer is layers[0] else 0)
                prune.remove(layer, "weight")
                assert (layer.weight == 0).double().mean() > 0.89
            optimizer.zero_grad()
            layer(x).square().mean().backward()
            optimizer.step()
        assert optimizer not in _taken
    torch.testing.assert_close(layers[0].weight, layers[1].weight)
