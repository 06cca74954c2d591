"""Gives access to the private names of torch. Only this file touches them; torch_names.py has their table.

    from gossamer.runtime.torch_internals import compile_fx

imports torch's own object at its first use; no module of torch is loaded before. If this torch lacks the name, the import gives
the stand-in of the table, and the feature that needs the name is off. One warning says so, and so do `gossamer.explain` and
`off`.
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
    """Returns why a feature is off with this torch, as a sentence; None if it is on."""
    for name, private in PRIVATE.items():
        if private.feature == feature:
            _get(name)
    return _off.get(feature)


def known_off() -> list[str]:
    """Returns sentences on the features that were found to be off so far."""
    return list(_off.values())


def refusal(feature: str) -> Callable[..., Any] | None:
    """Returns a function that raises GossamerError if the feature is off, else None."""
    return None if off(feature) is None else _refusing(feature)


def _refusing(feature: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise GossamerError(_off[feature])

    return refuse


def _in_transform() -> bool:
    """Whether a transform of torch.func runs, by the one of two names that this torch has. The stand-in for both names."""
    found = (_get(name) for name in ("layers_of_transforms", "transforms_active"))
    return any(ask() for ask in found if ask is not _in_transform)


for _name in ("layers_of_transforms", "transforms_active"):
    PRIVATE[_name] = replace(PRIVATE[_name], stand_in=_in_transform)  # each falls back to the other name

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
