"""Does steps of optimizers for the rows that have a gradient, by a kernel that reads and writes each row once.

torch.optim.Adagrad, SparseAdam and SGD stay the user's own objects, with the same options, state and results. Before a step,
hooks of `watch_optimizers` step these rows:

    optimizer = torch.optim.Adagrad(model.parameters())     as usual
    optimizer.step()                                        steps all other parameters as torch does

For other optimizers and dtypes, and beside hooks of the user, these hooks only coalesce sparse gradients, which takes torch
several times as long.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gossamer.dialects.bags import StepField, StepRowsOp
from gossamer.dialects.errors import IndexRangeError
from gossamer.runtime.elements import ELEMENTS
from gossamer.sparsity.bags.bag_lists import BagList, lines_of, zeros_of
from gossamer.sparsity.bags.gradients import row_gradients
from gossamer.sparsity.bags.sum_bags import WIDEST
from gossamer.sparsity.compiler.op_kernels import run

_TYPES = (torch.float32, torch.float64)
_FLAGS = ("differentiable", "fused", "weight_decay", "momentum")
_left_alone: list[None] = []
_dicts: WeakKeyDictionary[Optimizer, list[Callable[[], Any]]] = WeakKeyDictionary()  # the hooks of each optimizer
_common: list[Callable[[], Any]] = []  # those of all optimizers
_held: WeakKeyDictionary[Optimizer, list[tuple[Tensor, Tensor]]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class RowStep:
    """A step of one parameter.

    rates   see kernel.step_rows: a, e, 1 - b, 1 - c, and the factor of gradients
    states  [rows, columns] each, or [rows]
    """

    parameter: Tensor
    gradient: Tensor
    states: tuple[Tensor, ...]
    rates: tuple[float, float, float, float, float]


def fits(parameter: Tensor) -> bool:
    """Whether the kernel can take the gradient of a parameter."""
    grad = parameter.grad
    return (
        grad is not None
        and grad.layout is torch.sparse_coo
        and grad.sparse_dim() == grad.dense_dim() == 1
        and parameter.is_cpu
        and parameter.dtype in _TYPES
        and grad.dtype is parameter.dtype
        and parameter.is_contiguous()
        and 0 < parameter.shape[1] <= WIDEST
    )


def coalesced(grad: Tensor) -> Tensor:
    """Returns a sparse gradient of a matrix with each row once, ascending. It only marks a gradient that is so already."""
    rows, values = grad._indices()[0], grad._values()
    if grad.is_coalesced() or bool((rows[1:] > rows[:-1]).all()):
        return grad._coalesced_(True)
    bags = BagList(rows.contiguous().view(-1, 1), None, None, -1, False)
    ((rows, values),) = row_gradients([values.contiguous()], [bags], [grad.shape[0]], "sum")
    return torch.sparse_coo_tensor(rows[None], values, grad.shape, is_coalesced=True, check_invariants=False)


def step_rows(kind: str, steps: Sequence[RowStep]) -> None:
    """Does steps of parameters with the same dtype and number of columns. Their gradients are coalesced."""
    lines, rates, arrays = [], [], list[Tensor]()
    for step in steps:
        rows, values = step.gradient._indices()[0].contiguous(), step.gradient._values().contiguous()
        arrays += rows, values
        line = [0] * len(StepField)
        line[StepField.PARAMETER], line[StepField.ROWS] = step.parameter.data_ptr(), step.parameter.shape[0]
        line[StepField.NUMBERS], line[StepField.COUNT] = rows.data_ptr(), rows.shape[0]
        line[StepField.GRADIENT] = values.data_ptr()
        for field, state in zip((StepField.STATE, StepField.SQUARES), step.states, strict=False):
            line[field] = state.data_ptr()
        lines.append(line)
        rates.append(step.rates)
    wrong, problems = zeros_of(len(steps))
    parameter = steps[0].parameter
    run(
        StepRowsOp, [lines_of(lines), torch.tensor(rates, dtype=torch.float64, device="cpu")], [problems],
        kind=kind, element=ELEMENTS[parameter.dtype], columns=parameter.shape[1],
    )  # fmt: skip
    if any(wrong):
        raise IndexRangeError("a sparse gradient has rows that its parameter lacks, so these were left out of the step")
    for step in steps:
        torch.autograd.graph.increment_version([step.parameter, *step.states])


def step_all(kind: str, steps: Sequence[RowStep]) -> None:
    """Does steps of parameters of any dtypes and sizes, in groups of the same dtype and number of columns."""
    groups = dict[object, list[RowStep]]()
    for step in steps:
        groups.setdefault((step.parameter.dtype, step.parameter.shape[1]), []).append(step)
    for group in groups.values():
        step_rows(kind, group)


def _sgd(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> RowStep:
    return RowStep(parameter, gradient, (), (float(group["lr"]), 0, 0, 0, _sign(group)))


def _adagrad(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> RowStep:
    state = optimizer.state[parameter]
    state["step"] += 1
    rate = float(group["lr"]) / (1 + (float(state["step"]) - 1) * group["lr_decay"])
    return RowStep(parameter, gradient, (state["sum"],), (rate, group["eps"], 0, 0, _sign(group)))


def _adam(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> RowStep:
    state, (first, second) = optimizer.state[parameter], group["betas"]
    if not state:
        state["step"] = 0
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter, requires_grad=False) for _ in range(2))
    state["step"] += 1
    rate = float(group["lr"]) * math.sqrt(1 - second ** state["step"]) / (1 - first ** state["step"])
    rates = rate, group["eps"], 1 - first, 1 - second, _sign(group)
    return RowStep(parameter, gradient, (state["exp_avg"], state["exp_avg_sq"]), rates)


def _sign(group: dict[str, Any]) -> float:
    return -1.0 if group.get("maximize") else 1.0


_STEPS: dict[type[Optimizer], tuple[str, Callable[..., RowStep]]] = {
    torch.optim.SGD: ("sgd", _sgd),
    torch.optim.Adagrad: ("adagrad", _adagrad),
    torch.optim.SparseAdam: ("adam", _adam),
}


@torch.no_grad()
def _before(optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Does the step of rows, and hides these gradients until torch has stepped the other parameters."""
    _held.pop(optimizer, None)  # of a step of torch that raised
    if _left_alone or len(arguments) > 1 or named.get("closure") is not None:
        return  # a closure will compute new gradients
    found = {parameter: group for group in optimizer.param_groups for parameter in group["params"] if fits(parameter)}
    if not found:
        return
    kind, make = _STEPS.get(type(optimizer), ("", None))
    make = None if _has_hooks(optimizer) else make
    steps, held = list[RowStep](), list[tuple[Tensor, Tensor]]()
    for parameter, group in found.items():
        gradient = parameter.grad = coalesced(parameter.grad)
        plain = not any(group.get(flag) for flag in _FLAGS)
        if make is not None and plain and _ours(optimizer, parameter) and gradient._nnz():
            steps.append(make(optimizer, group, parameter, gradient))
            held.append((parameter, gradient))
            parameter.grad = None
    if steps:
        _held[optimizer] = held
        try:
            step_all(kind, steps)
        except BaseException:
            _after(optimizer, arguments, named)
            raise


