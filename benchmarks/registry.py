"""What a workload and a contender are, and how they are found: by their files."""

from __future__ import annotations

import importlib
import pkgutil
from argparse import Namespace, _ActionsContainer
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

Outcome = dict[str, Any]  # what came of a contender in a case, as the JSON holds it

# Whom speed-ups are given over: the packages of plug-ins, for pruned models and for operations, and their baselines.
BASELINES = {"contenders": ("dense", "inductor"), "libraries": ("csr",)}


class Unsupported(Exception):
    """A contender cannot run this problem; the message says why. Recorded as skipped, not as an error."""


class WrongResult(Exception):
    """A contender's result is not the problem's."""


@dataclass(frozen=True)
class Work:
    """What a problem's sparse operators compute in a call: `flops` densely, `nonzero_flops` without the zeros.

    `activations` counts the bytes of the dense tensors that they read and write, `weights` those of what is sparse: the
    dense form of a weight with zeros, the arrays of a matrix that is given as such.
    """

    flops: float
    nonzero_flops: float
    weights: int
    activations: int


class Problem(Protocol):
    """What contenders compute, in one floating-point type: a pruned model (`models.py`) or an operation (`operations.py`).

    `tolerance` maps a precision ("f32", "bf16") to the largest error allowed, relative to the largest
    magnitude of the float64 result. Contenders share a problem: whoever changes what is in it copies it first.
    """

    @property
    def tolerance(self) -> Mapping[str, float]: ...

    @property
    def precision(self) -> str: ...

    def reference(self) -> tuple[Any, Work]:
        """The result in float64, and the work that is done for it."""

    def error(self, result: Any, expected: Any) -> float:
        """The largest error of a result over the largest magnitude expected; WrongResult if its shape is another."""


@dataclass(frozen=True)
class Case:
    """One line of a table, with its coordinates (e.g. "tokens": 32); `build` makes the problem.

    `gflop` is what is computed in a call, by a dense model or on the entries, to foretell how long the case will take.
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

    call: Callable[[], Any]
    notes: Callable[[], dict[str, Any]] = nothing


@dataclass(frozen=True)
class Contender:
    """A way to run a problem.

    precision    what it computes in, None for that of the model
    own_threads  whether its threads are not those of PyTorch
    missing      says why it cannot run on this machine, or None
    """

    label: str
    prepare: Callable[[Any], Prepared]
    precision: str | None = None
    own_threads: bool = False
    missing: Callable[[], str | None] = field(default=lambda: None)


def plugins(package: str = "contenders") -> dict[str, Contender]:
    """Every contender that has a file: the baselines, then our own, then the peers."""

    def rank(name: str) -> tuple[bool, bool, str]:
        return name not in BASELINES[package], not name.startswith("sparse"), name

    return {name: plugin(package, name).CONTENDER for name in sorted(names(package), key=rank)}


def nothing_to_add(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    return []


@dataclass(frozen=True)
class Workload:
    """A family of cases, with the command-line options that select among them.

    contenders  who may run; by default all plug-ins for pruned models
    baselines   the contenders that speed-ups are given over
    measure     (case, contenders, threads, settings) → an outcome each; by default the race of `measure.py`
    conclude    lines of Markdown to put under the table of these cases of a report
    panels      the parameters that tell the panels of its plot apart
    across      the parameter on the plot's horizontal axis, "" for no plot of speed-ups
    preparing   seconds that a contender takes to compile a case, about
    gflops      what a contender computes a second on a core, about
    """

    summary: str
    add_arguments: Callable[[_ActionsContainer], None]
    cases: Callable[[Namespace], list[Case]]
    contenders: Callable[[], Mapping[str, Contender]] = plugins
    baselines: tuple[str, ...] = BASELINES["contenders"]
    measure: Callable[[Case, Mapping[str, Contender], int, Settings], dict[str, Outcome]] | None = None
    conclude: Callable[[Sequence[Mapping[str, Any]]], list[str]] = nothing_to_add
    panels: tuple[str, ...] = ()
    across: str = ""
    preparing: float = 0.3
    gflops: float = 100.0


def names(package: str) -> list[str]:
    """The plug-ins of `package`, "contenders", "libraries" or "workloads": `inductor_bf16.py` is called inductor-bf16."""
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
