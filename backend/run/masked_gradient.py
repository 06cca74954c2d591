"""gossamer::masked_gradient(g, x, mask) returns (gᵀ x) * mask. It sums only entries where the mask is not 0.

    g [tokens, rows], x [tokens, columns], mask [rows, columns], all of one float type, on CPUs

The kept entries are listed again if the mask changes. All other entries are 0, whatever values g and x have.
"""

from torch import Tensor

from gossamer.runtime.operations import Operation
from gossamer.sparsity.compiler.kept_entries import KeptEntries
from gossamer.sparsity.operations.token_samples import FEWEST, sampled_over_tokens


def _on_cpu(g: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    if g.shape[0] < FEWEST:
        return g.mT @ x * mask
    kept = KeptEntries.of(mask)
    values = sampled_over_tokens(kept.positions, kept.coordinates, g.contiguous(), x.contiguous())
    values = values if kept.factors is None else values.mul_(kept.factors)
    return kept.spread(values, mask.shape[1])


masked_gradient = Operation(
    "masked_gradient(Tensor g: F[tokens rows], Tensor x: F[tokens columns], Tensor mask: F[rows columns])"
    " -> Tensor: F[rows columns]",
    _on_cpu,
).register()
