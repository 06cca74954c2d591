"""Steps by kept entries: the state as others see it, hooks, failures, and optimizers that step as a whole."""

import copy
import functools
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import prune
from torch.optim import Optimizer

from gossamer.sparsity.training.kept_steps import note_mask
from tests.sparsity.kept_training import Training, assert_equal, counted, pair, taken_by

__all__ = ["counted"]  # a fixture for each of these tests


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
    by_type = type(state)(OrderedDict(state)), type(state)(**state)  # as Lightning and Accelerate move states
    for found in (dict(state), {**state}, state.copy(), {} | state, copy.copy(state), copy.deepcopy(state), *by_type):
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
                assert taken_by.pop(optimizer, 0) == (3 if layer is layers[0] else 0)
                prune.remove(layer, "weight")
                assert (layer.weight == 0).double().mean() > 0.89
            optimizer.zero_grad()
            layer(x).square().mean().backward()
            optimizer.step()
        assert optimizer not in taken_by
    torch.testing.assert_close(layers[0].weight, layers[1].weight)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16])
def test_tensors_of_other_types_in_the_state_make_steps_those_of_torch(dtype: torch.dtype) -> None:
    ours, plain = pair()
    for each in (ours, plain):
        each.steps(2)
        parameter, mask = each.masked[0]
        each.optimizer.state[parameter]["mine"] = (mask.cumsum(1) % 2).to(dtype)
        each.steps(2, taken=1)
        assert torch.equal(each.optimizer.state[parameter].pop("mine"), (mask.cumsum(1) % 2).to(dtype))
        each.steps(2)
    assert_equal(ours, plain)


@pytest.mark.parametrize("wraps", [False, True])
def test_a_step_that_other_code_has_put_on_the_class_is_called_once(monkeypatch: pytest.MonkeyPatch, wraps: bool) -> None:
    ours, plain = pair()
    calls, step = list[Optimizer](), optim.AdamW.step

    def timed(self: optim.AdamW, closure: Any = None) -> Any:
        calls.append(self)
        return step(self, closure)

    for each in (ours, plain):
        each.steps(2)
        with monkeypatch.context() as patch:
            patch.setattr(optim.AdamW, "step", functools.wraps(step)(timed) if wraps else timed)
            each.steps(2, taken=0)
        assert calls == [each.optimizer] * 2
        calls.clear()
        each.steps(2)
    assert_equal(ours, plain)
