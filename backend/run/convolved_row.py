"""What runs where several convolutions stood, each a region of its own: their kernels, one after the other, in one call.

    gossamer::chain([*images, *statics], key) -> [results that others use]

The first call with some statics, and every one after they have changed, runs region by region. The second prepares what all
later ones take: packed weights, what epilogues read for each channel, and memory for what no other reads. It is prepared for
each Python thread and shape of images.
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

_MANY = 4  # shapes of images that a thread prepares


@dataclass(frozen=True, eq=False)
class ConvolvedRow:
    """Several convolutions that can run.

    given     how many operands are not static
    leaves    how many of the others `evaluate` takes, from the first one on
    evaluate  computes from them what they alone determine
    results   the numbers of the steps that others read
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
        """Those of all steps."""
        return tuple(kernel for step in self.steps for kernel in step.region.kernels)

    @property
    def about(self) -> str:
        """See labels.py."""
        return f"row of {len(self.steps)}"

    def outputs(self, operands: Sequence[torch.Tensor]) -> list[tuple[Shape, torch.dtype]]:
        """Sizes and types of all results."""
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
            prepared[shapes] = self._prepared(shapes, statics)
        ready = prepared[shapes]
        return self._by_themselves(images, statics) if ready is None else ready(images)

    def _prepared(self, shapes: Sequence[Shape], statics: Sequence[torch.Tensor]) -> Ready | None:
        return prepare(self.steps, shapes, self.results, run(self.evaluate, statics[: self.leaves]), statics)

    def _by_themselves(self, images: Sequence[torch.Tensor], statics: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results, region by region."""
        computed, images = run(self.evaluate, statics[: self.leaves]), list(images)
        for step in self.steps:
            weight = [statics[n] for n in step.leaves] if step.weight is None else [computed[step.weight]]
            extras = [(computed if static else images)[n] for static, n in step.extras]
            images.append(step.region([images[step.images], *weight, *extras]))
        return [images[self.given + n] for n in self.results]


_Prepared = dict[tuple[Shape, ...], Ready | None]


class _Known(Remembered[_Prepared]):
    """What was prepared for static tensors as they were, by sizes of images."""

    def of(self, statics: Sequence[torch.Tensor]) -> _Prepared | None:
        """That for these; None at the first call with them as they are, and where torch does not tell when they change."""
        key = tuple(map(torch.Tensor.data_ptr, statics))
        made = self._entries.get(key)
        if made is not None and made.is_current(statics):
            return made.value if made.counted else None
        made = self._begin(key, statics)
        made.value = {}
        self._put(key, made)
        return None


class _Here(threading.local):
    """What a Python thread has prepared: layers of equal sizes share a row."""

    def __init__(self) -> None:
        self.known = _Known(compared="none")
