"""Makes the user's optimizers step masked parameters by the entries that masks keep, as vectors of these entries.

    loss.backward()         the gradient of a weight under a mask is 0 where the mask is
    optimizer.step()        parameter, gradient and state of the kept entries → vectors → the step of its class → back

For Adam and AdamW, one kernel does all of that (see one_pass.py).

Hidden entries stay as they are, in the parameter and in the state. torch steps the whole parameter if its gradient has nonzeros
at hidden entries, if it has several masks, if the mask keeps much of it, or if the optimizer is of another class.

Stored weights are such vectors already. Steps of both are one loop where torch has one (see one_loop.py).
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, WeakSet, ref

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
"""Optimizers whose step of an element depends on that element alone, and which need no step for elements without gradients."""

_TYPES = (torch.float32, torch.float64)
_FEWEST = 1 << 14  # elements; with fewer, collecting the vectors takes as long as the dozen operations of a step
_DENSEST = 0.4  # share of kept entries; above, a step on vectors takes as long as one on all elements
_DENSEST_FUSED = 0.03  # the same, against torch's fused loop over all elements
_DENSEST_IN_ONE_PASS = 0.3  # the same, for our one pass over kept entries against that fused loop

_masks: WeakKeyDictionary[torch.UntypedStorage, Tensor] = WeakKeyDictionary()
"""The mask with which a parameter was last packed, by the memory of the parameter, which no other parameter shares."""

_used: WeakKeyDictionary[torch.UntypedStorage, dict[int, ref[torch.UntypedStorage]]] = WeakKeyDictionary()
"""The memory of all masks with which a parameter was used, by their addresses. A mask that has been replaced is freed."""


def note_mask(parameter: Tensor, mask: Tensor, packed: bool = True) -> None:
    """Remembers that a parameter is used with a mask of its shape. Steps read the mask again, because it may change.

    packed  whether a sparse kernel reads the weight, so that steps are to be by the kept entries
    """
    if parameter.numel() < _FEWEST or parameter.dim() < 2 or not parameter.is_cpu or parameter.dtype not in _TYPES:
        return
    memory = _own_memory(parameter)
    if memory is None:
        return
    used = {address: each for address, each in _used.get(memory, {}).items() if each() is not None}
    _used[memory] = {**used, mask.data_ptr(): ref(mask.untyped_storage())}
    if packed and mask.is_contiguous():
        watch_optimizers()
        _masks[memory] = mask.detach()


@dataclass(frozen=True, eq=False)
class _Taken:
    """A parameter, its gradient, the entries that its mask keeps, and their gradient. A stored weight has no `kept`."""

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
        """Does the step in one pass over the parameter if a kernel can. Returns whether it did."""
        if self.kept is None or self.values is None or not can_be_one_pass(optimizer, group, state):
            return False
        step_in_one_pass(group, state, self.kept, self.parameter, self.values)
        self._kept_state(optimizer, self.kept).take_over(state)
        return True

    def state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the optimizer's state of the parameter, for a step on the vector."""
        known = optimizer.state.get(self.parameter, {})
        return known if self.kept is None else self._kept_state(optimizer, self.kept).taken(self.kept)

    def take_over(self, state: dict[str, Any], optimizer: Optimizer) -> None:
        """Takes over vector and state after a step on the vector."""
        if self.kept is None:
            optimizer.state[self.parameter] = state
            increment_version(self.parameter)  # torch's loop does not count writes to it
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
    """The steps of one optimizer. They run after the optimizer's own pre-hooks and before its post-hooks."""

    def __init__(self) -> None:
        self._taken: list[_Taken] = []
        self._hooks: list[RemovableHandle] = []

    def announce(self, optimizer: Optimizer) -> None:
        """Registers hooks for the next step. An exception may have left those of the step before."""
        self.end()
        self._hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]
        hooks: Any = self._hooks[1].hooks_dict_ref()
        hooks.move_to_end(self._hooks[1].id, last=False)

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Steps kept entries, and hides the gradients of these parameters until torch has stepped the other parameters."""
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
        """Removes the hooks of the step. It runs after all other hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._taken = [], []


def _step(optimizer: Optimizer, groups: list[tuple[dict[str, Any], list[_Taken]]], taken: list[_Taken]) -> None:
    """Does the step of an optimizer: in one pass where a kernel can, otherwise on vectors of kept entries."""
    states = {each: each.state(optimizer) for each in taken}
    left = [(group, [each for each in own if not each.step_alone(optimizer, group, states[each])]) for group, own in groups]
    _step_vectors(optimizer, left, states)
    _give_plain_states(optimizer)


def _step_vectors(
    optimizer: Optimizer, groups: list[tuple[dict[str, Any], list[_Taken]]], states: dict[_Taken, dict[str, Any]]
) -> None:
    """Runs `step` of the optimizer's class on vectors of kept entries, through a copy of the optimizer."""
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
    step = _without_hooks(kind)
    assert step is not None, "_announce has seen it"
    step(other)
    for each in taken:
        each.take_over(other.state[each.vector], optimizer)


def _without_hooks(kind: type[Optimizer]) -> Callable[[Optimizer], Any] | None:
    """Returns the `step` of a class of torch without hooks, None if other code has replaced it, for instance to time it."""
    chain: list[Any] = [kind.step]
    while (inner := getattr(chain[-1], "__wrapped__", None)) is not None:
        chain.append(inner)
    of_torch = (type(each) is FunctionType and each.__globals__["__name__"].startswith("torch.optim.") for each in chain)
    return chain[1] if len(chain) > 1 and all(of_torch) else None


