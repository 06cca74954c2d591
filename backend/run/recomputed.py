"""A forward pass without anything saved for gradients, which is computed again if somebody calls backward.

    y = inference(*inputs)      what a call costs: chains, several results, nothing saved but the inputs
    y.sum().backward()          computes y again, as a training graph does, and then its gradients

A model in eval mode is mostly called with gradients enabled and hardly ever differentiated. Who does call backward regularly
gets the training graph at once: see `_Habit`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from gossamer.backend.run.parameter_edges import Gradients, Way, Ways
from gossamer.runtime.operations import Node


@dataclass(eq=False)
class Recomputed:
    """A function of tensors and numbers that can be computed in three ways. Results are the same but for rounding.

    inference  as fast as possible, called without gradients
    training   with gradients, but not with gradients of gradients; called with gradients enabled
    plain      with all gradients: PyTorch's own operations, one by one
    constant   the positions of those results that have no gradient
    static     the positions of those inputs that are parameters or buffers
    moving     of those that are other tensors
    numbers    of those that are numbers
    context    what the recomputation is to run in: the autocast state of the forward pass
    ways       to the gradients of the static inputs
    """

    inference: Callable[..., Sequence[Any]]
    training: Callable[..., Sequence[Any]]
    plain: Callable[..., Sequence[Any]]
    constant: Sequence[int]
    static: Sequence[int]
    moving: Sequence[int]
    numbers: Sequence[int]
    context: Callable[[], AbstractContextManager[Any]]
    ways: Ways = field(default_factory=Ways)
    habit: "_Habit" = field(default_factory=lambda: _Habit())

    def __post_init__(self) -> None:
        self.static_of, self.moving_of, self.numbers_of = map(_picker, (self.static, self.moving, self.numbers))

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        static = self.static_of(inputs)
        way = self.ways.to(static)
        call = _Call(self, static, way)
        results: Sequence[Any] = _Recomputation.apply(call, inputs, way.handle, *self.moving_of(inputs))
        return results

    def differentiable(self, inputs: Sequence[Any], again: bool) -> "_Passed":
        """The function computed with gradients; with gradients of these if it is to be differentiated `again`."""
        # Hooks of the inputs belong to the caller's graph, so that neither way may differentiate these themselves.
        leaves = [_alias(each, again) if isinstance(each, torch.Tensor) else each for each in inputs]
        with torch.enable_grad(), self.context():
            return _Passed(leaves, self.plain(*leaves) if again else self.training(*leaves))


@dataclass(frozen=True, eq=False)
class _Passed:
    """A forward pass that can be differentiated: its inputs, without a history unless they are to have one, and its results."""

    leaves: Sequence[Any]
    results: Sequence[Any]

    def detached(self) -> list[Any]:
        """The results without their history."""
        return [each.detach() if isinstance(each, torch.Tensor) else each for each in self.results]

    def gradients(self, tangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradient of each input for these of the results, None where there is none; with gradients of their own if
        gradients are enabled."""
        wanted = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        pairs = [(y, t) for y, t in zip(self.results, tangents, strict=True) if t is not None and y.requires_grad]
        if not pairs or not wanted:
            return [None] * len(self.leaves)
        values, given = zip(*pairs, strict=True)
        again = torch.is_grad_enabled()
        found = iter(torch.autograd.grad(values, wanted, given, create_graph=again, allow_unused=True))
        return [next(found) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else None for leaf in self.leaves]


class _Call(NamedTuple):
    """A call of a function, and the way to the gradients of its static inputs. Autograd looks at none of these tensors."""

    function: Recomputed
    static: Sequence[torch.Tensor]
    way: Way


