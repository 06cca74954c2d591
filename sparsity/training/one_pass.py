"""Does steps of Adam and AdamW for the entries that a mask keeps, in one pass over the parameter.

    each row: its entries → the step → its entries

A step on vectors of these entries would read the whole parameter to collect them, and again to write them back.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, optim
from torch.optim.optimizer import Optimizer

from gossamer.dialects.kept_steps import Rate
from gossamer.sparsity.training.one_loop import can_be_one_loop

if TYPE_CHECKING:
    from gossamer.sparsity.compiler.kept_entries import KeptEntries

_KINDS = (optim.Adam, optim.AdamW)


def has_one_pass(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a kernel does the steps of these parameters. torch does the first step, which creates the state."""
    scaled = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
    return type(optimizer) in _KINDS and not group["amsgrad"] and not scaled


def can_be_one_pass(optimizer: Optimizer, group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether the kernel can do the next step of a parameter with this state, with the results of torch's loop."""
    begun = all(name in state for name in ("step", "exp_avg", "exp_avg_sq"))
    return has_one_pass(optimizer, group) and begun and can_be_one_loop(type(optimizer), group, [state])


def step_in_one_pass(
    group: Mapping[str, Any], state: Mapping[str, Any], kept: "KeptEntries", parameter: Tensor, gradient: Tensor
) -> None:
    """Does a step of a parameter, in place; gradient and state are vectors of the kept entries."""
    state["step"].add_(1)
    kept.step(parameter, gradient, state["exp_avg"], state["exp_avg_sq"], _rates(group, float(state["step"])))


def _rates(group: Mapping[str, Any], step: float) -> list[float]:
    rate, decay, (first, second) = group["lr"], group["weight_decay"], group["betas"]
    apart = group["decoupled_weight_decay"]
    rates = {
        Rate.SIGN: -1.0 if group["maximize"] else 1.0,
        Rate.PENALTY: 0.0 if apart else decay,
        Rate.MEAN: 1 - first,
        Rate.FORGET: second,
        Rate.SQUARE: 1 - second,
        Rate.DECAY: 1 - rate * decay if apart else 1.0,
        Rate.STEP: rate / (1 - first**step),
        Rate.SCALE: 1 / math.sqrt(1 - second**step),
        Rate.EPSILON: group["eps"],
    }
    return [rates[each] for each in Rate]
