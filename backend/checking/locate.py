"""Finds where a compiled graph goes wrong: a small part that is wrong by itself, and the graph pass that makes it wrong.

Three binary searches find them, over the nodes 0 to n of the graph and over the graph passes:

the end      the first node such that the part from node 0 to it is wrong
the start    the last node from which the part to that end is still wrong
the pass     the first graph pass with which this part is wrong
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from gossamer.backend.checking.differences import is_inexact
from gossamer.backend.checking.part import Compile, Part, calls, computed
from gossamer.backend.report.options import Options


@dataclass(frozen=True)
class Place:
    """Where a graph goes wrong.

    part    the smallest part found that is wrong by itself
    node    the node whose value, or whose gradient, is wrong
    culprit the first graph pass with which the part is wrong; None if it is wrong without passes, or not each time
    kernel  whether the part is right with the schedule "reference"
    """

    part: Part
    node: fx.Node
    culprit: str | None
    kernel: bool

    @property
    def line(self) -> str:
        """The user's line behind the node; empty if torch has not kept it."""
        trace = [line.strip() for line in (self.node.meta.get("stack_trace") or "").strip().splitlines()]
        return next((line for line in reversed(trace) if line.startswith("File ")), "")

    @property
    def module(self) -> str:
        """The path of the innermost module that computes the node; empty outside of modules."""
        stack = list((self.node.meta.get("nn_module_stack") or {}).values())
        return re.sub(r"^L\['\w+'\]\.?", "", stack[-1][0]) if stack else ""


@dataclass(frozen=True)
class Ways:
    """How graphs are compiled: the function, the options, and the names of the steps that options can disable, in their
    order."""

    compile: Compile
    options: Options
    steps: Sequence[str]


def locate(module: fx.GraphModule, inputs: Sequence[Any], ways: Ways, gradients: bool) -> Place | None:
    """Returns the place where a Dynamo graph goes wrong on these inputs; None if no part is wrong by itself.

    gradients  whether to compare gradients instead of results
    """
    values, nodes = computed(module, inputs), calls(module.graph)
    ends = [n for n, node in enumerate(nodes) if isinstance(values[node], Tensor) and is_inexact(values[node])]

    def wrong(start: int, end: int) -> bool:
        return not Part.of(module, values, nodes[start : end + 1]).is_right(ways.compile, ways.options, gradients)

    found = bisect_left(ends, True, key=lambda end: wrong(0, end))
    if found == len(ends):
        return None
    end = ends[found]
    start = end - bisect_left(range(end), True, key=lambda length: wrong(end - length, end))
    part = Part.of(module, values, nodes[start : end + 1])

    def right(**changed: Any) -> bool:
        return part.is_right(ways.compile, replace(ways.options, **changed), gradients)

    def right_with(steps: int) -> bool:
        return right(disable=[*ways.options.disable, *ways.steps[steps:]])

    steps = bisect_left(range(len(ways.steps) + 1), True, key=lambda steps: not right_with(steps))
    culprit = ways.steps[steps - 1] if 0 < steps <= len(ways.steps) else None  # beyond: the fault did not occur again
    return Place(part, nodes[end], culprit, right(schedule="reference"))
