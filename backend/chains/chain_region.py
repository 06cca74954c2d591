"""What runs behind `gossamer::region` where the region is a chain: several weights, one kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gossamer.backend.calls.packed_weights import Packings
from gossamer.backend.chains.dense_chain import DenseChain
from gossamer.backend.devices.kernel import allocate
from gossamer.backend.graph.weight_expressions import run
from gossamer.runtime.packing import Packed
from gossamer.runtime.region_kernel import RegionKernel

if TYPE_CHECKING:
    from gossamer.backend.chains.find_chains import Chain


@dataclass(frozen=True, eq=False)
class ChainWeight:
    """One weight of a chain: its packings, the number of tensors that it is computed from, the density above which dense is
    faster, and whether sparse is faster even if it changes at every call."""

    packings: Packings
    leaves: int
    densest: float
    renew: bool


@dataclass(eq=False)
class CompiledChain:
    """A chain that can run, sparse or dense.

    operands     [first input, leaves of all weights, other inputs]; the first input is [sequences, length, K] where there is
                 attention, [length, sequences, K] where that is also `by_position`, else [T, K]
    body         computes it densely from (first input, weights, other inputs, length)
    attends      whether there is attention
    results      columns and type of each result
    """

    kernel: RegionKernel
    weights: tuple[ChainWeight, ...]
    body: DenseChain
    attends: bool
    by_position: bool
    verify: bool
    results: tuple[tuple[int, torch.dtype], ...]

    @classmethod
    def of(cls, chain: "Chain", kernel: RegionKernel, weights: tuple[ChainWeight, ...], verify: bool) -> "CompiledChain":
        """The chain with its kernel."""
        results = tuple((int(stage.columns), stage.output.meta["val"].dtype) for stage in chain.results)  # guards fixed them
        turned = chain.inputs[0].node in chain.by_position
        attends = chain.attention is not None
        return cls(kernel, weights, DenseChain.of(chain), attends, turned, verify, results)

    @property
    def kernels(self) -> tuple[RegionKernel, ...]:
        """The only one."""
        return (self.kernel,)

    @property
    def dtype(self) -> torch.dtype:
        """Of the first result."""
        return self.results[0][1]

    def shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Sizes of the first result for this first input."""
        return self.rows(x), self.results[0][0]

    def outputs(self, operands: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Sizes and types of all results."""
        rows = self.rows(operands[0])
        return [((rows, columns), dtype) for columns, dtype in self.results]

    def rows(self, x: torch.Tensor) -> int:
        """Rows of each result for this first input."""
        return x.shape[0] * x.shape[1] if self.attends else x.shape[0]

    def __call__(self, operands: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        x, length = operands[0], 0
        tokens = self.rows(x)
        outputs = [allocate((tokens, columns), (columns, 1), dtype) for columns, dtype in self.results]
        if tokens * self.results[0][0] == 0:
            return _one_or_all(outputs)
        if self.attends:
            length = x.shape[0 if self.by_position else 1]
            x = x.reshape(tokens, x.shape[2])
        arguments: list[torch.Tensor | Packed | int] = [x if x.is_contiguous() else x.contiguous()]
        at, hollow = 1, False
        for weight in self.weights:
            statics = operands[at : at + weight.leaves]
            at += weight.leaves
            packed = (weight.packings.verified if self.verify else weight.packings.current)(
                statics, weight.densest, weight.renew
            )
            if packed is None:
                hollow = True
                break
            arguments.append(packed)
        if hollow:
            return _one_or_all(self._run_dense(x, operands, length))
        arguments += [extra if extra.is_contiguous() else extra.contiguous() for extra in operands[at:]]
        if self.attends:
            arguments.append(length)
        results = _one_or_all(outputs)
        self.kernel(arguments, results, length)
        return results

    def _run_dense(self, x: torch.Tensor, operands: Sequence[torch.Tensor], length: int) -> list[torch.Tensor]:
        values, at = [], 1
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for weight in self.weights:
                values.append(run(weight.packings.evaluate, operands[at : at + weight.leaves]))
                at += weight.leaves
            return [result.contiguous() for result in self.body(x, values, operands[at:], length)]


def _one_or_all(results: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    return results if len(results) > 1 else results[0]
