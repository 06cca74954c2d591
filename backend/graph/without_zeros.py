"""The weights that a user could have pruned and did not: no pass has anything to say about them, but the report does."""

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor, fx

from gossamer.backend.graph.inputs import density
from gossamer.backend.report.report import FEW_ZEROS, NO_PRODUCT, NO_ZEROS, Decision
from gossamer.runtime.torch_internals import is_traceable_wrapper_subclass

_SMALLEST = 256
"""Elements of a matrix from which on anybody would prune it."""

_MOST = 0.9
"""Share of nonzeros up to which a matrix counts as pruned."""


_NO_PRODUCTS = {"embedding", "embedding_bag", "add", "iadd", "sub"}
"""Functions and methods that take as long for a zero as for any other value."""

_SPREADS = {"getitem", "expand", "expand_as", "view", "reshape", "unsqueeze", "squeeze", "repeat", "to", "contiguous"}
"""Functions and methods with the same values as their operand."""


def without_zeros(
    parameters: Mapping[str, Tensor], told: Collection[str], multiplied: Collection[str]
) -> Iterator[Decision]:  # fmt: skip
    """Decisions about the parameters of a model that have none yet, by their names: matrices of floats and more.

    `multiplied` are the names of those that a graph does more with than to look them up and to add them.
    """
    for name, weight in parameters.items():
        plain = not is_traceable_wrapper_subclass(weight) and not weight.is_meta
        if name in told or not plain or weight.dim() < 2 or weight.numel() < _SMALLEST or not weight.is_floating_point():
            continue
        share = density(weight.detach())
        few = NO_ZEROS if share == 1 else FEW_ZEROS
        reason = few if share > _MOST else "no sparse kernel for what it is used for"
        if name not in multiplied:
            reason = NO_PRODUCT
        yield Decision.dense(name, "-", weight.shape, share, reason)


def is_multiplied(node: fx.Node) -> bool:
    """Whether a graph of Dynamo does more with a value than to look it up, as embeddings are, and to add it."""
    return any(
        is_multiplied(user) if (name := _name(user)) in _SPREADS else name not in _NO_PRODUCTS for user in node.users
    )  # fmt: skip


def _name(node: fx.Node) -> str:
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", node.op))
