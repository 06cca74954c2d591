"""Compiles a function with the sparse backend and keeps what it decided, so that tests can tell that it ran at all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gossamer.backend import sparse
from gossamer.backend.devices import pace
from gossamer.backend.report.report import Decision, collect


@dataclass
class Run:
    """A compiled function, its first output, and the decisions made until then."""

    function: Callable[..., Any]
    output: Any
    decisions: list[Decision]

    @property
    def regions(self) -> list[Decision]:
        return [d for d in self.decisions if d.sparse]


def compile_and_run(
    function: Callable[..., Any],
    *inputs: Any,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    grad: bool = False,
    regions: int | None = None,
    **options: Any,
) -> Run:
    """One call through the backend; unless told otherwise with everything sparse, an eager remainder, and no mercy.

    As many regions have been made by then as `regions` says, one at least where it says nothing: what stays dense says 0.
    """
    given = {"dense": "eager", "min_gain": 0, "strict": True, **options}
    with collect() as collected, torch.set_grad_enabled(grad):
        compiled = torch.compile(function, backend=sparse, fullgraph=fullgraph, dynamic=dynamic, options=given)
        output = compiled(*inputs)
    run = Run(compiled, output, list(collected.decisions))
    made = len(run.regions)
    assert made == regions if regions is not None else made > 0, f"{made} regions: {run.decisions}"
    return run


def pruned(*shape: int, density: float = 0.2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal values, most of them zero."""
    return (torch.randn(*shape) * (torch.rand(*shape) < density)).to(dtype)


def prune_(module: nn.Module, density: float = 0.2, block: tuple[int, int] = (1, 1)) -> nn.Module:
    """Zeroes most of each weight matrix, in place, in aligned blocks of rows x columns."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() >= 2:
                rows, columns = (-(-size // edge) for size, edge in zip(parameter.shape, block, strict=True))
                zero = (torch.rand(rows, columns) >= density).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
                parameter[zero[: parameter.shape[0], : parameter.shape[1]]] = 0
    return module


def losses_of_steps(
    call: Callable[..., Any], optimizer: torch.optim.Optimizer, x: torch.Tensor, target: torch.Tensor, steps: int
) -> list[float]:
    """What a few steps of training come to."""
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(call(x), target)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the rounding of their type."""
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 3e-2, torch.float16: 4e-3}[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def learn(us: float) -> None:
    """Has the loop beside measurements take so many microseconds, as often as it takes to believe it."""
    for _ in range(pace._MET):
        pace.learn(us)
