"""Steps of optimizers for the entries that masks keep: the user's own optimizer takes them, on vectors of these entries.

    loss.backward()         the gradient of a weight under a mask is 0 where the mask is
    optimizer.step()        parameter, gradient and state of the kept entries → vectors → the step of its class → back

For Adam and AdamW, one kernel does all of that (see one_pass.py).

What the mask hides is left as it is, in the parameter and in the state. A parameter is stepped as a whole, as torch does, where
its gradient has anything that the mask hides, where the mask keeps much of it, and by other optimizers.

Stored weights are such vectors already. Steps of both are one loop where torch has one (see one_loop.py).
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, optim
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gossamer.sparsity.tensor.sparse_tensor import SparseTensor
from gossamer.sparsity.training.kept_state import KeptState
from gossamer.sparsity.training.one_loop import can_be_one_loop, holds, in_one_loop
from gossamer.sparsity.training.one_pass import can_be_one_pass, has_one_pass, step_in_one_pass

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from gossamer.sparsity.compiler.kept_entries import KeptEntries

log = logging.getLogger("gossamer")

_ELEMENTWISE = {
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.RMSprop, optim.Adagrad, optim.Adadelta,
}  # fmt: skip
"""Optimizers whose step of an element depends on that element, and on nothing for an element that never has a gradient."""

_TYPES = (torch.float32, torch.float64)
_FEWEST = 1 << 14  # elements: the dozen operations of a step take as long as getting vectors ready
_DENSEST = 0.4  # share of kept entries above which vectors take as long as all elements
_DENSEST_FUSED = 0.03  # the same where one loop goes over all elements
_DENSEST_IN_ONE_PASS = 0.3  # the same if kept entries are stepped in one pass

_masks: WeakKeyDictionary[torch.UntypedStorage, Tensor] = WeakKeyDictionary()
"""By the memory of a parameter, the mask under which it was used last."""


def note_mask(parameter: Tensor, mask: Tensor) -> None:
    """Takes note that a parameter is used under a mask, of the same shape, which may change. Steps look at both."""
    large = parameter.numel() >= _FEWEST and parameter.dim() > 1
    if large and parameter.is_cpu and parameter.dtype in _TYPES and mask.is_contiguous():
        watch_optimizers()
        _masks[parameter.untyped_storage()] = mask.detach()


@dataclass(frozen=True, eq=False)
class _Taken:
    """A parameter, its gradient, what a mask keeps, and the gradient of that. A stored weight has no `kept`."""

    parameter: Tensor
    gradient: Tensor
    kept: "KeptEntries | None"
    values: Tensor | None

    @cached_property
    def vector(self) -> Tensor:
        """The kept entries, with their gradient. A stored weight is such a vector itself."""
        if self.kept is None:
            return self.parameter
        vector = Parameter(self.kept.collected(self.parameter))
        vector.grad = self.values
        return vector

    def step_alone(self, optimizer: Optimizer, group: dict[str, Any], state: dict[str, Any]) -> bool:
        """Does the step in one pass over the parameter, if there is a kernel for that; whether it is done."""
        if self.kept is None or self.values is None or not can_be_one_pass(optimizer, group, state):
            return False
        step_in_one_pass(group, state, self.kept, self.parameter, self.values)
        self._kept_state(optimizer, self.kept).take_over(state)
        return True

    def state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What an optimizer remembers of it, for a step on the vector."""
        known = optimizer.state.get(self.parameter, {})
        return known if self.kept is None else self._kept_state(optimizer, self.kept).taken(self.kept)

    def take_over(self, state: dict[str, Any], optimizer: Optimizer) -> None:
        """Takes over what a step of the vector has left."""
        if self.kept is None:
            optimizer.state[self.parameter] = state
            increment_version(self.parameter)  # no loop counts its writes
            return
        self._kept_state(optimizer, self.kept).take_over(state)
        self.kept.put(self.vector, self.parameter)
        if getattr(optimizer, "grad_scale", None) is not None:  # a fused step has divided by it
            assert self.vector.grad is not None
            self.kept.put(self.vector.grad, self.gradient)

    def _kept_state(self, optimizer: Optimizer, kept: "KeptEntries") -> KeptState:
        known = optimizer.state.get(self.parameter, {})
        if not isinstance(known, KeptState):
            known = optimizer.state[self.parameter] = KeptState(known, kept, self.parameter.shape)
        return known


class _Step:
    """The steps of one optimizer: they begin when its own hooks have run, and end before those that run afterwards."""

    def __init__(self) -> None:
        self._taken: list[_Taken] = []
        self._hooks: list[RemovableHandle] = []

    def announce(self, optimizer: Optimizer) -> None:
        """Has the next step begin here, whatever became of the one before."""
        self.end()
        self._hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]
        hooks: Any = self._hooks[1].hooks_dict_ref()
        hooks.move_to_end(self._hooks[1].id, last=False)

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Steps kept entries, and takes the gradients of these parameters away until torch has done the others."""
        changed = _evaluated(args, kwargs)
        groups = [(group, list(self._takes(optimizer, group))) for group in optimizer.param_groups]
        if self._taken:
            _step(optimizer, groups, self._taken)
        for each in self._taken:
            each.parameter.grad = None
        return changed

    def _takes(self, optimizer: Optimizer, group: dict[str, Any]) -> Iterator[_Taken]:
        for parameter in group["params"]:
            taken = _taken(optimizer, group, parameter)
            if taken is not None:
                self._taken.append(taken)
                yield taken

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for each in self._taken:
            each.parameter.grad = each.gradient

    def end(self) -> None:
        """After all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._taken = [], []


