"""Optimizers step the entries that masks keep: the kept entries, and what is remembered of them, are those of plain torch."""

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import gossamer
from gossamer.sparsity.training.kept_state import KeptState
from gossamer.sparsity.training.kept_steps import note_mask
from tests.sparsity.kept_training import OPTIMIZERS, Make, Training, assert_equal, counted, pair

__all__ = ["counted"]  # a fixture for each of these tests


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


def test_masks_in_new_memory_are_followed_and_a_second_mask_makes_steps_whole() -> None:
    ours, plain = pair()
    second, some = torch.ones_like(ours.masked[0][1]), list[Tensor]()
    for each in (ours, plain):
        each.steps(2)
        holders = [layer.parametrizations.weight[0] for layer in each.layers]
        some = [torch.rand_like(holder.mask) < 0.8 for holder in holders] if each is ours else some
        for holder, kept in zip(holders, some, strict=True):  # as sparsifiers of torch.ao.pruning do
            holder.mask.data = holder.mask * kept
        each.note()
        each.steps(2)
        for holder, kept in zip(holders, some, strict=True):  # as torch.nn.utils.prune does
            holder.mask = holder.mask * kept.flip(0)
        each.note()
        each.steps(2)
    note_mask(ours.masked[0][0], second, packed=False)
    for each in (ours, plain):
        each.steps(2, taken=1)
    del second
    for each in (ours, plain):
        each.steps(2)
    assert_equal(ours, plain)


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


def test_parameters_that_are_parts_of_one_vector_step_as_wholes() -> None:
    ours, plain = pair()
    for each in (ours, plain):
        first, beside = each.masked[0][0], nn.Parameter(torch.ones(150, 128))  # of one shape, and only `first` has a mask
        each.model.register_parameter("beside", beside)
        each.optimizer.add_param_group({"params": [beside]})
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([first, beside]), [first, beside])
        each.note()
        for _ in range(3):
            each.optimizer.zero_grad()
            (each.loss() + 0 * beside.sum()).backward()
            each.optimizer.step()
            each.check_path(taken=1)
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


def _noted(step: Callable[..., None], loops: list[str]) -> Callable[..., None]:
    def noted(*args: Any, **kwargs: Any) -> None:
        loops.append("")
        step(*args, **kwargs)

    return noted


STORED: dict[str, Make] = {
    name: OPTIMIZERS[name]
    for name in ("AdamW", "AdamW, foreach", "AdamW, fused", "AdamW, a tensor as rate", "Adam", "SGD, momentum")
}


@pytest.mark.parametrize("make", STORED.values(), ids=STORED)
def test_stored_weights_step_as_under_masks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    _, plain = pair(make)
    stored = gossamer.store_sparse(copy.deepcopy(plain.model))
    optimizer, loops = make(stored.parameters()), list[str]()
    for name in ("_fused_adamw_", "_fused_adam_", "_fused_sgd_"):
        monkeypatch.setattr(torch, name, _noted(getattr(torch, name), loops))
    for step in range(4):
        plain.steps(1)
        loops.clear()
        versions = [layer.weight._version for layer in (stored[0], stored[2])]
        optimizer.zero_grad()
        F.mse_loss(stored(plain.x), plain.target).backward()
        optimizer.step()
        assert bool(loops) == (not isinstance(optimizer.param_groups[0]["lr"], Tensor))
        if not optimizer.param_groups[0].get("foreach"):  # torch counts no writes of these
            assert all(layer.weight._version > n for layer, n in zip((stored[0], stored[2]), versions, strict=True))
        if step == 1:  # a saved run goes on
            saved, optimizer = copy.deepcopy(optimizer.state_dict()), make(stored.parameters())
            optimizer.load_state_dict(saved)
    for layer, (parameter, mask) in zip((stored[0], stored[2]), plain.masked, strict=True):
        torch.testing.assert_close(layer.weight.detach().to_dense(), parameter.detach() * mask, rtol=1e-5, atol=1e-6)
        assert all(each.grad is not None for each in stored.parameters())
