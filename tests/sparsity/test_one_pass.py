"""Steps of Adam in one pass over a parameter: the kept entries of torch's own step, and which steps go that way."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from gossamer.runtime.target import host
from gossamer.sparsity.compiler.spreading import map_of, step
from gossamer.sparsity.training import one_pass
from gossamer.sparsity.training.one_pass import _rates
from tests.sparsity.kept_training import OPTIMIZERS, Make, Training, assert_equal, counted, pair
from tests.sparsity.made import team_of

__all__ = ["counted"]  # a fixture for each of these tests

SHAPES = [(1, 1, 1.0), (5, 3, 0.0), (37, 50, 0.3), (2, 1040, 0.5), (300, 1024, 0.05), (700, 64, 0.1)]


def entries(rows: int, columns: int, density: float) -> tuple[Tensor, Tensor, Tensor]:
    """A mask with a row of nothing, where its rows begin, and the columns of what it keeps."""
    torch.manual_seed(rows + columns)
    kept = torch.rand(rows, columns) < density
    kept[rows // 2, 1:] = False
    return kept, torch.cat([torch.zeros(1, dtype=torch.int64), kept.sum(1).cumsum(0)]), kept.nonzero()[:, 1].int()


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "make",
    [
        partial(optim.AdamW, lr=0.01, weight_decay=0.1),
        partial(optim.Adam, lr=0.02, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3, maximize=True),
    ],
    ids=["AdamW", "Adam"],
)
def test_the_kernel_does_the_step_of_torch(make: Make, dtype: torch.dtype, threads: int, mapped: bool) -> None:
    if mapped and host().vector_bits < 512:
        pytest.skip("maps are for AVX-512")
    for rows, columns, density in SHAPES:
        kept, positions, coordinates = entries(rows, columns, density)
        map = map_of(kept) if mapped else None
        parameter = nn.Parameter(torch.randn(rows, columns, dtype=dtype))
        optimizer = make([parameter])
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        state = optimizer.state[parameter]
        own = [parameter.detach().clone(), *(state[key][kept] for key in ("exp_avg", "exp_avg_sq"))]
        before = own[0].clone()
        parameter.grad = torch.randn_like(parameter)
        if bool(kept.any()):
            parameter.grad.masked_scatter_(kept, torch.cat([torch.tensor([torch.nan]), torch.randn(int(kept.sum()))]).to(dtype))
        optimizer.step()
        with team_of(threads):
            step(positions, coordinates, parameter.grad[kept], _rates(optimizer.param_groups[0], 2), tuple(own), map)
        tolerance: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
        torch.testing.assert_close(own[0][kept], parameter.detach()[kept], equal_nan=True, **tolerance)
        for found, key in zip(own[1:], ("exp_avg", "exp_avg_sq"), strict=True):
            torch.testing.assert_close(found, state[key][kept], equal_nan=True, **tolerance)
        assert torch.equal(own[0][~kept], before[~kept])


ONE_PASS = {"AdamW", "AdamW, fused", "AdamW, one by one", "Adam"}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_of_adam_go_in_one_pass(make: Make, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    done, step = list[int](), one_pass._rates

    def noted(group: Any, number: float) -> list[float]:
        done.append(int(number))
        return step(group, number)

    monkeypatch.setattr(one_pass, "_rates", noted)
    ours, plain = pair(make)
    for each in (ours, plain):
        each.steps(4)
    assert done == ([2, 2, 3, 3, 4, 4] if request.node.callspec.id in ONE_PASS else [])  # torch makes the first step
    assert_equal(ours, plain)


def test_a_new_rate_and_a_state_that_was_loaded_are_taken_up() -> None:
    ours, plain = pair()
    for each in (ours, plain):
        each.steps(2)
        each.optimizer.param_groups[0].update(lr=0.002, weight_decay=0.3, betas=(0.5, 0.9))
        each.steps(2)
        saved = each.optimizer.state_dict()
        each.optimizer = optim.AdamW(each.model.parameters(), lr=0.1)
        each.optimizer.load_state_dict(saved)
        each.steps(2)
        for group in each.optimizer.param_groups:
            group["amsgrad"] = True
        for state in each.optimizer.state.values():
            state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
        each.steps(2)
    assert_equal(ours, plain)


def test_two_groups_step_with_their_own_rates() -> None:
    def make(parameters: Any) -> optim.Optimizer:
        first, *others = parameters
        return optim.AdamW([{"params": [first], "lr": 0.1, "maximize": True}, {"params": others, "weight_decay": 0.5}], lr=0.01)

    ours, plain = Training(make, True), Training(make, False)
    for each in (ours, plain):
        each.steps(5)
    assert_equal(ours, plain)
