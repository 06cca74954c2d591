"""Calls the compiled smaller graph and computes its inputs again when weights have changed.

weights                                  what a call does
unchanged                                takes the inputs as they are, after a check of versions and samples
new values, the same rows empty          computes the inputs again, into the same memory
new values at every call                 runs the whole graph until they stay the same for two calls
a nonzero in a row that was left out     compiles another smaller graph, or the whole one
gradients for weights under masks        computes the inputs with gradients, and checks the masks
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gossamer.runtime.remembered import Compared, Made, on_cpu

_RESTLESS = 3
"""Weights count as changing at every call after so many changes in a row, with one call between two changes."""

_MOST = 16
"""The most compiled graphs. Layers of one class may share Dynamo's graph, but have other empty rows."""


@dataclass(frozen=True, eq=False)
class Variant:
    """A compiled graph.

    compiled  the function
    taken     the indices of Dynamo's inputs that it takes
    leaves    the indices of Dynamo's inputs that the recipe takes
    recipe    values of leaves → (the other inputs, [whether a tensor that has to be zeros is not])
    trained   the indices of the leaves that get gradients
    """

    compiled: Callable[..., Any]
    taken: Sequence[int]
    leaves: Sequence[int]
    recipe: fx.GraphModule
    trained: frozenset[int]

    def looked_at(self, args: Sequence[Any]) -> list[Tensor]:
        """Returns the tensors that must be unchanged so that computed inputs stay valid."""
        return [args[n] for n in self.leaves if n not in self.trained] if self.trained else [args[n] for n in self.leaves]

    def inputs(self, args: Sequence[Any]) -> tuple[list[Tensor], bool]:
        """Computes the other inputs. Returns them, and whether the graph is valid for these weights."""
        with torch.autocast("cpu", enabled=False), torch.inference_mode(False), torch.set_grad_enabled(bool(self.trained)):
            inputs, nonzero = self.recipe(*[args[n] for n in self.leaves])
            return inputs, not any(map(bool, nonzero))


@dataclass(eq=False)
class _State:
    """The state of one set of weights, such as those of one layer.

    made     tells whether the weights are unchanged; its value is not used
    variant  the graph that is valid for them; None for the whole graph
    leaves   the variant whose leaves the weights are
    inputs   the computed inputs of `variant`; None if every call computes them
    calls    the number of calls since the last change
    changes  the number of changes in a row that came after a single call
    pending  whether the weights change at every call, so that nothing was computed from them
    """

    made: Made[None]
    variant: Variant | None
    leaves: Variant
    inputs: list[Tensor] | None = None
    calls: int = 0
    changes: int = 0
    pending: bool = False


class SmallerCall:
    """The function that Dynamo calls in place of a compiled graph.

    first     the graph for the weights as they are now
    another   inputs → a graph for other weights; None if none pays
    whole     inputs → the whole graph, compiled
    compared  how to find out whether weights have changed
    """

    def __init__(
        self, first: Variant, another: Callable[[Sequence[Any]], Variant | None],
        whole: Callable[[Sequence[Any]], Callable[..., Any]], compared: Compared,
    ) -> None:  # fmt: skip
        self._variants, self._another, self._make_whole, self._compared = [first], another, whole, compared
        self._whole: Callable[..., Any] | None = None
        self._states = list[_State]()
        self._lock = threading.RLock()

    def __call__(self, args: Sequence[Any]) -> Any:
        """Returns the results of Dynamo's graph for its inputs."""
        state = self._state(args)
        variant, inputs = state.variant, state.inputs
        if variant is not None and variant.trained:
            inputs, fits = variant.inputs(args)
            if not fits:
                state = self._renewed(args)
                variant = state.variant
                inputs = None if variant is None else variant.inputs(args)[0]
        state.calls += 1
        if variant is None or inputs is None:
            return self._of_all(args)(*args)
        return variant.compiled(*[args[n] for n in variant.taken], *inputs)

    def _state(self, args: Sequence[Any]) -> _State:
        for state in self._states:
            if state.made.is_current(state.leaves.looked_at(args)):
                return self._renewed(args) if state.pending else state
        return self._renewed(args)

    def _of_all(self, args: Sequence[Any]) -> Callable[..., Any]:
        with self._lock, on_cpu():
            if self._whole is None:
                self._whole = self._make_whole(args)
            return self._whole

    def _renewed(self, args: Sequence[Any]) -> _State:
        """Makes a state for weights that are new, have changed, or have stopped changing."""
        with self._lock, on_cpu():
            old = next((state for state in self._states if state.made.is_of(state.leaves.looked_at(args))), None)
            changes = old.changes + 1 if old is not None and old.calls <= 1 and not old.pending else 0
            if old is not None and old.pending and not old.made.is_current(old.leaves.looked_at(args)):
                changes = old.changes
            if old is not None:
                self._states.remove(old)
            if old is not None and changes >= _RESTLESS:
                state = self._begun(old.leaves, args)
                state.pending = True
            else:
                state = self._fitting(args, old)
            state.changes = changes
            self._states.insert(0, state)
            return state

    def _begun(self, leaves: Variant, args: Sequence[Any]) -> _State:
        """Makes a state of the weights as they are. Call this before you read them."""
        looked_at = leaves.looked_at(args)
        of = weakref.ref(self)
        made = Made[None](looked_at, self._compared, lambda _: _forget(of))
        return _State(made, None, leaves)

    def _fitting(self, args: Sequence[Any], old: _State | None) -> _State:
        """Makes a state with a graph that is valid for these weights, and its inputs. Tries the graph used before first."""
        before = [old.variant] if old is not None and old.variant is not None else []
        for variant in [*before, *[each for each in self._variants if each not in before]]:
            if (state := self._with(variant, args, old)) is not None:
                return state
        made = self._another(args) if len(self._variants) < _MOST else None
        if made is not None:
            self._variants.append(made)
            if (state := self._with(made, args, None)) is not None:
                return state
        return self._begun(self._variants[0], args)

    def _with(self, variant: Variant, args: Sequence[Any], old: _State | None) -> _State | None:
        """Makes a state with one graph; None if the graph is not valid for these weights."""
        state = self._begun(variant, args)
        inputs, fits = variant.inputs(args)
        if not fits:
            return None
        state.variant = variant
        if not variant.trained:
            before = old.inputs if old is not None and old.variant is variant else None
            state.inputs = inputs if before is None else _written(before, inputs, [args[n] for n in variant.leaves])
        return state

    def forget_the_gone(self) -> None:
        """Frees the states of weights that no longer exist."""
        self._states = [state for state in self._states if not state.made.is_gone]


def _forget(of: weakref.ref[SmallerCall]) -> None:
    if (call := of()) is not None:
        call.forget_the_gone()


def _written(old: Sequence[Tensor], new: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Writes new inputs into the memory of old ones, so that packings are renewed. Inputs that are weights stay as they are."""
    theirs = {leaf.untyped_storage()._cdata for leaf in leaves}
    with torch.inference_mode(False), torch.no_grad():
        return [
            after if {before.untyped_storage()._cdata, after.untyped_storage()._cdata} & theirs else before.copy_(after)
            for before, after in zip(old, new, strict=True)
        ]
