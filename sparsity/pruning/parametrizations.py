"""Registers and removes parametrizations so that copies of a module stay independent, and modules can be pickled.

torch gives a parametrized module a class of its own, whose properties compute the tensors. A copy of the module (copy.deepcopy,
AveragedModel) has the same class, so torch's functions would change both. The functions here copy the class first.

ParametrizedLinear   of layer and copy    →    remove_parametrizations(copy, "weight")    →    ParametrizedLinear   of layer
                                                                                              Linear               of copy

torch refuses to pickle such a module, because no Python file defines its class. Modules that are registered here can be
pickled.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize


def register_parametrization(module: nn.Module, name: str, parametrization: nn.Module) -> None:
    """Puts a parametrization on a tensor of a module, after those that it has."""
    with _own_class(module):
        parametrize.register_parametrization(module, name, parametrization)


def remove_parametrizations(module: nn.Module, name: str, *, keep_value: bool = True) -> None:
    """Makes a tensor a plain parameter again, with the computed value (`keep_value`) or with the value of the parameter."""
    with _own_class(module):
        parametrize.remove_parametrizations(module, name, leave_parametrized=keep_value)


@contextmanager
def _own_class(module: nn.Module) -> Iterator[None]:
    """Gives a module a class of its own within the context, which torch's functions may change.

    `prepare` and FSDP2 derive another class from that of torch. This class is removed within the context, and derived again
    from the new one afterwards.
    """
    outer, names = type(module), getattr(module, "parametrizations", {}).keys()
    inner = next((kind for kind in outer.__mro__ if names & vars(kind).keys()), None)
    if inner is not None:
        module.__class__ = _copied(inner, inner.__bases__)
    try:
        yield
    finally:
        if parametrize.is_parametrized(module):
            _let_pickle(type(module))
        if inner is not None and inner is not outer:
            bases = tuple(type(module) if base is inner else base for base in outer.__bases__)
            module.__class__ = _copied(outer, bases)


def _copied(kind: type, bases: tuple[type, ...]) -> type:
    own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__, bases, own)


def _let_pickle(kind: type) -> None:
    """Makes pickles of a module store the parts of its class, which torch has made."""
    if "__getstate__" in vars(kind):  # torch's, which raises
        del kind.__getstate__
        kind.__reduce_ex__ = _reduced  # type: ignore[method-assign, assignment]


def _reduced(module: Any, protocol: Any) -> tuple[Any, ...]:
    made = next(kind for kind in type(module).__mro__ if vars(kind).get("__reduce_ex__") is _reduced)
    return _blank, (made.__bases__[0], list(module.parametrizations)), *object.__reduce_ex__(module, 2)[2:]


def _blank(kind: type[nn.Module], names: Sequence[str]) -> nn.Module:
    """Returns a module without its state, whose tensors of these names are parametrized. Unpickling starts with it."""
    own_copying = {"__deepcopy__": kind.__deepcopy__} if hasattr(kind, "__deepcopy__") else {}
    pattern = type(kind.__name__, (nn.Module,), own_copying)()
    for name in names:
        pattern.register_buffer(name, torch.empty(0))
        register_parametrization(pattern, name, nn.Identity())
    made = kind.__new__(kind)
    made.__class__ = _copied(type(pattern), (kind,))
    return made
