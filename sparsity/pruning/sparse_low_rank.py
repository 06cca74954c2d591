"""Splits a matrix into a sparse and a low-rank one, W ~ S + U V, by alternating projection.

    repeat    U V = the best approximation of W - S of some rank        (truncated singular value decomposition)
              S   = the largest elements of W - U V

Columns are scaled by the size of their inputs, as in OATS (Zhang and Papyan, 2025, algorithm 2). U V takes a few large
features, and rows that resemble each other, so S needs no nonzeros for them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gossamer.sparsity.pruning.parametrizations import register_parametrization
from gossamer.sparsity.pruning.patterns import Pattern, mask_of

_WHOLE = 2048
"""Up to this size all singular values are computed. Larger matrices use a randomised method for the largest ones."""


@dataclass(frozen=True)
class Budget:
    """How many numbers the parts of a matrix may have.

    density     numbers of S, U and V together, as a share of the elements
    rank_share  the share of these numbers in U and V
    """

    density: float
    rank_share: float

    def rank(self, rows: int, columns: int) -> int:
        """Returns the rank of U V: at least 1, or 0 if `rank_share` is 0."""
        if self.rank_share == 0:
            return 0
        return max(1, int(self.density * self.rank_share * rows * columns / (rows + columns)))

    def nonzeros(self, rows: int, columns: int) -> float:
        """Returns the density of S that U V leaves; 0 if U V takes all numbers."""
        return max(0.0, self.density - self.rank(rows, columns) * (rows + columns) / (rows * columns))


@dataclass(frozen=True)
class Parts:
    """S [outputs, inputs] with zeros, U [outputs, rank] and V [rank, inputs]."""

    sparse: Tensor
    first: Tensor
    second: Tensor

    @property
    def whole(self) -> Tensor:
        """S + U V."""
        return self.sparse + self.first @ self.second


def split(weight: Tensor, budget: Budget, pattern: Pattern, scale: Tensor | None = None, steps: int = 20) -> Parts:
    """Returns the parts of a matrix [outputs, inputs]. `scale` [inputs] is the size of each input."""
    rows, columns = weight.shape
    scaled = weight if scale is None else weight * scale
    rank, density = min(budget.rank(rows, columns), rows, columns), budget.nonzeros(rows, columns)
    sparse = torch.zeros_like(scaled)
    first, second = scaled.new_zeros(rows, rank), scaled.new_zeros(rank, columns)
    for _ in range(steps if rank else 1):
        if rank:
            first, second = _largest(scaled - sparse, rank)
        rest = scaled - first @ second
        sparse = rest * mask_of(pattern, rest.square(), density) if density > 0 else torch.zeros_like(rest)
    if scale is not None:
        sparse, second = sparse / scale, second / scale
    return Parts(sparse, first, second)


def _largest(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Returns two factors, of equal norms, of the nearest matrix of this rank."""
    if min(matrix.shape) <= _WHOLE:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            u, s, v = torch.svd_lowrank(matrix, q=min(rank + 8, *matrix.shape), niter=4)
        vh = v.mT
    roots = s[:rank].sqrt()
    return u[:, :rank] * roots, roots[:, None] * vh[:rank]


class SparseLowRank(nn.Module):
    """A parametrization that computes a weight as original0 * mask + original1 @ original2.

    A state dict has these names below `parametrizations.weight`. The user may assign another weight. It is then split by
    `budget` and `pattern`, without data.
    """

    mask: Tensor

    def __init__(self, parts: Parts, budget: Budget, pattern: Pattern) -> None:
        super().__init__()
        self.register_buffer("mask", parts.sparse != 0)
        self.budget, self.pattern = budget, pattern
        self._first: Parts | None = parts

    def forward(self, sparse: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """S + U V"""
        return sparse * self.mask + first @ second

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the parts of a weight that is assigned; at the first call the given ones."""
        parts, self._first = self._first, None
        if parts is None:
            parts = split(weight.detach().float(), self.budget, self.pattern)
            self.mask.copy_(parts.sparse != 0)
        return parts.sparse.to(weight.dtype), parts.first.to(weight.dtype), parts.second.to(weight.dtype)


def parametrize_by_parts(layer: nn.Module, parts: Parts, budget: Budget, pattern: Pattern) -> None:
    """Makes the parts parameters of a linear layer. Its `weight` is their sum from now on."""
    trains = layer.weight.requires_grad
    with torch.inference_mode(False):  # parameters that were made within it could never train
        own = (each.clone() if each.is_inference() else each for each in (parts.sparse, parts.first, parts.second))
        register_parametrization(layer, "weight", SparseLowRank(Parts(*own), budget, pattern))
        chain: Any = layer.parametrizations
        for parameter in chain["weight"].parameters():
            parameter.requires_grad_(trains)


def is_decomposed(layer: nn.Module) -> bool:
    """Whether the weight of a layer is a sum by `SparseLowRank`."""
    if not parametrize.is_parametrized(layer, "weight"):
        return False
    chain: Any = layer.parametrizations
    return any(isinstance(each, SparseLowRank) for each in chain["weight"])
