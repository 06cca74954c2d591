"""`torch.sparse`: every pruned Linear replaced by one that holds its weight as CSR with 32-bit indices."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import PrunedModel, with_sparse_linears
from benchmarks.registry import Contender, Prepared


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


def prepare(problem: PrunedModel) -> Prepared:
    model = with_sparse_linears(problem, CsrLinear)
    return Prepared(lambda: model(*problem.inputs))


CONTENDER = Contender("torch.sparse CSR", prepare)
