"""Pruning a layer as a least-squares problem with a constraint on where nonzeros may lie.

The dense layer computes y = W x + b from the dense model's activations x. In the pruned model the layer gets z instead of x. A
method looks for V with few nonzeros, and for c, so that V z + c is near y:

    minimise    E |V z + c - y|^2  +  damping |V - W|^2
    hessian     H = cov(z, z) + damping I
    target      U = W (cov(x, z) + damping I) H^-1        the best V without a constraint; W itself if z is x
    error       tr((V - U) H (V - U)^T) / E |y - E y|^2   the loss of V compared with U, as a share of the output's variance

A layer without a bias has no c, and uses second moments about 0 in place of covariances. A convolution with groups is one
problem per group: its matrices have the groups in front, as W [groups, outputs / groups, inputs], and so has H.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


class Moments:
    """Sums of z, x, z z^T and x z^T over calibration samples, in the precision of `dtype`, for one or several `groups`."""

    def __init__(
        self, features: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
        groups: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.count = 0
        self.z_z = torch.zeros(*groups, features, features, dtype=dtype, device=device)
        self.x_z: Tensor | None = None  # as long as every x was the same tensor as z
        self.z = torch.zeros(*groups, features, dtype=dtype, device=device)
        self.x = self.z.clone()

    def add(self, z: Tensor, x: Tensor) -> None:
        """Adds samples, [samples, features] each, or [groups, samples, features]; x may be z itself."""
        same = x is z
        z = z.to(self.z)
        x = z if same else x.to(self.z)
        if not same and self.x_z is None:
            self.x_z = self.z_z.clone()
        self.count += z.shape[-2]
        self.z_z += z.mT @ z
        if self.x_z is not None:
            self.x_z += x.mT @ z
        self.z += z.sum(-2)
        self.x += x.sum(-2)

    @property
    def finite(self) -> bool:
        """Whether no sum is NaN or infinite."""
        return all(bool(each.isfinite().all()) for each in (self.z_z, self.x))


class Curvature:
    """The Hessian H of a layer, and its factors for the methods. Layers with the same inputs share one Curvature.

    hessian  H [inputs, inputs], positive definite
    cross    cov(x, z) + damping I; None if it equals H
    plain    cov(z, z)
    means    the means of x and z; None for layers without a bias
    """

    def __init__(self, moments: Moments, *, centred: bool, damping: float) -> None:
        count = max(moments.count, 1)
        self.plain = moments.z_z / count
        cross = None if moments.x_z is None else moments.x_z / count
        self.means: tuple[Tensor, Tensor] | None = None
        if centred:
            mean_x, mean_z = self.means = moments.x / count, moments.z / count
            self.plain = self.plain - _outer(mean_z, mean_z)
            cross = None if cross is None else cross - _outer(mean_x, mean_z)
        mean = _diagonal(self.plain).mean(-1)
        # The covariance of nearly constant inputs is rounding errors, which may be negative. So at least their size is added.
        rounding = 4 * torch.finfo(mean.dtype).eps * _diagonal(moments.z_z).sum(-1) / count
        self.damping = torch.where(rounding > 0, torch.maximum(damping * mean, rounding), 1)
        added = _scaled_identity(self.damping, self.plain)
        self.hessian = self.plain + added
        self.cross = None if cross is None else cross + added

    @cached_property
    def scale(self) -> Tensor:
        """The square root of H's diagonal."""
        return _diagonal(self.hessian).sqrt()

    @cached_property
    def scaled(self) -> Tensor:
        """H for inputs divided by `scale`: its diagonal is 1."""
        return self.hessian / _outer(self.scale, self.scale)

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of the scaled H."""
        values, vectors = torch.linalg.eigh(self.scaled)
        return values.clamp(min=0), vectors

    @cached_property
    def inverse_factor(self) -> Tensor:
        """The upper triangular C with C^T C = H^-1."""
        return _cholesky(torch.cholesky_inverse(self.factor), upper=True)

    @cached_property
    def inverse_diagonal(self) -> Tensor:
        """The diagonal of H^-1."""
        return _diagonal(torch.cholesky_inverse(self.factor))

    @cached_property
    def factor(self) -> Tensor:
        """The lower triangular L with L L^T = H."""
        return _cholesky(self.hessian)


def _cholesky(matrix: Tensor, *, upper: bool = False) -> Tensor:
    """Returns the Cholesky factor of a matrix. Adds to its diagonal until it is positive, because rounding may prevent that."""
    added = torch.finfo(matrix.dtype).eps ** 0.5 * _diagonal(matrix).mean(-1)
    for _ in range(10):
        factor, failed = torch.linalg.cholesky_ex(matrix, upper=upper)
        if not failed.any():
            return factor
        matrix, added = matrix + _scaled_identity(added * (failed != 0), matrix), 10 * added
    return torch.linalg.cholesky(matrix, upper=upper)


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def _scaled_identity(factor: Tensor, like: Tensor) -> Tensor:
    return factor[..., None, None] * torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


@dataclass
class LayerProblem:
    """The problem of one layer, which methods solve.

    weight     W [outputs, inputs], or with the groups in front
    target     U, of the same shape
    power      E |y - E y|^2
    curvature  the Hessian of the layer's inputs
    """

    weight: Tensor
    target: Tensor
    power: float
    curvature: Curvature

    @classmethod
    def of(cls, weight: Tensor, curvature: Curvature) -> "LayerProblem":
        """Returns the problem for a weight [outputs, inputs]."""
        *groups, inputs, _ = curvature.hessian.shape
        weight = weight.to(curvature.hessian).reshape(*groups, -1, inputs)
        target = weight
        if curvature.cross is not None:
            target = torch.cholesky_solve((weight @ curvature.cross).mT, curvature.factor).mT
        return cls(weight, target, float((weight @ curvature.plain * weight).sum()), curvature)

    def error(self, pruned: Tensor) -> float:
        """Returns the loss of a pruned weight [outputs, inputs] against the target, as a share of the output's variance."""
        difference = pruned.reshape(self.target.shape) - self.target
        lost = float((difference @ self.curvature.hessian * difference).sum())
        return lost / self.power if self.power > 0 else lost

    def bias(self, pruned: Tensor, bias: Tensor | None) -> Tensor | None:
        """Returns the best bias for a pruned weight [outputs, inputs]: b + W mean(x) - V mean(z)."""
        if self.curvature.means is None or bias is None:
            return bias
        mean_x, mean_z = self.curvature.means
        moved = self.weight @ mean_x[..., None] - pruned.reshape(self.weight.shape) @ mean_z[..., None]
        return (bias.to(self.weight) + moved.flatten()).to(bias)
