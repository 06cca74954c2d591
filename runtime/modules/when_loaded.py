"""What is to be done once a module of torch is loaded, without loading it.

torch._dynamo and torch._inductor take seconds and a hundred megabytes. Who computes without torch.compile needs neither.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[], Any]]] = {}


def when_loaded(name: str, action: Callable[[], Any]) -> None:
    """Does it now if the module is loaded, else right after it has been."""
    if name in sys.modules:
        action()
        return
    _waiting.setdefault(name, []).append(action)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder:
    """Finds modules that are waited for as Python does by itself, and has their loader do what waits."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            for action in _waiting.pop(name, []):
                action()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_FINDER: Any = _Finder()
