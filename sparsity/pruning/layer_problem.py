"""What pruning a layer means: a least-squares problem with a constraint on where nonzeros may lie.

y = W x + b is what the dense layer computes from the dense model's x; z is what the pruned model gives it instead of x. Wanted
are V with few nonzeros, and c, so that V z + c is near y:

    minimise    E |V z + c - y|^2  +  damping |V - W|^2
    hessian     H = cov(z, z) + damping I
    target      U = W (cov(x, z) + damping I) H^-1        the best V without a constraint; W itself where z is x
    error       tr((V - U) H (V - U)^T) / E |y - E y|^2   what a V loses beside U, as a share of the output's variance

A layer without a bias has no c, and second moments about 0 for the covariances.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


class Moments:
    """Sums over calibration samples of z, x, z z^T and x z^T, in the precision of `dtype`."""

    def __init__(self, features: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        self.count = 0
        self.z_z = torch.zeros(features, features, dtype=dtype, device=device)
        self.x_z: Tensor | None = None  # while every x was its z
        self.z = torch.zeros(features, dtype=dtype, device=device)
        self.x = torch.zeros(features, dtype=dtype, device=device)

    def add(self, z: Tensor, x: Tensor) -> None:
        """Adds samples, [samples, features] each; x may be z itself."""
        same = x is z
        z = z.to(self.z)
        x = z if same else x.to(self.z)
        if not same and self.x_z is None:
            self.x_z = self.z_z.clone()
        self.count += len(z)
        self.z_z.addmm_(z.t(), z)
        if self.x_z is not None:
            self.x_z.addmm_(x.t(), z)
        self.z += z.sum(0)
        self.x += x.sum(0)

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
            self.plain = self.plain - torch.outer(mean_z, mean_z)
            cross = None if cross is None else cross - torch.outer(mean_x, mean_z)
        mean = self.plain.diagonal().mean()
        # Inputs that hardly change leave rounding alone, which need not be positive: as much is added at least.
        rounding = 4 * torch.finfo(mean.dtype).eps * moments.z_z.diagonal().sum() / count
        self.damping = torch.where(rounding > 0, torch.maximum(damping * mean, rounding), 1)
        added = self.damping * torch.eye(len(self.plain), dtype=mean.dtype, device=mean.device)
        self.hessian = self.plain + added
        self.cross = None if cross is None else cross + added

    @cached_property
    def scale(self) -> Tensor:
        """The square root of H's diagonal."""
        return self.hessian.diagonal().sqrt()

    @cached_property
    def scaled(self) -> Tensor:
        """H for inputs divided by `scale`: its diagonal is 1."""
        return self.hessian / torch.outer(self.scale, self.scale)

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
    def factor(self) -> Tensor:
        """The lower triangular L with L L^T = H."""
        return _cholesky(self.hessian)


def _cholesky(matrix: Tensor, *, upper: bool = False) -> Tensor:
    """The factor of a matrix that is positive but for rounding, with as much more on its diagonal as that takes."""
    added = torch.finfo(matrix.dtype).eps ** 0.5 * matrix.diagonal().mean()
    for _ in range(10):
        factor, failed = torch.linalg.cholesky_ex(matrix, upper=upper)
        if not failed:
            return factor
        matrix, added = matrix + added * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device), 10 * added
    return torch.linalg.cholesky(matrix, upper=upper)


@dataclass
class LayerProblem:
    """One layer's problem, for the methods.

    weight     W [outputs, inputs]
    target     U [outputs, inputs]
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
        weight = weight.to(curvature.hessian)
        target = weight
        if curvature.cross is not None:
            target = torch.cholesky_solve((weight @ curvature.cross).t(), curvature.factor).t()
        return cls(weight, target, float((weight @ curvature.plain * weight).sum()), curvature)

    def error(self, pruned: Tensor) -> float:
        """What a pruned weight loses beside the target, relative to the variance of the layer's output."""
        difference = pruned - self.target
        lost = float((difference @ self.curvature.hessian * difference).sum())
        return lost / self.power if self.power > 0 else lost

    def bias(self, pruned: Tensor, bias: Tensor | None) -> Tensor | None:
        """The bias that goes best with a pruned weight: b + W mean(x) - V mean(z)."""
        if self.curvature.means is None or bias is None:
            return bias
        mean_x, mean_z = self.curvature.means
        return (bias.to(self.weight) + self.weight @ mean_x - pruned @ mean_z).to(bias)
