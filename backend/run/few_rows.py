"""Runs a dense product of a few rows.

    gossamer::region([x [T, K], weight [N, K]], key) -> [T, N]

A kernel for mixtures of experts reads the weight in place, as the only expert, which all rows chose.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.backend.devices.device_kernel import Kernel, allocate


@dataclass(frozen=True, eq=False)
class FewRows:
    """A product with this number of `rows`, by a kernel for the products of experts (see dialects/experts.py)."""

    kernel: Kernel
    rows: int

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return (self.kernel,)

    def outputs(self, operands: Sequence[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Returns the sizes and type of the result."""
        x, weight = operands
        return [((self.rows, weight.shape[0]), x.dtype)]

    def __call__(self, operands: Sequence[Tensor]) -> Tensor:
        x, weight = operands
        outputs = weight.shape[0]
        out = allocate((self.rows, outputs), (outputs, 1), x.dtype)
        self.kernel([x.contiguous(), weight.unsqueeze(0), *_others(self.rows, outputs)], out)
        return out


@lru_cache(maxsize=256)
def _others(rows: int, outputs: int) -> tuple[Tensor, ...]:
    """Returns the kernel's other operands: empty scales, an empty bias, and routes that send all rows to the only expert."""
    scales, bias = torch.empty(0, outputs, 1, device="cpu"), torch.empty(0, outputs, device="cpu")
    return scales, bias, torch.tensor([0, rows], device="cpu"), torch.arange(rows, device="cpu")
