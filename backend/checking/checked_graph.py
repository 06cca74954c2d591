"""Implements the option `check`: runs a graph compiled and as torch runs it, and compares both."""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from gossamer.backend.checking.differences import apart, gradients_apart
from gossamer.backend.checking.locate import Place, Ways, locate
from gossamer.backend.checking.part import copies, gradient_edges
from gossamer.backend.checking.reproducer import write_difference
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.kept_graph import KeptGraph, copied
from gossamer.dialects.errors import GossamerError


@dataclass(frozen=True)
class Difference:
    """Values of a compiled graph that differ from torch's.

    values    names of the values, each with the largest difference as a share of the largest value
    gradients whether they are gradients
    place     the part of the graph that is wrong; None if no part is wrong by itself
    file      a program that shows only this failure; None without a place, or if no file could be written
    """

    values: Sequence[tuple[str, float]]
    gradients: bool
    place: Place | None
    file: str | None

    def __str__(self) -> str:
        names = ", ".join(f"{name} by {_share(size)}" for name, size in self.values[:3])
        more = f", and in {len(self.values) - 3} more" if len(self.values) > 3 else ""
        text = f"a compiled graph differs from torch in {names} of the largest value{more}."
        if self.place is None:
            return f"{text} No part of it differs by itself."
        module = f", in module {self.place.module}" if self.place.module else ""
        lines = [text, f"  first wrong value  {self.place.node.name}{module}"]
        if self.place.line:
            lines.append(f"  your line          {self.place.line}")
        if self.place.culprit:
            name = self.place.culprit
            lines.append(f"  graph pass         {name}; options={{'disable': ['{name}']}} leaves it out")
        if self.place.kernel:
            lines.append("  kernel             with options={'schedule': 'reference'} the value is right")
        if self.file:
            lines.append(f"  program            {self.file} shows this difference alone")
        return "\n".join(lines)


def _share(size: float) -> str:
    return f"{size:.0%}" if size >= 0.01 else f"{size:.1e}"


_found: ContextVar[list[Difference] | None] = ContextVar("gossamer_differences", default=None)


@contextmanager
def collect_differences() -> Iterator[list[Difference]]:
    """Collects the differences that checked graphs find in this context, instead of warnings."""
    found = list[Difference]()
    token = _found.set(found)
    try:
        yield found
    finally:
        _found.reset(token)


class _Watched(torch.autograd.Function):
    """Copies results. In the backward pass, calls a function with their gradients."""

    @staticmethod
    def forward(ctx: Any, compare: Callable[[Sequence[Tensor | None]], None], *results: Tensor) -> tuple[Tensor, ...]:
        ctx.compare = compare
        ctx.set_materialize_grads(False)
        return tuple(each.clone() for each in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.compare(gradients)
        return None, *gradients


class CheckedGraph:
    """A compiled graph that compares itself with torch at every call, and in the backward pass. It returns the compiled
    results.

    If they differ, one warning names the part at fault; under `strict` it is an error. A call needs memory for two copies of
    all inputs, weights included, and the time of both runs.
    """

    def __init__(self, module: fx.GraphModule, inputs: Inputs, ways: Ways) -> None:
        dense = "eager" if ways.options.dense == "auto" else ways.options.dense
        self._ways = replace(ways, options=replace(ways.options, check=False, strict=False, dense=dense))
        self._kept = KeptGraph(module, sorted(inputs.statics))
        self._strict, self._told = ways.options.strict, set[bool]()
        self._names = [inputs.names.get(n, node.name) for n, node in enumerate(module.graph.find_nodes(op="placeholder"))]
        self._collected = _found.get()

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that runs the compiled function and compares."""

        @torch.compiler.disable
        def checked(*args: Any) -> Any:
            before, dense = copies(args), copies(args)
            edges = gradient_edges(args), gradient_edges(dense)
            with torch.random.fork_rng(()):
                expected = self._kept.module(*dense)
            found = compiled(*args)
            names = [f"result {n}" for n in range(len(expected))] + [f"{name} after the call" for name in self._names]
            self._compare(names, [*found, *args], [*expected, *dense], before, gradients=False)
            return self._watched(*edges, found, expected, before) if torch.is_grad_enabled() else found

        return checked

    def _watched(
        self, ours: dict[int, Any], theirs: dict[int, Any], found: Sequence[Any], expected: Sequence[Any], before: Sequence[Any]
    ) -> list[Any]:
        """Returns the results. When their gradients arrive, the gradients of the inputs are compared.

        ours, theirs  where the gradients of the inputs arrive, in the compiled graph and in torch's
        """
        results = [n for n, each in enumerate(found) if isinstance(each, Tensor) and each.requires_grad]
        if not ours or not results:
            return list(found)

        def compare(tangents: Sequence[Tensor | None]) -> None:
            given = [(n, tangent) for n, tangent in zip(results, tangents, strict=True) if tangent is not None]

            def gradients(values: Sequence[Any], inputs: dict[int, Any]) -> tuple[Tensor | None, ...]:
                return torch.autograd.grad(
                    [values[n] for n, _ in given], list(inputs.values()), [tangent for _, tangent in given],
                    retain_graph=True, allow_unused=True,
                )  # fmt: skip

            names = [f"the gradient of {self._names[n]}" for n in ours]
            self._compare(names, gradients(found, ours), gradients(expected, theirs), before, gradients=True)

        watched = dict(zip(results, _Watched.apply(compare, *(found[n] for n in results)), strict=True))
        return [watched.get(n, each) for n, each in enumerate(found)]

    def _compare(
        self, names: Sequence[str], found: Sequence[Any], expected: Sequence[Any], before: Sequence[Any], gradients: bool
    ) -> None:
        differ = (gradients_apart if gradients else apart)(names, found, expected)
        if not differ or gradients in self._told:
            return
        self._told.add(gradients)
        module = copied(self._kept.module)
        self._kept.note(module.graph.find_nodes(op="placeholder"), before)
        place = locate(module, before, self._ways, gradients)
        file = None
        if place is not None:
            file = write_difference(place.node.name, place.part.module, place.part.inputs, self._ways.options)
        difference = Difference(differ, gradients, place, file)
        if self._collected is not None:
            self._collected.append(difference)
        elif self._strict:
            raise GossamerError(str(difference))
        else:
            at = re.match(r'File "(.+)", line (\d+)', place.line if place else "")
            name, line = (at[1], int(at[2])) if at else ("torch.compile", 1)
            warnings.warn_explicit(f"gossamer: {difference}", UserWarning, name, line)