def _evaluated(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Calls the closure of a step, which these optimizers do once, at the start. Returns arguments with its loss as closure."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    again = lambda: loss
    return (args, {**kwargs, "closure": again}) if "closure" in kwargs else ((args[0], again, *args[2:]), kwargs)


def _taken(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> _Taken | None:
    """Returns what a step by kept entries needs of a parameter, None if the parameter is stepped as a whole."""
    mask, gradient = _mask_of(parameter), parameter.grad
    if type(parameter) is SparseTensor and type(gradient) is SparseTensor:
        return _Taken(parameter, gradient, None, None) if _takes_stored(optimizer, group, parameter, gradient) else None
    if mask is None or gradient is None or group.get("differentiable") or not parameter.is_contiguous():
        return None
    if gradient.layout is not torch.strided or gradient.dtype is not parameter.dtype or _has_others(optimizer, parameter):
        return None
    from gossamer.sparsity.compiler.kept_entries import KeptEntries  # imported here, because it needs the compiler

    kept = KeptEntries.of(mask.flatten(1))
    if kept.coordinates.numel() > _densest(optimizer, group) * parameter.numel():
        return None
    values = kept.collected_alone(gradient)
    if values is None:
        if bool(gradient.isfinite().all()):  # the model also uses it without the mask, so hidden entries train
            del _masks[parameter.untyped_storage()]
        return None
    return _Taken(parameter, gradient, kept, values)


def _has_others(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether the state of a parameter has tensors of its shape that are not like it, for instance a user's counts."""
    known = optimizer.state.get(parameter, {})
    values = dict.values(known) if isinstance(known, KeptState) else known.values()  # so that its vectors stay ahead
    return any(
        isinstance(each, Tensor)
        and each.shape == parameter.shape
        and (each.dtype is not parameter.dtype or not _is_plain(each) or not each.is_cpu)
        for each in values
    )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (Tensor, Parameter)


def _densest(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """Returns the share of kept entries up to which only these are stepped."""
    if not group.get("fused"):
        return _DENSEST
    return _DENSEST_IN_ONE_PASS if has_one_pass(optimizer, group) else _DENSEST_FUSED


def _takes_stored(optimizer: Optimizer, group: dict[str, Any], parameter: SparseTensor, gradient: SparseTensor) -> bool:
    """Whether to step a stored weight here, in one loop, because the user's flags would take several loops."""
    if group.get("fused") or not holds(parameter, gradient):
        return False
    known = optimizer.state.get(parameter, {})
    tensors = [each for each in known.values() if isinstance(each, Tensor) and each.dim()]
    stored = all(type(each) is SparseTensor and each.dtype is parameter.dtype for each in tensors)
    return stored and can_be_one_loop(type(optimizer), group, [known])


def _mask_of(parameter: Tensor) -> Tensor | None:
    """Returns the only mask of a parameter, None if it has none or several, as in slimmable networks."""
    memory = _own_memory(parameter) if _is_plain(parameter) else None
    mask = None if memory is None else _masks.get(memory)
    if memory is None or mask is None or mask.shape != parameter.shape:
        return None
    others = (each for address, each in _used[memory].items() if address != mask.data_ptr())
    return mask if all(each() is None for each in others) else None


def _own_memory(parameter: Tensor) -> torch.UntypedStorage | None:
    """Returns the memory of a parameter, None if it is a part of a larger vector, as flattened parameters are."""
    memory = parameter.untyped_storage()
    return memory if memory.nbytes() == parameter.nbytes else None


_steps: WeakKeyDictionary[Optimizer, _Step] = WeakKeyDictionary()
_with_hook: WeakSet[Optimizer] = WeakSet()
_told: set[type[Optimizer]] = set()


def _announce(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Runs before all hooks of an optimizer."""
    if torch.compiler.is_compiling():
        return
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    masked = sum(_mask_of(parameter) is not None for parameter in given) if _masks else 0
    if not masked and not any(type(parameter) is SparseTensor for parameter in given):
        return
    kind = type(optimizer)
    if kind in _ELEMENTWISE and _without_hooks(kind) is not None:
        _steps.setdefault(optimizer, _Step()).announce(optimizer)
    elif masked and kind not in _told:
        _told.add(kind)
        log.info(
            "%s steps all entries of %d weights under masks: only optimizers of torch.optim whose own steps go element by "
            "element (Adam, AdamW, SGD, …) step by the entries that masks keep",
            kind.__name__, masked,
        )  # fmt: skip


def _end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Runs after all hooks of an optimizer."""
    if not torch.compiler.is_compiling() and (step := _steps.get(optimizer)) is not None:
        step.end()


def _give_plain_states(optimizer: Optimizer) -> None:
    """Makes `state_dict` of an optimizer return plain dictionaries, as torch does."""
    if optimizer not in _with_hook:
        _with_hook.add(optimizer)
        optimizer.register_state_dict_post_hook(_plain_states)


def _plain_states(optimizer: Optimizer, found: dict[str, Any]) -> None:
    found["state"] = {key: dict(each) if isinstance(each, KeptState) else each for key, each in found["state"].items()}


@cache
def watch_optimizers() -> None:
    """Makes all optimizers step masked and stored weights by kept entries from now on."""
    register_optimizer_step_pre_hook(_announce)
    register_optimizer_step_post_hook(_end)
