"""What runs where tokens, sorted by their expert, were multiplied with the weights of the experts.

    gossamer::region([x [T, K], ends [experts], *leaves of the weights], key) -> [T, M]

Rows of x from ends[e - 1] to ends[e] go through the region of expert e, those behind the last end give 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gossamer.backend.devices.device_kernel import Kernel, allocate
from gossamer.backend.run.compiled_region import CompiledRegion


@dataclass(frozen=True, eq=False)
class ExpertRegions:
    """A region for each expert; all take the same leaves and have results of one type."""

    experts: tuple[CompiledRegion, ...]

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Those of all experts, each once."""
        return tuple(dict.fromkeys(kernel for expert in self.experts for kernel in expert.kernels))

    def outputs(self, operands: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Sizes and type of the result."""
        return self.experts[0].outputs(operands)

    def __call__(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        x, leaves = operands[0].contiguous(), operands[2:]
        (((tokens, m), dtype),) = self.outputs(operands)
        out = allocate((tokens, m), (m, 1), dtype)
        start = 0
        for expert, end in zip(self.experts, operands[1].tolist(), strict=True):
            if not start <= end <= tokens:
                raise ValueError(
                    f"experts: the tokens of one end at {end}, which must be from {start}, where those of the one before end, "
                    f"to {tokens}, the number of all (offs of grouped_mm)"
                )
            if end > start and m:
                run_into(out[start:end], expert, [x[start:end], *leaves])
            start = end
        out[start:].zero_()
        return out


def run_into(rows: torch.Tensor, region: CompiledRegion, operands: list[torch.Tensor]) -> None:
    """Computes a region into some rows, which are contiguous."""
    result = region(operands, rows)
    if result is not rows:
        rows.copy_(result)