class _Recomputation(Node):
    @staticmethod
    def forward(ctx: Any, call: _Call, inputs: Sequence[Any], handle: torch.Tensor, *moving: torch.Tensor) -> Any:
        # Runs at every call: each function, and each attribute of ctx, costs 0.2 µs, and twice that where caches are cold.
        function = call.function
        # What a pass keeps for its gradients serves once. A list, because compiled autograd hands out copies of ctx.
        ctx.passed = [function.differentiable(inputs, again=False)] if function.habit.differentiates() else None
        results = ctx.passed[0].detached() if ctx.passed else _own_tensors(function.inference(*inputs))
        # To save hundreds of parameters as autograd does takes it half a microsecond each.
        ctx.call = call
        ctx.save_for_backward(*moving)
        if function.numbers:
            ctx.numbers = function.numbers_of(inputs)
        ctx.set_materialize_grads(False)
        if function.constant:
            ctx.mark_non_differentiable(*(results[place] for place in function.constant))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        passed: _Passed | None = ctx.passed.pop() if ctx.passed else None
        if passed is None or torch.is_grad_enabled():
            passed = _passed_again(ctx)
        found = passed.gradients(tangents)
        function, _, way = ctx.call
        static = function.static_of(found)
        return None, None, Gradients.of([static[place] for place in way.leads]), *function.moving_of(found)


def _passed_again(ctx: Any) -> _Passed:
    function, static, way = ctx.call
    function.habit.asked()
    moving = ctx.saved_tensors  # raises if one of them was written to since
    for tensor, version in zip(static, way.versions, strict=True):
        if tensor._version != version:
            raise RuntimeError(_WRITTEN.format(tuple(tensor.shape), tensor._version, version))
    inputs = dict(zip(function.static, static, strict=True))
    inputs |= dict(zip(function.moving, moving, strict=True))
    if function.numbers:
        inputs |= dict(zip(function.numbers, ctx.numbers, strict=True))
    return function.differentiable([inputs[place] for place in range(len(inputs))], torch.is_grad_enabled())


_WRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a parameter or buffer of "
    "shape {} is at version {}; expected version {} instead. The model is in eval mode, so its backward pass computes the "
    "forward pass again and needs all parameters as they were. Call backward before you change them, or call model.train()."
)


def _own_tensors(results: Sequence[Any]) -> Sequence[Any]:
    """The results, none of which is a view or a parameter: a function of ours may return neither, as autograd sees it."""
    return [
        each.detach() if isinstance(each, torch.Tensor) and (each._is_view() or each.requires_grad) else each
        for each in results
    ]


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A quick function that picks the elements at these places."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: [values[place] for place in places]


def _alias(tensor: torch.Tensor, connected: bool) -> torch.Tensor:
    """The same values without the tensor's hooks, with its history or without."""
    if connected:
        return tensor.view_as(tensor)
    apart = tensor.detach()
    return (
        nn.Parameter(apart, tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else apart.requires_grad_(tensor.requires_grad)
    )


@dataclass
class _Habit:
    """Whether the caller differentiates most passes; then computing them twice does not pay.

    Once that is so, the next passes are taken to be differentiated too, ever more of them. After those a few are computed as
    in inference again, to see whether it still is so.
    """

    passes: int = 0
    differentiated: int = 0
    certain: int = 0
    confidence: int = 1

    def differentiates(self) -> bool:
        """Whether backward is to be expected after the pass that begins now."""
        if self.certain:
            self.certain -= 1
            return True
        if self.differentiated >= _FEW and 2 * self.differentiated >= self.passes:
            self.confidence = min(_MOST, 8 * self.confidence)
            self.passes, self.differentiated, self.certain = 0, 0, self.confidence
            return True
        if self.passes >= _RECENT:  # what was long ago counts less
            self.confidence = self.confidence if self.differentiated else 1
            self.passes //= 2
            self.differentiated //= 2
        self.passes += 1
        return False

    def asked(self) -> None:
        """To be called when gradients of a pass are asked for that was computed as in inference."""
        self.differentiated += 1


_FEW, _RECENT, _MOST = 2, 8, 512
