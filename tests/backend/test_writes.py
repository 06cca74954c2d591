"""Writes are found however they are written, with all values in the memory that they change."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gossamer.backend.graph.modes import Modes
from gossamer.backend.graph.writes import seen_later, sharing, written


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> fx.Graph:
    """Returns Dynamo's graph."""
    found = list[fx.GraphModule]()

    def backend(module: fx.GraphModule, _: object) -> Callable[..., Any]:
        found.append(module)
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return found[0].graph


def remainder_(y: Tensor) -> None:
    y %= 1.0


def element_(y: Tensor) -> None:
    y[0] = 1.0


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "an operator": remainder_,
    "a method": lambda y: y.clamp_(0),
    "a method of operators": lambda y: y.__iadd__(1),
    "an element": element_,
    "a slice": lambda y: y[:, 2:].mul_(2),
    "a view of a view": lambda y: y.t()[0].fill_(1),
    "by position": lambda y: F.rrelu(y, 0.1, 0.3, False, True),
    "by keyword": lambda y: F.threshold(input=y, threshold=0.0, value=0.0, inplace=True),
    "a list": lambda y: torch._foreach_add_([y], 1.0),
    "an overload": lambda y: torch.ops.aten.add_.Tensor(y, y),
    "a result": lambda y: torch.exp(y, out=y),
    "statistics": lambda y: F.batch_norm(y, y[0], torch.ones(4), training=True),
    "renormalized rows": lambda y: F.embedding(torch.tensor([0]), y, max_norm=1.0),
    "under a checkpoint": lambda y: torch.utils.checkpoint.checkpoint(lambda y: y.mul_(2), y, use_reentrant=False),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_write_is_found(how: str) -> None:
    def function(x: Tensor) -> Tensor:
        y, _ = x * 2, x * 3
        WRITES[how](y)
        return y + 1

    graph = graph_of(function, torch.randn(4, 4))
    later = seen_later(graph, sharing(graph))
    assert [node.name for node in later if node.target is operator.mul] == ["y"]
    assert later <= written(graph) and not any(node.op == "placeholder" for node in written(graph))


def test_only_memory_that_is_read_under_another_name_counts_as_seen_later() -> None:
    def function(x: Tensor, z: Tensor) -> Tensor:
        y = F.relu(x * 2, inplace=True)
        y += z
        return F.relu_(y) @ z

    graph = graph_of(function, torch.randn(4, 4), torch.randn(4, 4))
    assert written(graph) and not seen_later(graph, sharing(graph))


def test_reading_and_training_off_write_nothing() -> None:
    def function(x: Tensor) -> Tensor:
        y = F.batch_norm(x, x[0], x[1].abs(), training=False) + F.rrelu(x, 0.1, 0.3, False, False)
        return F.embedding(torch.tensor([0]), y).__add__(1)

    assert not written(graph_of(function, torch.randn(4, 4)))


def test_modes_hold_until_they_end() -> None:
    def function(x: Tensor) -> Tensor:
        before = x * 2
        with torch.no_grad():
            inside = before.sin()
        with torch.inference_mode(), torch.enable_grad():
            inside = inside + before.cos()
        with torch.autocast("cpu", torch.bfloat16):
            cast = before @ before
        mapped = torch.vmap(torch.exp)(before)
        return before.tan() + inside + cast + mapped

    modes = Modes.of(graph_of(function, torch.randn(4, 4, requires_grad=True)))

    def called(nodes: set[fx.Node]) -> set[str]:
        return {str(getattr(node.target, "__name__", node.target)) for node in nodes}

    assert called(modes.without_gradients) >= {"sin", "cos"} and not modes.with_gradients
    assert "matmul" in called(modes.cast) and "exp" in called(modes.transformed)
    for nodes in (modes.without_gradients, modes.cast, modes.transformed):
        assert not {"tan", "mul"} & called(nodes)
