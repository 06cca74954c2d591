"""What a workload and a contender are, and how they are found: by their files."""

from __future__ import annotations

import importlib
import pkgutil
from argparse import Namespace, _ActionsContainer
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import Tensor, nn


class Unsupported(Exception):
    """A contender cannot run this problem; the message says why. Recorded as skipped, not as an error."""


@dataclass(frozen=True)
class Problem:
    """A float32 model in eval mode (its zeros are the sparsity) and the tensors that it is called with.

    `tolerance` maps a precision ("f32", "bf16") to the largest error allowed, relative to the largest
    magnitude of the float64 result. Contenders share the model: whoever changes it copies it first.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    tolerance: Mapping[str, float]


@dataclass(frozen=True)
class Case:
    """One line of a table, with its coordinates (e.g. "tokens": 32); `build` makes the problem."""

    name: str
    parameters: Mapping[str, str | int | float]
    build: Callable[[], Problem]


@dataclass(frozen=True)
class Workload:
    """A family of cases, with the command-line options that select among them."""

    summary: str
    add_arguments: Callable[[_ActionsContainer], None]
    cases: Callable[[Namespace], list[Case]]


def nothing() -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Prepared:
    """A problem made ready: `call` computes the result; `notes` gives facts for the JSON."""

    call: Callable[[], Tensor]
    notes: Callable[[], dict[str, Any]] = nothing


@dataclass(frozen=True)
class Contender:
    """A way to run a problem. `missing` says why it cannot run on this machine, or None."""

    label: str
    prepare: Callable[[Problem], Prepared]
    precision: str = "f32"
    missing: Callable[[], str | None] = field(default=lambda: None)


def names(package: str) -> list[str]:
    """The plug-ins of `package`, "contenders" or "workloads": `inductor_bf16.py` is called inductor-bf16."""
    folder = importlib.import_module(f"benchmarks.{package}")
    return [found.name.replace("_", "-") for found in pkgutil.iter_modules(folder.__path__)]


def plugin(package: str, name: str) -> ModuleType:
    """The module of a plug-in; ValueError names the valid ones."""
    valid = names(package)
    if name not in valid:
        raise ValueError(f"no '{name}' among the {package}: {', '.join(valid)}")
    return importlib.import_module(f"benchmarks.{package}.{name.replace('-', '_')}")


def contender(name: str) -> Contender:
    found: Contender = plugin("contenders", name).CONTENDER
    return found


def workload(name: str) -> Workload:
    found: Workload = plugin("workloads", name).WORKLOAD
    return found
