"""Lists weights that a user could have pruned but did not. No pass decides about them, but the report shows them."""

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor, fx

from gossamer.backend.graph.inputs import density
from gossamer.backend.report.report import FEW_ZEROS, NO_PRODUCT, NO_ZEROS, Decision
from gossamer.runtime.torch_internals import is_traceable_wrapper_subclass

_SMALLEST = 256
"""Smaller matrices, in elements, are not listed, because nobody prunes them."""

_MOST = 0.9
"""Matrices with at most this share of nonzeros count as pruned."""


_NO_PRODUCTS = {"embedding", "embedding_bag", "add", "iadd", "sub"}
"""Functions and methods that take as long for a zero as for any other value."""

_SPREADS = {"getitem", "expand", "expand_as", "view", "reshape", "unsqueeze", "squeeze", "repeat", "to", "contiguous"}
"""Functions and methods whose result has the same values as their operand."""


def without_zeros(
    parameters: Mapping[str, Tensor], told: Collection[str], multiplied: Collection[str]
) -> Iterator[Decision]:  # fmt: skip
    """Yields decisions about those parameters of a model that no decision is about yet. Only floats of two or more dimensions.

    parameters  the parameters, by their names
    told        the names in decisions so far
    multiplied  the names of parameters for which `is_multiplied` is true
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
    """Whether a graph of Dynamo uses a value for more than look-ups, as of embeddings, and additions."""
    return any(
        is_multiplied(user) if (name := _name(user)) in _SPREADS else name not in _NO_PRODUCTS for user in node.users
    )  # fmt: skip


def _name(node: fx.Node) -> str:
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", node.op))
