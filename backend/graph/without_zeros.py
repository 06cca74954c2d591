"""The weights that a user could have pruned and did not: no pass has anything to say about them, but the report does."""

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor

from gossamer.backend.graph.inputs import density
from gossamer.backend.report.report import FEW_ZEROS, NO_ZEROS, Decision
from gossamer.runtime.torch_internals import is_traceable_wrapper_subclass

_SMALLEST = 256
"""Elements of a matrix from which on anybody would prune it."""

_MOST = 0.9
"""Share of nonzeros up to which a matrix counts as pruned."""


def without_zeros(parameters: Mapping[str, Tensor], told: Collection[str]) -> Iterator[Decision]:
    """Decisions about the parameters of a model that have none yet, by their names: matrices of floats and more."""
    for name, weight in parameters.items():
        plain = not is_traceable_wrapper_subclass(weight) and not weight.is_meta
        if name in told or not plain or weight.dim() < 2 or weight.numel() < _SMALLEST or not weight.is_floating_point():
            continue
        share = density(weight.detach())
        few = NO_ZEROS if share == 1 else FEW_ZEROS
        reason = few if share > _MOST else "no sparse kernel for what it is used for"
        yield Decision.dense(name, "-", weight.shape, share, reason)