def _has_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks of the user may read or write gradients: they run after our first hook, or before our last."""
    dicts = _dicts.get(optimizer)
    if dicts is None:
        handles = optimizer.register_step_pre_hook(_nothing), optimizer.register_step_post_hook(_nothing)
        dicts = _dicts[optimizer] = [each.hooks_dict_ref for each in handles]
        for each in handles:
            each.remove()
    hooks = (hook for of in (*dicts, *_common) for hook in (of() or {}).values())
    return not all(str(getattr(hook, "__module__", "")).startswith("gossamer.") for hook in hooks)


def _nothing(optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """A hook that does nothing."""


def _ours(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether the kernel can take the optimizer's state of a parameter."""
    states = [each for each in optimizer.state.get(parameter, {}).values() if isinstance(each, Tensor) and each.dim()]
    return all(
        each.is_cpu and each.is_contiguous() and each.dtype is parameter.dtype and each.shape == parameter.shape
        for each in states
    )


def _after(optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    for parameter, gradient in _held.pop(optimizer, ()):
        parameter.grad = gradient


@cache
def watch_optimizers() -> None:
    """Registers the hooks for steps of all torch optimizers."""
    handles = register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)
    _common.extend(each.hooks_dict_ref for each in handles)


@contextmanager
def unwatched() -> Iterator[None]:
    """Disables the hooks within the context, so that torch does all steps itself, for comparisons."""
    _left_alone.append(None)
    try:
        yield
    finally:
        _left_alone.pop()
