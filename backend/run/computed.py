"""Computes structures that depend only on some inputs of a graph, the leaves, and keeps them until the leaves change.

Examples are edge lists, masks, and values that depend only on these.

    gossamer::aggregate(x, leaves, numbers, weight, size, key)        `key` is the hash under which `known` finds a `Computed`
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, cast
from weakref import WeakValueDictionary

from torch import Tensor, fx

from gossamer.backend.graph.expressions import evaluated, from_steps, to_steps
from gossamer.backend.report.options import Verify
from gossamer.backend.run.lifetime import share
from gossamer.dialects.errors import CompileError
from gossamer.runtime.remembered import Compared, Remembered

LEAVES = "Tensor[] leaves, SymInt[] numbers"
"""The part of the operations' schemas for the leaves: tensors, and sizes."""


@dataclass(eq=False)
class Computed:
    """Computes a structure, and remembers the results for earlier leaves.

    evaluate  leaves and numbers → the values that the structure is made of
    compared  the leaves whose values are compared to notice changes
    """

    most: ClassVar[int | None] = None
    """The largest number of leaves whose results are kept, or None for no limit."""

    evaluate: fx.GraphModule
    compared: Compared

    def __post_init__(self) -> None:
        self._known = Remembered[Any](self.compared, self.most)

    def __reduce__(self) -> tuple[Any, ...]:
        evaluate, *others = (getattr(self, each.name) for each in fields(self))
        return _restored, (type(self), to_steps(evaluate), others)

    def shared(self, key: str) -> Self:
        """Registers this object under a key, unless one is registered already. Returns the registered one. Keep it alive: the
        table holds it by a weak reference."""
        return cast(Self, share(_table, key, cast(Computed, self)))

    def values(self, leaves: Sequence[Tensor], numbers: Sequence[int]) -> Any:
        """Computes the values that the structure is made of."""
        return evaluated(self.evaluate, leaves, numbers)

    def remembered(self, leaves: Sequence[Tensor], more: Sequence[Hashable], make: Callable[[], Any]) -> Any:
        """Returns the structure for these leaves and the further values `more`. Calls `make` if it is not known.

        The same leaves have at most `_MOST_OF_LEAVES` structures, because `more` may have sizes that grow at every call."""
        of_leaves: Remembered[Any] = self._known.get(leaves, (), _of_leaves)
        return of_leaves.get((), more, make)


_MOST_OF_LEAVES = 16


def _of_leaves() -> Remembered[Any]:
    return Remembered("none", _MOST_OF_LEAVES)


def _restored(cls: type[Computed], steps: Any, others: Sequence[Any]) -> Computed:
    return cls(from_steps(steps), *others)


_table: WeakValueDictionary[str, Computed] = WeakValueDictionary()


def known(key: str) -> Any:
    """Returns the `Computed` that is registered under a key. Raises CompileError if there is none in this process."""
    try:
        return _table[key]
    except KeyError:
        raise CompileError(
            f"what is computed under the key {key} is unknown here: its graph was compiled by another process, and torch's "
            "caches have brought its code here without what Gossamer keeps (call torch.compile again in this process)"
        ) from None


def used_in(graph: fx.Graph) -> dict[str, Computed]:
    """Returns the `Computed` objects that the operations in a graph use, by their keys. A key is the last argument."""
    keys = [node.args[-1] for node in graph.nodes if node.args and isinstance(node.args[-1], str)]
    return {key: _table[key] for key in keys if key in _table}


def compared_for(verify: Verify) -> Compared:
    """Returns the leaves whose values are compared, for this value of the option `verify`."""
    return "all" if verify == "full" else "uncounted"
