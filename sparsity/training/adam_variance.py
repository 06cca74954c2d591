"""STEP: freezes the variance of Adam once it has settled (Lu et al., 2023).

Z_t = mean |v_t - v_(t-1)|,   switch when its mean over 1 / (1 - beta2) steps is below eps     (AutoSwitch, section 5)
from there on                 w -= lr m / sqrt(v* + eps)                                       (algorithm 1)

eps is under the root, as in the paper. So elements without a gradient before the switch move by 1e4 lr m; with eps beside the
root it would be 1e8 lr m.
"""

from collections import deque
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Adamax, Optimizer

from gossamer.dialects.errors import OptionError

_SETTLED = (1e18, 1 - 1e-15)
"""A step number so large that Adam corrects no bias, and a beta2 so near 1 that Adam adds nothing to its variance."""

_watched: WeakSet[Optimizer] = WeakSet()
"""Optimizers whose variance a recipe watches or has frozen."""


class FrozenVariance:
    """Watches the variance of an optimizer's parameters until it has settled, and then keeps it constant."""

    def __init__(self, optimizer: Optimizer, parameters: list[Tensor], earliest: int, latest: int) -> None:
        if isinstance(optimizer, Adamax) or any(len(group.get("betas", ())) != 2 for group in optimizer.param_groups):
            raise _without_variance(optimizer)
        if any(group.get("amsgrad") for group in optimizer.param_groups):
            raise OptionError("STEP freezes the variance of Adam: amsgrad=True, which takes its maximum, must be off")
        if optimizer in _watched:
            raise OptionError(
                "a recipe 'step' freezes the variance of this optimizer already: give other weights an optimizer of their own"
            )
        self.optimizer, self.parameters = optimizer, parameters
        self.earliest, self.latest = earliest, latest
        self.since: int | None = None
        self.variances: list[Tensor] = []
        self.changes: deque[float] = deque(maxlen=round(1 / (1 - optimizer.param_groups[0]["betas"][1])))
        self._seen: list[Tensor] = []
        self._kept: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Lets no other recipe freeze the optimizer's variance until `end`."""
        _watched.add(self.optimizer)

    def end(self) -> None:
        """Leaves the optimizer to its user."""
        self.restore()
        _watched.discard(self.optimizer)

    def before_step(self) -> None:
        """Makes the optimizer's step leave the variance as it is, once it is frozen."""
        if self.since is None:
            return
        self.restore()  # what a step that failed has left
        groups = self.optimizer.param_groups
        self._kept = [(group["betas"], [self._step_of(p) for p in group["params"]]) for group in groups]
        for group in groups:
            group["betas"] = (group["betas"][0], _SETTLED[1])
            for parameter in group["params"]:
                if (step := self.optimizer.state[parameter].get("step")) is not None:
                    step.fill_(_SETTLED[0])

    def after_step(self, step: int) -> bool:
        """Restores Adam's step numbers, one step further, and its beta2. Returns whether the variance froze at this step."""
        states = [self.optimizer.state[parameter] for parameter in self.parameters]
        if self.since is not None:
            self.restore(done=1)
            for state, variance in zip(states, self.variances, strict=True):
                state["exp_avg_sq"].copy_(variance)
            return False
        for state, parameter in zip(states, self.parameters, strict=True):
            if state and "exp_avg_sq" not in state and parameter.grad is not None:
                raise _without_variance(self.optimizer)
        now = [state["exp_avg_sq"].clone() for state in states if "exp_avg_sq" in state]
        if self._seen and len(now) == len(self._seen):
            total = sum(float((a - b).abs().sum()) for a, b in zip(now, self._seen, strict=True))
            self.changes.append(total / sum(each.numel() for each in now))
        self._seen = now
        full = len(self.changes) == self.changes.maxlen
        settled = full and sum(self.changes) / len(self.changes) < self.optimizer.param_groups[0]["eps"]
        late = step >= self.latest or (self.earliest <= step and settled)
        if not late or len(now) < len(states):  # a weight that had no gradient yet has no variance to freeze
            return False
        self.since, self._seen = step, []
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:  # also those without masks, such as biases
                if "exp_avg_sq" in (state := self.optimizer.state[parameter]):
                    state["exp_avg_sq"].div_(1 - group["betas"][1] ** float(state["step"])).add_(group["eps"])
        self.variances = [state["exp_avg_sq"].clone() for state in states]
        return True

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that training needs to go on."""
        return {"since": self.since, "variances": self.variances, "changes": list(self.changes), "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state."""
        self.since = state["since"]
        self._kept = []
        self.variances, self._seen = ([each.clone() for each in state[key]] for key in ("variances", "seen"))
        self.changes.clear()
        self.changes.extend(state["changes"])

    def restore(self, done: int = 0) -> None:
        """Gives the optimizer its beta2 and step numbers of before a step, and adds `done` to these numbers."""
        for group, (betas, steps) in zip(self.optimizer.param_groups, self._kept, strict=False):
            group["betas"] = betas
            for parameter, before in zip(group["params"], steps, strict=False):
                if before is not None:
                    self.optimizer.state[parameter]["step"].copy_(before + done)
        self._kept = []

    def _step_of(self, parameter: Tensor) -> Tensor | None:
        step = self.optimizer.state[parameter].get("step")
        return None if step is None else torch.as_tensor(step).clone()


def _without_variance(optimizer: Optimizer) -> OptionError:
    return OptionError(f"STEP freezes the variance of Adam, {type(optimizer).__name__} has none: take AdamW or Adam")
