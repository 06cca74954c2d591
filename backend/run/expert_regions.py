"""Runs a grouped product: tokens, sorted by their expert, times the weights of the experts. Each expert has a region.

    gossamer::region([x [T, K], ends [experts], *leaves of the weights], key) -> [T, M]

Rows of x from ends[e - 1] to ends[e] go through the region of expert e. The results for rows after the last end are 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gossamer.backend.devices.device_kernel import Kernel, allocate
from gossamer.backend.devices.kernels_at_once import Call, run_at_once
from gossamer.backend.run.compiled_region import CompiledRegion
from gossamer.runtime.compiled_kernel import Memory
from gossamer.runtime.experts.routes import hit

Hit = Sequence[tuple[int, int, int]]
"""(expert, begin, end) of each expert that has tokens: its rows are [begin, end)."""


@dataclass(frozen=True, eq=False)
class ExpertRegions:
    """A region for each expert. All take the same leaves, and their results have one type."""

    experts: tuple[CompiledRegion, ...]

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of all experts, each once."""
        return tuple(dict.fromkeys(kernel for expert in self.experts for kernel in expert.kernels))

    def outputs(self, operands: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Returns the sizes and type of the result."""
        return self.experts[0].outputs(operands)

    def __call__(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        x, leaves = operands[0].contiguous(), operands[2:]
        (((tokens, m), dtype),) = self.outputs(operands)
        out = allocate((tokens, m), (m, 1), dtype)
        found = list(hit(operands[1], tokens))
        if m:
            run_each(self.experts, x, found, leaves, out)
        out[found[-1][-1] if found else 0 :].zero_()
        return out


def run_each(
    regions: Sequence[CompiledRegion], x: torch.Tensor, hit: Hit, leaves: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """Runs the contiguous rows of each expert through its region, into the same rows of `out`."""

    def call(expert: int, begin: int, end: int) -> Call | None:
        return regions[expert].prepared([part(x, begin, end), *leaves], part(out, begin, end), end - begin)

    if not at_once(call, hit):
        for expert, begin, end in hit:
            run_into(out[begin:end], regions[expert], [x[begin:end], *leaves])


def at_once(call: Callable[[int, int, int], Call | None], hit: Hit) -> bool:
    """Tries to run the calls of all experts that have tokens at once, each on one thread. Returns whether they ran."""
    calls = list[Call]()
    for each in hit:
        made = call(*each)
        if made is None:
            return False
        calls.append(made)
    return not calls or run_at_once(calls, torch.get_num_threads())


def part(rows: torch.Tensor, begin: int, end: int) -> Memory:
    """Returns the memory of rows [begin, end) of a contiguous matrix."""
    return Memory(rows.data_ptr() + begin * rows.shape[1] * rows.itemsize, (end - begin, rows.shape[1]))


def run_into(rows: torch.Tensor, region: CompiledRegion, operands: list[torch.Tensor]) -> None:
    """Computes a region into contiguous rows."""
    result = region(operands, rows)
    if result is not rows:
        rows.copy_(result)
