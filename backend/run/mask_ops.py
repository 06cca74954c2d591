"""Runs attention under a mask that is computed from inputs of the graph. New inputs give new tiles, once for all layers.

    gossamer::attend_under(q, k, v, leaves, numbers, scale, cap, seed, dropout, own, key) → out, statistics
    gossamer::attend_under_backward(upstream, q, k, v, out, statistics, leaves, ..., key) → gradients

The mask is computed from `leaves` and `numbers` by the `Computed` under `key` (computed.py). While these inputs stay the same,
no array of queries x keys is made or read. The results are those of gossamer::attend_masked.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from gossamer.backend.graph.expressions import Expression
from gossamer.backend.graph.strips import strips
from gossamer.backend.report.options import Verify
from gossamer.backend.run.computed import LEAVES, Computed, compared_for, known
from gossamer.runtime.operations import Operation
from gossamer.sparsity.attention.mask import Mask
from gossamer.sparsity.attention.masked_attention import (
    SCORING,
    Scoring,
    attend_where,
    fake,
    fake_backward,
    gradients_where,
)


@dataclass(eq=False)
class AttentionMask(Computed):
    """A mask, of bools or numbers."""

    most: ClassVar[int | None] = 16

    def current(self, leaves: Sequence[Tensor], numbers: Sequence[int]) -> Mask:
        """Returns the mask for these leaves."""

        def value() -> Tensor:
            mask: Tensor
            (mask,) = self.values(leaves, numbers)
            return mask

        def remembered(more: Sequence[Hashable], make: Callable[[], Any]) -> Any:
            return self.remembered(leaves, (*numbers, *more), make)

        return Mask(value, remembered, strips=lambda: strips(self.evaluate, leaves, numbers))


def attention_mask(expression: Expression, verify: Verify) -> str:
    """Registers a mask. Returns the key under which the operations find it."""
    key = f"{expression.key}-{verify}-mask"
    AttentionMask(expression.evaluate, compared_for(verify)).shared(key)
    return key


def _attend(q: Tensor, k: Tensor, v: Tensor, leaves: list[Tensor], numbers: list[int], *given: Any) -> tuple[Tensor, Tensor]:
    *how, key = given
    return attend_where(q, k, v, known(key).current(leaves, numbers), Scoring(*how))


def _attend_backward(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    statistics: Tensor,
    leaves: list[Tensor],
    numbers: list[int],
    *given: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    *how, key = given
    return gradients_where(upstream, (q, k, v), out, statistics, known(key).current(leaves, numbers), Scoring(*how))


GIVEN = "Tensor q, Tensor k, Tensor v"
_MASK = f"{LEAVES}, {SCORING}, str key"
_attend_under = Operation(f"attend_under({GIVEN}, {_MASK}) -> (Tensor, Tensor)", _attend, fake=fake).register()
_attend_under_backward = Operation(
    f"attend_under_backward(Tensor upstream, {GIVEN}, Tensor out, Tensor statistics, {_MASK}) -> (Tensor, Tensor, Tensor)",
    _attend_backward,
    fake=fake_backward,
).register()

OPERATIONS = {_attend_under, _attend_under_backward}
"""The operations whose arguments include `leaves` and `numbers` of masks. flex_ops.py adds its own."""
