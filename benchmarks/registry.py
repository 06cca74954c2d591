"""What a workload and a contender are, and how they are found: by their files."""

from __future__ import annotations

import importlib
import pkgutil
from argparse import Namespace, _ActionsContainer
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

Outcome = dict[str, Any]  # what came of a contender in a case, as the JSON holds it


class Unsupported(Exception):
    """A contender cannot run this problem; the message says why. Recorded as skipped, not as an error."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A model in eval mode (its zeros are the sparsity), in one floating-point type, and the tensors that it is called with.

    `tolerance` maps a precision ("f32", "bf16") to the largest error allowed, relative to the largest
    magnitude of the float64 result. Contenders share the model: whoever changes it copies it first.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    tolerance: Mapping[str, float]

    @property
    def precision(self) -> str:
        return "bf16" if next(self.model.parameters()).dtype == torch.bfloat16 else "f32"


@dataclass(frozen=True)
class Case:
    """One line of a table, with its coordinates (e.g. "tokens": 32); `build` makes the problem.

    `gflop` is what the dense model computes in a call, to foretell how long the case will take.
    """

    name: str
    parameters: Mapping[str, str | int | float]
    build: Callable[[], Problem]
    gflop: float = 0.0


@dataclass(frozen=True)
class Settings:
    """How samples are taken: `repeats` of them, each of at least `min_sample` seconds.

    A contender that would need more than `seconds` for that gives fewer, but at least 5. `cold` empties Inductor's
    caches before each preparation.
    """

    repeats: int = 20
    min_sample: float = 1e-3
    seconds: float = 2.0
    cold: bool = False


def nothing() -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Prepared:
    """A problem made ready: `call` computes the result; `notes` gives facts for the JSON."""

    call: Callable[[], Tensor]
    notes: Callable[[], dict[str, Any]] = nothing


@dataclass(frozen=True)
class Contender:
    """A way to run a problem.

    precision    what it computes in, None for that of the model
    own_threads  whether its threads are not those of PyTorch
    missing      says why it cannot run on this machine, or None
    """

    label: str
    prepare: Callable[[Problem], Prepared]
    precision: str | None = None
    own_threads: bool = False
    missing: Callable[[], str | None] = field(default=lambda: None)


def plugins() -> dict[str, Contender]:
    """Every contender that has a file: the baselines, then our own, then the peers."""

    def rank(name: str) -> tuple[bool, bool, str]:
        return name not in BASELINES, not name.startswith("sparse"), name

    return {name: contender(name) for name in sorted(names("contenders"), key=rank)}


def nothing_to_add(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    return []


@dataclass(frozen=True)
class Workload:
    """A family of cases, with the command-line options that select among them.

    contenders  who may run; by default all plug-ins
    measure     (case, contenders, threads, settings) → an outcome each; by default the race of `measure.py`
    conclude    lines of Markdown to put under the table of these cases of a report
    panels      the parameters that tell the panels of its plot apart
    across      the parameter on the plot's horizontal axis, "" for no plot of speed-ups
    preparing   seconds that a contender takes to compile a case, about
    """

    summary: str
    add_arguments: Callable[[_ActionsContainer], None]
    cases: Callable[[Namespace], list[Case]]
    contenders: Callable[[], Mapping[str, Contender]] = plugins
    measure: Callable[[Case, Mapping[str, Contender], int, Settings], dict[str, Outcome]] | None = None
    conclude: Callable[[Sequence[Mapping[str, Any]]], list[str]] = nothing_to_add
    panels: tuple[str, ...] = ()
    across: str = ""
    preparing: float = 0.3


BASELINES = ("dense", "inductor")  # the contenders that speed-ups are given over


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
