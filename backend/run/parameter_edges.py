"""Keeps autograd's edges to a model's parameters, so that autograd does not collect them at every call.

    way = ways.to(parameters)             its `handle` is an empty tensor, whose node has an edge to each parameter
    y = Function.apply(way.handle, x)     autograd collects one edge, that of the handle
    Function.backward(…)                  returns `Gradients` of the handle; its node hands them on to the parameters

Collecting the edges of a hundred parameters takes as long as a small layer. A handle keeps its parameters alive. So `Ways`
keeps it only for parameters of modules that call the graph, and only as long as these live. If a parameter is replaced, the
next call or Python's garbage collection drops the handle. Models of one class may share a graph, and each has a handle.
"""

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.runtime.operations import Node

_VERSION = attrgetter("_version")
_IDENTITY = attrgetter("_cdata")
"""A number that torch.utils.swap_tensors exchanges together with a tensor's edge. `id` does not change then."""

_OF_PARAMETERS = list[Tensor | None]


class Gradients(Tensor):
    """The gradient of a handle: for each pass that used the handle, a list of the parameters' gradients.

    Autograd adds up the gradients of several passes. All other operations see an empty tensor.
    """

    passes: list[_OF_PARAMETERS]

    @staticmethod
    def of(*passes: _OF_PARAMETERS) -> "Gradients":
        """Returns the gradient for some passes. Each is a list with a gradient, or None, for each parameter."""
        made = _nothing().as_subclass(Gradients)
        made.passes = [*passes]
        return made

    def sums(self) -> _OF_PARAMETERS:
        """Returns the gradient of each parameter."""
        first, *others = self.passes
        for other in others:
            first = [b if a is None else a if b is None else a + b for a, b in zip(first, other, strict=True)]
        return first

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.add.Tensor, torch.ops.aten.detach.default):
            return cls.of(*(each for gradients in args for each in gradients.passes))
        return func(*(_nothing() if isinstance(each, cls) else each for each in args), **(kwargs or {}))


class _Edges(Node):
    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.number = len(parameters)
        return _nothing()

    @staticmethod
    def backward(ctx: Any, gradients: Gradients | None) -> Any:
        return (None,) * ctx.number if gradients is None else tuple(gradients.sums())


@dataclass(frozen=True, eq=False)
class Way:
    """The way to the gradients of some tensors at these versions.

    handle      the empty tensor to pass to an autograd.Function instead of the tensors
    leads       the indices of the tensors that require gradients; `Gradients` have an entry for each
    versions    the versions of all tensors
    identities  their `_IDENTITY`
    """

    handle: Tensor
    leads: Sequence[int]
    versions: Sequence[int]
    identities: Sequence[int]


@dataclass(eq=False)
class _Model:
    """Modules that call a graph together, and the way to their parameters."""

    modules: Sequence[weakref.ref[nn.Module]]
    way: Way

    def has(self, module: nn.Module) -> bool:
        return any(reference() is module for reference in self.modules)

    def owns(self) -> bool:
        """Whether all of the modules live and still have these parameters."""
        modules = [module for reference in self.modules if (module := reference()) is not None]
        parameters = {_IDENTITY(parameter) for module in modules for parameter in module.parameters()}
        return len(modules) == len(self.modules) and parameters.issuperset(self.way.identities[n] for n in self.way.leads)


class Ways:
    """Finds the way to tensors, and keeps it if all of them that require gradients are parameters of the caller's modules.

    callers  finds these modules in the call that runs
    """

    def __init__(self, callers: Callable[[], Sequence[nn.Module]] = tuple) -> None:
        self._callers, self._models = callers, list[_Model]()
        _all.add(self)

    def to(self, tensors: Sequence[Tensor]) -> Way:
        """Returns the way to these tensors as they are now."""
        versions, identities = [*map(_VERSION, tensors)], [*map(_IDENTITY, tensors)]
        model = next((each for each in self._models if each.way.identities == identities), None)
        if model is not None and model.way.versions == versions:
            return model.way
        leads = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
        with torch.enable_grad():
            handle = _Edges.apply(*[tensors[place] for place in leads])
        found = Way(handle, leads, versions, identities)
        if model is not None:
            model.way = found
        else:
            self._keep(found)
        return found

    def forget_replaced(self) -> None:
        """Drops the handles of modules that no longer live, or that have other parameters now."""
        self._models = [model for model in self._models if model.owns()]

    def _keep(self, way: Way) -> None:
        modules, this = self._callers(), weakref.ref(self)
        model = _Model([weakref.ref(module, lambda _: _forget(this())) for module in modules], way)
        others = [each for each in self._models if not any(map(each.has, modules))]
        self._models = [*others, model] if model.owns() else others


_all = weakref.WeakSet[Ways]()


def _at_collection(phase: str, info: Mapping[str, int]) -> None:
    if phase == "start" and info["generation"] == _OLDEST:
        for ways in list(_all):
            ways.forget_replaced()


_OLDEST = 2  # the generation of a full garbage collection
gc.callbacks.append(_at_collection)


def _forget(ways: Ways | None) -> None:
    if ways is not None:
        ways.forget_replaced()


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.float32, device="cpu")
