"""Runs a forward pass as in inference, and computes it again if somebody calls backward. `compile_eval.py` uses it.

    y = inference(*inputs)      runs chains, and saves nothing but the inputs
    y.sum().backward()          computes y again with the training graph, and then its gradients

Most models in eval mode are called with gradients enabled, but hardly ever differentiated. If a caller regularly calls
backward, the training graph runs at once (see `_Habit`).
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
from gossamer.runtime.torch_internals import saved_tensors_hooks


@dataclass(eq=False)
class Recomputed:
    """A function of tensors and numbers in three versions. Their results differ only by rounding.

    inference  the fastest version, called without gradients
    training   the version with gradients, but without gradients of gradients; called with gradients enabled
    plain      the version with all gradients: PyTorch's own operations, one by one
    constant   the indices of results that have no gradient
    static     the indices of inputs that are parameters or buffers
    moving     the indices of inputs that are other tensors
    numbers    the indices of inputs that are numbers
    context    a context for the recomputation, which sets the autocast state and defaults of the forward pass
    ways       finds the autograd handle of the static inputs (see parameter_edges.py)
    habit      notes whether callers ask for gradients
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
        """Computes the function with gradients. With `again`, the gradients have gradients, too."""
        # Hooks of the inputs belong to the caller's graph. So both versions differentiate aliases of the inputs.
        leaves = [_alias(each, again) if isinstance(each, torch.Tensor) else each for each in inputs]
        with torch.enable_grad(), self.context():
            return _Passed(leaves, self.plain(*leaves) if again else self.training(*leaves))


@dataclass(frozen=True, eq=False)
class _Passed:
    """A forward pass that can be differentiated.

    leaves   aliases of its inputs, with a history only for gradients of gradients
    results  its results
    """

    leaves: Sequence[Any]
    results: Sequence[Any]

    def detached(self) -> list[Any]:
        """Returns the results without their history."""
        return [each.detach() if isinstance(each, torch.Tensor) else each for each in self.results]

    def gradients(self, tangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns the gradient of each input, or None if it has none, for these gradients of the results.

        The gradients have gradients of their own if gradients are enabled."""
        wanted = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        pairs = [(y, t) for y, t in zip(self.results, tangents, strict=True) if t is not None and y.requires_grad]
        if not pairs or not wanted:
            return [None] * len(self.leaves)
        values, given = zip(*pairs, strict=True)
        again = torch.is_grad_enabled()
        found = iter(torch.autograd.grad(values, wanted, given, create_graph=again, allow_unused=True))
        return [next(found) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else None for leaf in self.leaves]


class _Call(NamedTuple):
    """A call of a function, and the way to the gradients of its static inputs. Autograd does not see the tensors in it."""

    function: Recomputed
    static: Sequence[torch.Tensor]
    way: Way


class _Recomputation(Node):
    @staticmethod
    def forward(ctx: Any, call: _Call, inputs: Sequence[Any], handle: torch.Tensor, *moving: torch.Tensor) -> Any:
        # Runs at every call. Each function call, and each attribute of ctx, takes 0.2 µs, or 0.4 µs if caches are cold.
        function = call.function
        # The saved tensors of a pass serve only one backward pass. A list, because compiled autograd copies ctx.
        # Under hooks, every pass saves the same tensors. torch's checkpoints compare those of a pass and of its repetition.
        at_once = function.habit.differentiates() and saved_tensors_hooks(True) is None
        ctx.passed = [function.differentiable(inputs, again=False)] if at_once else None
        results = ctx.passed[0].detached() if ctx.passed else _own_tensors(function.inference(*inputs))
        # Parameters are not saved with `save_for_backward`, which takes half a microsecond for each of hundreds.
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
    """Computes a forward pass again. Raises RuntimeError if somebody has written to an input since."""
    function, static, way = ctx.call
    function.habit.asked()
    moving = ctx.saved_tensors  # raises if somebody has written to one of them
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
    """Returns the results, detached if they are views or parameters. Autograd forbids our function to return these."""
    return [
        each.detach() if isinstance(each, torch.Tensor) and (each._is_view() or each.requires_grad) else each
        for each in results
    ]


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns a fast function that picks the elements with these indices."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: [values[place] for place in places]


def _alias(tensor: torch.Tensor, connected: bool) -> torch.Tensor:
    """Returns an alias without the tensor's hooks, which has its history only if it is `connected`."""
    return tensor.view_as(tensor) if connected else leaf_without_hooks(tensor)


def leaf_without_hooks(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an alias of a tensor without its hooks and history, which requires gradients if the tensor does."""
    apart = tensor.detach()
    return (
        nn.Parameter(apart, tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else apart.requires_grad_(tensor.requires_grad)
    )


@dataclass
class _Habit:
    """Predicts whether the caller will differentiate a pass. If so, computing passes twice costs more than it saves.

    If the caller differentiates at least half of some passes, the next `confidence` passes run the training graph. Then some
    passes run as in inference again, to test the prediction. Each time that it holds, `confidence` grows eightfold.

    passes          recent passes that ran as in inference
    differentiated  those among them whose gradients somebody asked for
    certain         passes that still run the training graph
    """

    passes: int = 0
    differentiated: int = 0
    certain: int = 0
    confidence: int = 1

    def differentiates(self) -> bool:
        """Whether the caller will probably differentiate the pass that begins now."""
        if self.certain:
            self.certain -= 1
            return True
        if self.differentiated >= _FEW and 2 * self.differentiated >= self.passes:
            self.confidence = min(_MOST, 8 * self.confidence)
            self.passes, self.differentiated, self.certain = 0, 0, self.confidence
            return True
        if self.passes >= _RECENT:  # older passes count less
            self.confidence = self.confidence if self.differentiated else 1
            self.passes //= 2
            self.differentiated //= 2
        self.passes += 1
        return False

    def asked(self) -> None:
        """Notes that somebody asked for gradients of a pass that ran as in inference."""
        self.differentiated += 1


_FEW, _RECENT, _MOST = 2, 8, 512  # differentiated passes for a prediction, passes that count fully, largest confidence
