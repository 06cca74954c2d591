"""Runs actions as soon as a module of torch or of another library is loaded, without loading it.

torch._dynamo and torch._inductor take seconds and a hundred megabytes. Programs without torch.compile need neither.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[], Any]]] = {}
_begun: set[str] = set()  # modules that were being loaded when something began to wait for them


def when_loaded(name: str, action: Callable[[], Any]) -> None:
    """Runs the action now if the module is loaded, else right after it is loaded.

    If the module is just being loaded, for example because its own imports lead here, the action runs at the next import.
    """
    if name in sys.modules and not _is_being_loaded(name):
        action()
        return
    if name in sys.modules:
        _begun.add(name)
    _waiting.setdefault(name, []).append(action)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _is_being_loaded(name: str) -> bool:
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)  # importlib has no public name


def _do(name: str) -> None:
    for action in _waiting.pop(name, []):
        action()


class _Finder:
    """Finds modules with waiting actions as Python itself does, and makes their loader run these actions."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        for each in [each for each in _begun if not _is_being_loaded(each)]:
            _begun.discard(each)
            _do(each)
        if name not in _waiting:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _do(name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_FINDER: Any = _Finder()
