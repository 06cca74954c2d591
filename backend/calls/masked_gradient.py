"""gossamer::masked_gradient(g, x, mask): (gᵀ x) * mask, summed where the mask is not 0 alone.

    g [tokens, rows], x [tokens, columns], mask [rows, columns], all of one float type, on CPUs

What the mask keeps is found when it is new. What it hides is 0, whatever g and x are there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.runtime.operations import LIBRARY, TAGS, implement
from gossamer.runtime.remembered import Remembered
from gossamer.sparsity.kernels.warm_memory import empty
from gossamer.sparsity.operations.token_samples import FEWEST, sampled_over_tokens


@dataclass(frozen=True, eq=False)
class _Kept:
    """What a mask keeps as CSR, its places in the flat mask, and the factors, None where all are 1."""

    positions: Tensor
    coordinates: Tensor
    places: Tensor
    factors: Tensor | None

    @classmethod
    def of(cls, mask: Tensor) -> "_Kept":
        kept = mask != 0
        places = kept.flatten().nonzero().flatten()
        positions = torch.zeros(mask.shape[0] + 1, dtype=torch.int64)
        torch.cumsum(kept.sum(1), 0, out=positions[1:])
        factors = mask.flatten()[places]
        return cls(positions, (places % mask.shape[1]).int(), places, None if bool((factors == 1).all()) else factors)


_kept: Remembered[_Kept] = Remembered(most=256)


def _on_cpu(g: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    if g.shape[0] < FEWEST:
        return g.mT @ x * mask
    kept = _kept.get([mask], (), lambda: _Kept.of(mask))
    out = empty(mask.shape, mask.dtype).zero_()  # in memory that is mapped: fresh pages would take twice as long
    if kept.places.numel():
        values = sampled_over_tokens(kept.positions, kept.coordinates, g.contiguous(), x.contiguous())
        out.view(-1).index_copy_(0, kept.places, values if kept.factors is None else values.mul_(kept.factors))
    return out


def _fake(g: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    return g.new_empty(mask.shape)


LIBRARY.define("masked_gradient(Tensor g, Tensor x, Tensor mask) -> Tensor", tags=TAGS)
implement("masked_gradient", _on_cpu)
torch.library.register_fake("gossamer::masked_gradient", _fake, lib=LIBRARY)

masked_gradient = torch.ops.gossamer.masked_gradient.default
