"""ALPS (Meng et al., 2024): finds the mask by ADMM, for inputs scaled to length one, then the values by least squares.

    minimise  tr((W - U) H (W - U)^T) / 2   with W = D, D of the pattern

    W = (H + rho I)^-1 (H U - V + rho D)     all rows share the factors of H
    D = nearest of the pattern to W + V / rho
    V = V + rho (W - D)

rho grows as the support of D settles. In a fixed point W = D, and V is the gradient at D, zero on the support: D is the
least-squares solution there.
"""

import torch
from torch import Tensor

from gossamer.sparsity.pruning.layer_problem import LayerProblem
from gossamer.sparsity.pruning.patterns import Pattern, mask_of

_START, _EVERY, _STEPS = 0.1, 3, 240
_GROWTH = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))
"""Pairs (share, factor): rho grows by the factor if at least this share of the support has changed."""


def admm(problem: LayerProblem, pattern: Pattern, density: float) -> Tensor:
    """Returns the pruned weight with refitted nonzeros."""
    hessian, scale = problem.curvature.scaled, problem.curvature.scale
    values, vectors = problem.curvature.eigen
    target = problem.target * scale.unsqueeze(-2)
    gradient = target @ hessian
    kept, dual, rho = target.clone(), torch.zeros_like(target), _START
    mask = mask_of(pattern, target.square(), density)
    size = max(int(mask.sum()), 1)
    for step in range(1, _STEPS + 1):
        free = ((gradient - dual + rho * kept) @ vectors / (values.unsqueeze(-2) + rho)) @ vectors.mT
        wanted = free + dual / rho
        new = mask_of(pattern, wanted.square(), density)
        kept = wanted * new
        dual = dual + rho * (free - kept)
        if step % _EVERY == 0:
            changed = int((new ^ mask).sum()) / (2 * size)
            mask = new
            if changed == 0:
                break
            rho *= next(growth for share, growth in _GROWTH if changed >= share)
    return refit(problem, kept / scale.unsqueeze(-2))


def refit(problem: LayerProblem, pruned: Tensor, steps: int = 40, tolerance: float = 1e-5) -> Tensor:
    """Returns the weight with least-squares values of its nonzeros, by conjugate gradients for all rows at once.

    Each row's problem has the columns that the row keeps. The scaled H has a diagonal of 1, so it needs no preconditioner.
    """
    mask = pruned != 0
    hessian, scale = problem.curvature.scaled, problem.curvature.scale.unsqueeze(-2)
    target, found = problem.target * scale, pruned * scale
    residual = ((target - found) @ hessian) * mask
    direction, power = residual.clone(), residual.square().sum(-1, keepdim=True)
    goal = tolerance**2 * target.square().sum(-1, keepdim=True)
    for _ in range(steps):
        if bool((power <= goal).all()):
            break
        image = (direction @ hessian) * mask
        curvature = (direction * image).sum(-1, keepdim=True)
        step = torch.where(power > goal, power / curvature, 0)
        found += step * direction
        residual -= step * image
        before, power = power, residual.square().sum(-1, keepdim=True)
        direction = residual + torch.where(before > 0, power / before, 0) * direction
    return found / scale
