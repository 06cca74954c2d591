"""What pruning a layer means: a least-squares problem with a constraint on where nonzeros may lie.

y = W x + b is what the dense layer computes from the dense model's x; z is what the pruned model gives it instead of x. Wanted
are V with few nonzeros, and c, so that V z + c is near y:

    minimise    E |V z + c - y|^2  +  damping |V - W|^2
    hessian     H = cov(z, z) + damping I
    target      U = W (cov(x, z) + damping I) H^-1        the best V without a constraint; W itself where z is x
    error       tr((V - U) H (V - U)^T) / E |y - E y|^2   what a V loses beside U, as a share of the output's variance

A layer without a bias has no c, and second moments about 0 for the covariances. A convolution of several groups is as many
problems at once: its matrices have the groups in front, W [groups, outputs / groups, inputs], and H one for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


class Moments:
    """Sums over calibration samples of z, x, z z^T and x z^T, in the precision of `dtype`, maybe of several groups."""

    def __init__(
        self, features: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
        groups: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.count = 0
        self.z_z = torch.zeros(*groups, features, features, dtype=dtype, device=device)
        self.x_z: Tensor | None = None  # while every x was its z
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
    """What the inputs of a layer say about its weights: H, and what methods need of it. Layers with the same inputs share it.

    hessian  H [inputs, inputs], positive definite
    cross    cov(x, z) + damping I, None where it is H
    plain    cov(z, z)
    means    of x and z, or None for layers without a bias
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
        # Inputs that hardly change leave rounding alone, which need not be positive: as much is added at least.
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
    """The factor of a matrix that is positive but for rounding, with as much more on its diagonal as that takes."""
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
    """One layer's problem, for the methods.

    weight     W [outputs, inputs], or with the groups in front
    target     U, of the same shape
    power      E |y - E y|^2
    curvature  of its inputs
    """

    weight: Tensor
    target: Tensor
    power: float
    curvature: Curvature

    @classmethod
    def of(cls, weight: Tensor, curvature: Curvature) -> "LayerProblem":
        """The problem of a weight [outputs, inputs]."""
        *groups, inputs, _ = curvature.hessian.shape
        weight = weight.to(curvature.hessian).reshape(*groups, -1, inputs)
        target = weight
        if curvature.cross is not None:
            target = torch.cholesky_solve((weight @ curvature.cross).mT, curvature.factor).mT
        return cls(weight, target, float((weight @ curvature.plain * weight).sum()), curvature)

    def error(self, pruned: Tensor) -> float:
        """What a pruned weight [outputs, inputs] loses beside the target, relative to the variance of the layer's output."""
        difference = pruned.reshape(self.target.shape) - self.target
        lost = float((difference @ self.curvature.hessian * difference).sum())
        return lost / self.power if self.power > 0 else lost

    def bias(self, pruned: Tensor, bias: Tensor | None) -> Tensor | None:
        """The bias that goes best with a pruned weight [outputs, inputs]: b + W mean(x) - V mean(z)."""
        if self.curvature.means is None or bias is None:
            return bias
        mean_x, mean_z = self.curvature.means
        moved = self.weight @ mean_x[..., None] - pruned.reshape(self.weight.shape) @ mean_z[..., None]
        return (bias.to(self.weight) + moved.flatten()).to(bias)
