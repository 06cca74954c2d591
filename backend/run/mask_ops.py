"""Attention under a mask that is computed from inputs of the graph: its tiles are found when those are new, for all layers.

    gossamer::attend_under(q, k, v, leaves, numbers, scale, cap, seed, dropout, own, key) → out, statistics
    gossamer::attend_under_backward(upstream, q, k, v, out, statistics, leaves, ..., key) → gradients

`leaves` and `numbers` are what the mask is computed from, `key` is the hash under which this process knows how. Between two new
inputs no array of queries x keys is made or read. What comes out is that of gossamer::attend_masked.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast
from weakref import WeakValueDictionary

from torch import Tensor, fx

from gossamer.backend.graph.expressions import Expression, evaluated
from gossamer.backend.graph.strips import strips
from gossamer.backend.report.options import Verify
from gossamer.backend.run.lifetime import share
from gossamer.dialects.errors import CompileError
from gossamer.runtime.operations import Operation
from gossamer.runtime.remembered import Remembered
from gossamer.sparsity.attention.mask import Mask
from gossamer.sparsity.attention.masked_attention import (
    SCORING,
    Scoring,
    attend_where,
    fake,
    fake_backward,
    gradients_where,
)


class Shared:
    """What the operations find under a key, as long as somebody keeps it."""

    def shared(self, key: str) -> Self:
        """The one that is found: this one, where there is none yet."""
        return cast(Self, share(_masks, key, cast(Shared, self)))


@dataclass(eq=False)
class AttentionMask(Shared):
    """How a mask, of bools or numbers, is computed."""

    evaluate: fx.GraphModule
    _tables: Remembered[Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return AttentionMask.of, (self.evaluate, self._tables.compared == "all")

    @classmethod
    def of(cls, evaluate: fx.GraphModule, compares: bool) -> "AttentionMask":
        """One that remembers nothing yet."""
        return cls(evaluate, Remembered("all" if compares else "uncounted", most=16))

    def current(self, leaves: Sequence[Tensor], numbers: Sequence[int]) -> Mask:
        """The mask for these leaves."""

        def value() -> Tensor:
            (mask,) = evaluated(self.evaluate, leaves, numbers)
            return mask

        def known(more: Sequence[Hashable], make: Callable[[], Any]) -> Any:
            return self._tables.get(leaves, (*numbers, *more), make)

        return Mask(value, known, strips=lambda: strips(self.evaluate, leaves, numbers))


_masks: WeakValueDictionary[str, Shared] = WeakValueDictionary()


def attention_mask(expression: Expression, verify: Verify) -> str:
    """The key under which the operations find this mask."""
    key = f"{expression.key}-{verify}-mask"
    AttentionMask.of(expression.evaluate, verify == "full").shared(key)
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


def known(key: str) -> Any:
    """What is shared under a key. CompileError if this process has not compiled it."""
    try:
        return _masks[key]
    except KeyError:
        raise CompileError(
            f"mask {key} is unknown here: its graph was compiled by another process, and torch's caches have brought its code "
            "here without what Gossamer keeps (call torch.compile again in this process)"
        ) from None


GIVEN, LEAVES = "Tensor q, Tensor k, Tensor v", "Tensor[] leaves, SymInt[] numbers"
_MASK = f"{LEAVES}, {SCORING}, str key"
_attend_under = Operation(f"attend_under({GIVEN}, {_MASK}) -> (Tensor, Tensor)", _attend, fake=fake).register()
_attend_under_backward = Operation(
    f"attend_under_backward(Tensor upstream, {GIVEN}, Tensor out, Tensor statistics, {_MASK}) -> (Tensor, Tensor, Tensor)",
    _attend_backward,
    fake=fake_backward,
).register()

OPERATIONS = {_attend_under, _attend_under_backward}
"""Those whose last argument is the key of something shared."""


def used_in(graph: fx.Graph) -> dict[str, Shared]:
    """What the operations in a graph find by their keys, as long as somebody keeps it."""
    keys = [str(node.args[-1]) for node in graph.nodes if node.target in OPERATIONS]
    return {key: _masks[key] for key in keys}