def _step(optimizer: Optimizer, groups: list[tuple[dict[str, Any], list[_Taken]]], taken: list[_Taken]) -> None:
    """The step of an optimizer: in one pass where there is a kernel for it, the others on vectors of kept entries."""
    states = {each: each.state(optimizer) for each in taken}
    left = [(group, [each for each in own if not each.step_alone(optimizer, group, states[each])]) for group, own in groups]
    _step_vectors(optimizer, left, states)
    _give_plain_states(optimizer)


def _step_vectors(
    optimizer: Optimizer, groups: list[tuple[dict[str, Any], list[_Taken]]], states: dict[_Taken, dict[str, Any]]
) -> None:
    """The step of an optimizer's class, for vectors of kept entries."""
    taken = [each for _, own in groups for each in own]
    if not taken:
        return
    kind, other = type(optimizer), cast("Any", object.__new__(type(optimizer)))
    own_groups = list[dict[str, Any]]()
    for group, own in groups:
        one = can_be_one_loop(kind, group, [states[each] for each in own])
        vectors = {**group, "params": [each.vector for each in own]}
        own_groups.append(in_one_loop(vectors) if one else vectors)
    given = {each.vector: states[each] for each in taken}
    other.__dict__.update(optimizer.__dict__, param_groups=own_groups, state=defaultdict(dict, given))
    kind.step.__wrapped__(other)  # type: ignore[attr-defined]  # without hooks
    for each in taken:
        each.take_over(other.state[each.vector], optimizer)


def _evaluated(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments of a step whose closure was called, which these optimizers do once, before all else."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    again = lambda: loss
    return (args, {**kwargs, "closure": again}) if "closure" in kwargs else ((args[0], again, *args[2:]), kwargs)


def _taken(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> _Taken | None:
    """A parameter that steps by its kept entries, None if it steps as a whole."""
    mask, gradient = _mask_of(parameter), parameter.grad
    if type(parameter) is SparseTensor and type(gradient) is SparseTensor:
        return _Taken(parameter, gradient, None, None) if _takes_stored(optimizer, group, parameter, gradient) else None
    if mask is None or gradient is None or group.get("differentiable") or not parameter.is_contiguous():
        return None
    if gradient.layout is not torch.strided or gradient.dtype is not parameter.dtype:
        return None
    from gossamer.sparsity.compiler.kept_entries import KeptEntries  # which needs the compiler

    kept = KeptEntries.of(mask.flatten(1))
    if kept.coordinates.numel() > _densest(optimizer, group) * parameter.numel():
        return None
    values = kept.collected_alone(gradient)
    if values is None:
        if bool(gradient.isfinite().all()):  # it is used without the mask, too: what that hides is trained
            del _masks[parameter.untyped_storage()]
        return None
    return _Taken(parameter, gradient, kept, values)


def _densest(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """The share of kept entries up to which they are stepped alone."""
    if not group.get("fused"):
        return _DENSEST
    return _DENSEST_IN_ONE_PASS if has_one_pass(optimizer, group) else _DENSEST_FUSED


def _takes_stored(optimizer: Optimizer, group: dict[str, Any], parameter: SparseTensor, gradient: SparseTensor) -> bool:
    """Whether one loop steps a stored weight that would take several."""
    if group.get("fused") or not holds(parameter, gradient):
        return False
    known = optimizer.state.get(parameter, {})
    stored = all(type(each) is SparseTensor for each in known.values() if isinstance(each, Tensor) and each.dim())
    return stored and can_be_one_loop(type(optimizer), group, [known])


def _mask_of(parameter: Tensor) -> Tensor | None:
    plain = parameter.layout is torch.strided and type(parameter) in (Tensor, Parameter)
    mask = _masks.get(parameter.untyped_storage()) if plain else None
    return mask if mask is not None and mask.shape == parameter.shape else None


_steps: WeakKeyDictionary[Optimizer, _Step] = WeakKeyDictionary()
_with_hook: WeakSet[Optimizer] = WeakSet()
_told: set[type[Optimizer]] = set()


def _announce(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before all hooks of an optimizer."""
    if torch.compiler.is_compiling():
        return
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    masked = sum(_mask_of(parameter) is not None for parameter in given) if _masks else 0
    if not masked and not any(type(parameter) is SparseTensor for parameter in given):
        return
    kind = type(optimizer)
    if kind in _ELEMENTWISE:
        _steps.setdefault(optimizer, _Step()).announce(optimizer)
    elif masked and kind not in _told:
        _told.add(kind)
        log.info(
            "%s steps all entries of %d weights under masks: only optimizers of torch.optim whose steps go element by element "
            "(Adam, AdamW, SGD, …) step by the entries that masks keep",
            kind.__name__, masked,
        )  # fmt: skip


def _end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """After all hooks of an optimizer."""
    if not torch.compiler.is_compiling() and (step := _steps.get(optimizer)) is not None:
        step.end()


def _give_plain_states(optimizer: Optimizer) -> None:
    """Has `state_dict` of an optimizer hold dictionaries of torch."""
    if optimizer not in _with_hook:
        _with_hook.add(optimizer)
        optimizer.register_state_dict_post_hook(_plain_states)


def _plain_states(optimizer: Optimizer, found: dict[str, Any]) -> None:
    found["state"] = {key: dict(each) if isinstance(each, KeptState) else each for key, each in found["state"].items()}


@cache
def watch_optimizers() -> None:
    """Has all optimizers step masked and stored weights by kept entries, from now on."""
    register_optimizer_step_pre_hook(_announce)
    register_optimizer_step_post_hook(_end)
