"""gossamer::masked_gradient(g, x, mask): (gᵀ x) * mask, summed where the mask is not 0 alone.

    g [tokens, rows], x [tokens, columns], mask [rows, columns], all of one float type, on CPUs

What the mask keeps is found when it is new. What it hides is 0, whatever g and x are there.
"""

import torch
from torch import Tensor

from gossamer.backend.graph.kept_entries import KeptEntries
from gossamer.runtime.direct_call import describe
from gossamer.runtime.operations import LIBRARY, TAGS, implement
from gossamer.sparsity.kernels.spreading import spread
from gossamer.sparsity.operations.token_samples import FEWEST, sampled_over_tokens


def _on_cpu(g: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    if g.shape[0] < FEWEST:
        return g.mT @ x * mask
    kept = KeptEntries.of(mask)
    values = sampled_over_tokens(kept.positions, kept.coordinates, g.contiguous(), x.contiguous())
    values = values if kept.factors is None else values.mul_(kept.factors)
    return spread(kept.positions, kept.coordinates, values, mask.shape[1])


def _fake(g: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    return g.new_empty(mask.shape)


LIBRARY.define("masked_gradient(Tensor g, Tensor x, Tensor mask) -> Tensor", tags=TAGS)
implement("masked_gradient", _on_cpu)
describe("masked_gradient", _fake)

masked_gradient = torch.ops.gossamer.masked_gradient.default
