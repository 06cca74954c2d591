"""Calibrates the grids on which layers round their inputs: one step and one zero point for each layer, from batches.

A histogram of float bits (sign, exponent, 8 bits of the mantissa) needs no range in advance, so one pass over the data is
enough. The ends of the grid are those with the least squared error of rounding and clipping. A grid up to the few largest
values would have too coarse steps for the many others (Nagel et al., A White Paper on Neural Network Quantization, 2021,
section 3.1).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.dialects.errors import OptionError
from gossamer.sparsity.pruning.batches import Call, calls_of, rows_that_count
from gossamer.sparsity.quantization.quantized_linear import InputGrid
from gossamer.sparsity.torch_functions.plain_model import called_openly, evaluating

_DROPPED = 15  # bits of a float32's mantissa that the histogram ignores
_BINS = 1 << 32 - _DROPPED
_SHARES = torch.logspace(0, -3, 64, base=2, dtype=torch.float32)
"""The ends of a grid to try, as shares of the largest value seen."""


def input_grids(model: nn.Module, layers: Sequence[nn.Module], data: Iterable[Any]) -> dict[nn.Module, InputGrid]:
    """Returns the grids of layers that get nonzeros from the batches.

    Layers that always get the same tensor, such as the query, key and value layers of attention, share a grid. OptionError if
    there are no data, or a layer gets NaN or infinity.
    """
    calls, names = calls_of(model, data), {module: name for name, module in model.named_modules()}
    seen = {layer: _Inputs(names[layer]) for layer in layers}
    watch = _Watch(seen)
    with torch.no_grad(), evaluating(model), called_openly(model), watch.hooked():
        for call in calls:
            watch.call = call
            call.of(model)
    by_inputs: dict[tuple[int, ...], InputGrid | None] = {}
    for inputs in seen.values():
        key = tuple(inputs.tensors)
        if key not in by_inputs:
            by_inputs[key] = grid_of(inputs.counts) if inputs.counts is not None else None
    grids = {layer: by_inputs[tuple(inputs.tensors)] for layer, inputs in seen.items()}
    return {layer: grid for layer, grid in grids.items() if grid is not None}


def histogram(values: Tensor) -> Tensor:
    """Returns how many of the finite values fall into each bin, int64."""
    bits = values.float().contiguous().view(torch.int32) >> _DROPPED
    return torch.bincount((bits & _BINS - 1).flatten(), minlength=_BINS)


def grid_of(counts: Tensor) -> InputGrid | None:
    """Returns the grid with the least squared error for values with this histogram, None if all are zeros."""
    bins = counts.nonzero().flatten()
    if not len(bins):
        return None
    middle = 1 << _DROPPED - 1
    bits = (bins << _DROPPED | middle).to(torch.int32)  # wraps around for bins with the sign bit
    values, weights = bits.view(torch.float32).double(), counts[bins].double()
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    if high - low < 255 * torch.finfo(torch.float32).tiny:
        return None
    shares = _SHARES.double().to(values.device).tolist()

    def best(ends: list[tuple[float, float]]) -> tuple[float, float]:
        return min(ends, key=lambda each: _error(InputGrid.between(*each), values, weights))

    least, most = low, high
    for _ in range(2):
        low, high = best([(low, most * share) for share in shares])
        low, high = best([(least * share, high) for share in shares])
    step, zero = InputGrid.between(low, high)
    return InputGrid(step.to(counts.device), zero.to(counts.device))


def _error(grid: InputGrid, values: Tensor, weights: Tensor) -> float:
    rounded = (grid.integers(values) - grid.zero) * grid.step
    return float(((rounded - values).square() * weights).sum())


@dataclass
class _Inputs:
    """The inputs of a layer: the numbers of the tensors, and the histogram of their values."""

    name: str
    tensors: list[int] = field(default_factory=list)
    counts: Tensor | None = None

    def add(self, number: int, counts: Tensor) -> None:
        self.tensors.append(number)
        self.counts = counts if self.counts is None else self.counts + counts


class _Watch:
    """Records the inputs of layers in calls of the model, by hooks."""

    def __init__(self, seen: dict[nn.Module, _Inputs]) -> None:
        self.seen = seen
        self.call: Call | None = None
        self._last: tuple[Tensor, int, int, Tensor] | None = None
        """The last tensor that was seen, its version, its number and its histogram."""

    @contextmanager
    def hooked(self) -> Iterator[None]:
        hooks = [layer.register_forward_pre_hook(self._see, with_kwargs=True) for layer in self.seen]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._last = None

    def _see(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.call is not None
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        number = 0 if self._last is None else self._last[2] + 1
        if self._last is None or self._last[0] is not x or self._last[1] != x._version:
            rows = rows_that_count(x, self.call.tokens)
            if not bool(rows.isfinite().all()):
                raise OptionError(f"the batches give '{self.seen[layer].name}' inputs with NaN or infinity: leave them out")
            self._last = (x, x._version, number, histogram(rows))
        self.seen[layer].add(*self._last[2:])
