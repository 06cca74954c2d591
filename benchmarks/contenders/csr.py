"""`torch.sparse`: every pruned Linear replaced by one that holds its weight as CSR with 32-bit indices."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.registry import Contender, Prepared, Problem, Unsupported


class CsrLinear(nn.Module):
    """y = x Wᵀ + b with W in CSR; x is [..., in_features], contiguous results."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            csr = linear.weight.detach().to_sparse_csr()
        # 64-bit indices, which to_sparse_csr gives, cost 5 to 30 % more.
        crow, col = csr.crow_indices().int(), csr.col_indices().int()
        self.weight = torch.sparse_csr_tensor(crow, col, csr.values(), size=csr.shape, check_invariants=True)
        self.bias = linear.bias.detach() if linear.bias is not None else torch.zeros(linear.out_features)
        self.column = self.bias.unsqueeze(1)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) < 4:  # F.linear walks a column-major result: the faster way only for so few rows
            return F.linear(x, self.weight, self.bias)
        y = torch.addmm(self.column, self.weight, rows.t()).t().contiguous()
        return y.reshape(*x.shape[:-1], -1)


def converted(model: nn.Module) -> nn.Module:
    """A copy of `model` in which every Linear with at least a tenth of zeros is a CsrLinear."""
    model = copy.deepcopy(model)
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and (child.weight == 0).float().mean() >= 0.1:
                setattr(parent, name, CsrLinear(child))
                replaced += 1
    if not replaced:
        raise Unsupported("no Linear of the model has a tenth of zeros")
    return model


def prepare(problem: Problem) -> Prepared:
    model = converted(problem.model)
    return Prepared(lambda: model(*problem.inputs))


CONTENDER = Contender("torch.sparse CSR", prepare)
