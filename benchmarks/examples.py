"""The sources of the examples as modules. They are in no package, so they are loaded by their paths.

What a user is shown is what is measured: models, texts and graphs are those of the examples.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "examples" / "sources"


@cache
def example(name: str) -> ModuleType:
    """The module of `examples/sources/name.py`."""
    spec = importlib.util.spec_from_file_location(f"examples.{name}", FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
