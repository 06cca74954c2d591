"""Autograd's edges to a model's parameters, asked for once instead of at every call.

    way = ways.to(parameters)             its `handle` is a tensor without elements, whose node has an edge to each of them
    y = Function.apply(way.handle, x)     autograd asks the handle for an edge, not each parameter
    Function.backward(…)                  returns `Gradients` of the handle; its node hands them on to the parameters

For a hundred parameters, asking takes as long as a small layer. A handle keeps its parameters alive. So it is kept only for
parameters of the modules that a graph was compiled for, and only as long as these live. If a parameter is replaced, the handle
goes at the next call, or when Python collects garbage.
"""

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.runtime.operations import Node

_VERSION = attrgetter("_version")
_IDENTITY = attrgetter("_cdata")
"""A number that torch.utils.swap_tensors exchanges together with a tensor's edge; `id` would stay."""

_OF_PARAMETERS = list[Tensor | None]


class Gradients(Tensor):
    """The gradient of a handle: a list of the parameters' gradients for each pass that has the handle.

    Autograd adds up what the passes return. All other operations see a tensor without elements, which it is.
    """

    passes: list[_OF_PARAMETERS]

    @staticmethod
    def of(*passes: _OF_PARAMETERS) -> "Gradients":
        """The gradient for lists of one gradient, or None, for each parameter."""
        made = _nothing().as_subclass(Gradients)
        made.passes = [*passes]
        return made

    def sums(self) -> _OF_PARAMETERS:
        """The gradient of each parameter."""
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
    """The way to the gradients of some tensors, as they were at these versions.

    handle  to be passed to an autograd.Function in place of the tensors
    leads   the places of those that require gradients, for which `Gradients` are to be given
    """

    handle: Tensor
    leads: Sequence[int]
    versions: Sequence[int]
    identities: Sequence[int]


class Ways:
    """Finds the way to tensors, and keeps it if all of them that require gradients are parameters of these modules."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        this = weakref.ref(self)
        self._modules = [weakref.ref(module, lambda _: _forget(this())) for module in modules]
        self.kept: Way | None = None
        _all.add(self)

    def to(self, tensors: Sequence[Tensor]) -> Way:
        """The way to these tensors as they are now."""
        versions, identities, kept = [*map(_VERSION, tensors)], [*map(_IDENTITY, tensors)], self.kept
        if kept is not None and kept.versions == versions and kept.identities == identities:
            return kept
        leads = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
        with torch.enable_grad():
            handle = _Edges.apply(*[tensors[place] for place in leads])
        found = Way(handle, leads, versions, identities)
        known = kept is not None and kept.identities == identities
        self.kept = found if known or self._own(identities[place] for place in leads) else None
        return found

    def forget_replaced(self) -> None:
        """Drops the handle if a module has other parameters by now."""
        kept = self.kept
        if kept is not None and not self._own(kept.identities[place] for place in kept.leads):
            self.kept = None

    def _own(self, identities: Iterable[int]) -> bool:
        modules = [module for reference in self._modules if (module := reference()) is not None]
        parameters = {_IDENTITY(parameter) for module in modules for parameter in module.parameters()}
        return len(modules) == len(self._modules) and parameters.issuperset(identities)


_all = weakref.WeakSet[Ways]()


def _at_collection(phase: str, info: Mapping[str, int]) -> None:
    if phase == "start" and info["generation"] == _OLDEST:
        for ways in list(_all):
            ways.forget_replaced()


_OLDEST = 2
gc.callbacks.append(_at_collection)


def _forget(ways: Ways | None) -> None:
    if ways is not None:
        ways.kept = None


def _nothing() -> Tensor:
    return torch.empty(0, device="cpu")
