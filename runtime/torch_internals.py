"""The private names of torch that the house uses, all of them and here alone. torch_names.py has their table.

    from gossamer.runtime.torch_internals import compile_fx

gives torch's own object, found when it is first asked for: no module of torch is loaded before. A torch that lacks it gives the
stand-in of its entry, and what needs it is off: a warning says so once, and so do `gossamer.explain` and `off`.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from gossamer.dialects.errors import GossamerError
from gossamer.runtime.modules import compiling, sizes
from gossamer.runtime.modules.when_loaded import when_loaded
from gossamer.runtime.torch_names import PRIVATE, Private


def off(feature: str) -> str | None:
    """Why a feature is off with this torch, as a sentence; None if it is not."""
    for name, private in PRIVATE.items():
        if private.feature == feature:
            _get(name)
    return _off.get(feature)


def known_off() -> list[str]:
    """What was found to be off so far, as sentences."""
    return list(_off.values())


def refusal(feature: str) -> Callable[..., Any] | None:
    """What raises GossamerError where the feature is asked for, if it is off."""
    return None if off(feature) is None else _refusing(feature)


def _refusing(feature: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise GossamerError(_off[feature])

    return refuse


def _in_transform() -> bool:
    """By the one of two names that is there."""
    found = (_get(name) for name in ("layers_of_transforms", "transforms_active"))
    return any(ask() for ask in found if ask is not _in_transform)


for _name in ("layers_of_transforms", "transforms_active"):
    PRIVATE[_name] = replace(PRIVATE[_name], stand_in=_in_transform)  # each looks for the other, which a table cannot

_off: dict[str, str] = {}


def __getattr__(name: str) -> Any:
    if name not in PRIVATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: it is no entry of PRIVATE")
    return _get(name)


def _get(name: str) -> Any:
    if name not in globals():
        globals()[name] = _found(PRIVATE[name])
    return globals()[name]


def _found(private: Private) -> Any:
    module, _, attributes = private.path.partition(":")
    try:
        home = value = import_module(module)
        for attribute in attributes.split("."):
            value = getattr(value, attribute)
        return home if private.changing else value
    except (ImportError, AttributeError):
        if private.feature not in _off:
            where = private.path.replace(":", ".")
            _off[private.feature] = (
                f"{private.feature}: off, because torch {torch.__version__} has no {where} ({private.purpose})"
            )
            warnings.warn(f"gossamer: {_off[private.feature]}", stacklevel=3)
        return _refusing(private.feature) if private.stand_in is None else private.stand_in


if torch.__version__ < "2.13":
    when_loaded("torch._dynamo.callback", lambda: compiling.hold(_get("callback_handler"), _get("compiler_flags")))
when_loaded("torch.fx.experimental.symbolic_shapes", lambda: sizes.take(_get("statically_known_true"), _get("guard_or_true")))
