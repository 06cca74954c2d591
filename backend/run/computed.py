"""What operations of a graph compute from some of its inputs, the leaves, when these are new: edge lists, masks, and values
that depend on them alone.

    gossamer::aggregate(x, leaves, numbers, weight, size, key)        `key` is the hash under which this process knows how
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
"""What the operations take for them: tensors, and sizes."""


@dataclass(eq=False)
class Computed:
    """How something is computed.

    evaluate  leaves and numbers → the values that it is made of
    compared  of which leaves the values are compared
    """

    most: ClassVar[int | None] = None
    """How many results are kept."""

    evaluate: fx.GraphModule
    compared: Compared

    def __post_init__(self) -> None:
        self._known = Remembered[Any](self.compared, self.most)

    def __reduce__(self) -> tuple[Any, ...]:
        evaluate, *others = (getattr(self, each.name) for each in fields(self))
        return _restored, (type(self), to_steps(evaluate), others)

    def shared(self, key: str) -> Self:
        """The one that the operations find under a key: this one, where there is none yet, as long as somebody keeps it."""
        return cast(Self, share(_table, key, cast(Computed, self)))

    def values(self, leaves: Sequence[Tensor], numbers: Sequence[int]) -> Any:
        """What it is made of, computed now."""
        return evaluated(self.evaluate, leaves, numbers)

    def remembered(self, leaves: Sequence[Tensor], more: Sequence[Hashable], make: Callable[[], Any]) -> Any:
        """What was made of these leaves, and of what else it depends on."""
        return self._known.get(leaves, more, make)


def _restored(cls: type[Computed], steps: Any, others: Sequence[Any]) -> Computed:
    return cls(from_steps(steps), *others)


_table: WeakValueDictionary[str, Computed] = WeakValueDictionary()


def known(key: str) -> Any:
    """What is found under a key. CompileError if this process has not compiled it."""
    try:
        return _table[key]
    except KeyError:
        raise CompileError(
            f"what is computed under the key {key} is unknown here: its graph was compiled by another process, and torch's "
            "caches have brought its code here without what Gossamer keeps (call torch.compile again in this process)"
        ) from None


def used_in(graph: fx.Graph) -> dict[str, Computed]:
    """What the operations in a graph find by their keys, which are their last arguments."""
    keys = [node.args[-1] for node in graph.nodes if node.args and isinstance(node.args[-1], str)]
    return {key: _table[key] for key in keys if key in _table}


def compared_for(verify: Verify) -> Compared:
    """Of which leaves the values are compared, if that is how changes are noticed."""
    return "all" if verify == "full" else "uncounted"
