"""Runs several convolutions in one call: their kernels, one after the other.

    gossamer::chain([*images, *statics], key) -> [results that others use]

The first call with new or changed statics runs each region by itself. The second call prepares all later ones: it packs
weights, computes the operands of epilogues for each channel, and allocates memory for intermediate results (see
row_of_kernels.py). Each Python thread prepares its own calls, for each shape of images.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from gossamer.backend.devices.device_kernel import Kernel
from gossamer.backend.graph.weight_expressions import run
from gossamer.backend.run.layouts import Shape
from gossamer.backend.run.row_of_kernels import Ready, Step, prepare
from gossamer.runtime.remembered import Remembered

_MANY = 4  # shapes of images that a thread keeps prepared


@dataclass(frozen=True, eq=False)
class ConvolvedRow:
    """Several convolutions that can run.

    steps     the convolutions, in order
    given     the number of operands that are not static; they come first
    leaves    the number of statics that `evaluate` takes: the first so many
    evaluate  computes the tensors that depend only on these statics
    results   the numbers of the steps whose results the graph uses
    """

    steps: tuple[Step, ...]
    given: int
    leaves: int
    evaluate: Callable[..., Sequence[torch.Tensor]]
    results: tuple[int, ...]
    _here: "_Here" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_here", _Here())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, each.name) for each in fields(self) if each.init)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of all steps."""
        return tuple(kernel for step in self.steps for kernel in step.region.kernels)

    @property
    def about(self) -> str:
        """Words for the label of a call (see labels.py)."""
        return f"row of {len(self.steps)}"

    def outputs(self, operands: Sequence[torch.Tensor]) -> list[tuple[Shape, torch.dtype]]:
        """Returns the sizes and type of each result."""
        made, shapes = [], [tuple(each.shape) for each in operands[: self.given]]
        for step in self.steps:
            made += step.region.layout.outputs(shapes[step.images])
            shapes.append(made[-1][0])
        return [made[n] for n in self.results]

    def __call__(self, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        images, statics = operands[: self.given], operands[self.given :]
        prepared = self._here.known.of(statics)
        if prepared is None:
            return self._by_themselves(images, statics)
        images = [each if each.is_contiguous() else each.contiguous() for each in images]
        shapes = tuple([each.shape for each in images])
        if shapes not in prepared:
            if len(prepared) == _MANY:
                prepared.clear()
            prepared[shapes] = self._prepared(images, statics)
        ready = prepared[shapes]
        return self._by_themselves(images, statics) if ready is None else ready(images)

    def _prepared(self, images: Sequence[torch.Tensor], statics: Sequence[torch.Tensor]) -> Ready | None:
        return prepare(self.steps, images, self.results, run(self.evaluate, statics[: self.leaves]), statics)

    def _by_themselves(self, images: Sequence[torch.Tensor], statics: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Computes the results region by region."""
        computed, images = run(self.evaluate, statics[: self.leaves]), list(images)
        for step in self.steps:
            weight = [statics[n] for n in step.leaves] if step.weight is None else [computed[step.weight]]
            extras = [(computed if static else images)[n] for static, n in step.extras]
            images.append(step.region([images[step.images], *weight, *extras]))
        return [images[self.given + n] for n in self.results]


_Prepared = dict[tuple[Shape, ...], Ready | None]


class _Known(Remembered[_Prepared]):
    """The prepared calls for static tensors, by the shapes of images."""

    def of(self, statics: Sequence[torch.Tensor]) -> _Prepared | None:
        """Returns the prepared calls for these statics.

        Returns None at the first call with their current values, and always if torch does not count all writes to them."""
        key = tuple(map(torch.Tensor.data_ptr, statics))
        made = self._entries.get(key)
        if made is not None and made.is_current(statics):
            return made.value if made.counted else None
        made = self._begin(key, statics)
        made.value = {}
        self._put(key, made)
        return None


class _Here(threading.local):
    """The prepared calls of one Python thread: two threads must not share their memory. Layers of equal sizes share a row."""

    def __init__(self) -> None:
        self.known = _Known(compared="none")
