"""SciPy: every pruned Linear computed by a `scipy.sparse.csr_array`, on one thread whatever the number allowed."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor, nn

from benchmarks.models import PrunedModel, with_sparse_linears
from benchmarks.registry import Contender, Prepared


class ScipyLinear(nn.Module):
    """y = x Wᵀ + b with W a csr_array; x is [..., in_features], contiguous results."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        from scipy.sparse import csr_array

        self.weight = csr_array(linear.weight.detach().numpy())
        self.bias = linear.bias.detach() if linear.bias is not None else torch.zeros(linear.out_features)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).numpy()
        # A product with a row-major matrix walks its rows; with one column, SciPy has a loop of its own.
        product = self.weight @ rows.T.copy() if len(rows) > 1 else (self.weight @ rows[0])[:, None]
        return torch.add(torch.from_numpy(product).t(), self.bias).contiguous().view(*x.shape[:-1], -1)


def missing() -> str | None:
    return None if find_spec("scipy") else "SciPy is not installed: pip install scipy"


def prepare(problem: PrunedModel) -> Prepared:
    model = with_sparse_linears(problem, ScipyLinear)
    return Prepared(lambda: model(*problem.inputs))


CONTENDER = Contender("SciPy", prepare, missing=missing)
