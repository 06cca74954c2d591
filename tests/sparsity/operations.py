"""What can be computed with a SparseTensor, written so that a dense tensor takes it too: the dense result is the oracle.

Each takes a matrix a [m, k] and a dense x [m, k].
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer import Format, SparseTensor, einsum

Operation = Callable[[Tensor, Tensor], Tensor]

PRODUCTS: dict[str, Operation] = {
    "mm": lambda a, x: a @ x.t(),
    "mv": lambda a, x: torch.mv(a, x[0]),
    "vm": lambda a, x: x[:, 0] @ a,
    "dense @ sparse": lambda a, x: x.t() @ a,
    "transposed": lambda a, x: a.t() @ x,
    "linear": lambda a, x: F.linear(x, a, x[:, 0]),
    "addmm": lambda a, x: torch.addmm(x[:, :1], a, x.t(), beta=2, alpha=3),
    "addmv": lambda a, x: torch.addmv(x[:, 0], a, x[0]),
    "SDDMM": lambda a, x: einsum("ij,ir,jr->ij", a, x, x.t() @ x) if isinstance(a, SparseTensor) else a * (x @ x.t() @ x),
    "SpGEMM": lambda a, x: a @ a.t(),
    "multi_dot": lambda a, x: torch.linalg.multi_dot([a, a.T, x]),
}
ELEMENTWISE: dict[str, Operation] = {
    "times a number": lambda a, x: 2 * a * -0.5,
    "times dense": lambda a, x: a * x,
    "times a row": lambda a, x: x[0] * a,
    "times a column": lambda a, x: a * x[:, :1],
    "over a number": lambda a, x: a / 2,
    "over dense": lambda a, x: a / (x.abs() + 1),
    "functions": lambda a, x: torch.tanh(a) + torch.relu(-a) * torch.abs(a).sqrt() - a.expm1() * F.leaky_relu(a),
    "functions by other names": lambda a, x: torch.negative(a).absolute().subtract(torch.arctan(a.conj())),
    "power": lambda a, x: a**2,
    "same pattern": lambda a, x: torch.maximum(a, -2 * a),
    "intersection": lambda a, x: a * other(a),
    "union": lambda a, x: a + other(a),
    "difference": lambda a, x: a - other(a),
}
REDUCTIONS: dict[str, Operation] = {
    "sum": lambda a, x: a.sum(),
    "sum of rows": lambda a, x: torch.sum(a, -1, keepdim=True),
    "sum of columns": lambda a, x: a.sum(0),
    "mean": lambda a, x: a.mean((0, 1)),
    "amax": lambda a, x: torch.amax(a, (0, 1), keepdim=True),
    "amax of rows": lambda a, x: (a - 2 * a.abs()).amax(1),
    "amax of columns": lambda a, x: a.amax(0, keepdim=True),
    "amin of rows": lambda a, x: torch.amin(a, -1),
    "amin of columns": lambda a, x: (a.abs()).amin(0),
    "prod": lambda a, x: torch.prod(a),
    "prod of rows": lambda a, x: a.prod(1),
    "prod of columns": lambda a, x: a.prod(0, keepdim=True),
    "max and min": lambda a, x: a.max() - torch.min(a),
}
SHAPES: dict[str, Operation] = {
    "to_dense": lambda a, x: a.to_dense() + x,
    "transposes": lambda a, x: a.t().transpose(0, 1).permute(1, 0).mT.T.swapdims(0, 1).movedim(-1, 0),
    "reshape": lambda a, x: a.reshape(a.shape[1], -1),
    "view": lambda a, x: a.view(-1),
    "flatten": lambda a, x: a.flatten(),
    "unflatten": lambda a, x: a.unflatten(1, (-1, 1)),
    "unsqueeze": lambda a, x: torch.unsqueeze(a, 1),
    "squeeze": lambda a, x: a.unsqueeze(-1).squeeze(-1),
    "clone": lambda a, x: a.clone(),
    "coalesce": lambda a, x: a.coalesce() if isinstance(a, SparseTensor) else a,
    "cat": lambda a, x: torch.cat([a, 2 * a], 0),
    "cat of columns": lambda a, x: torch.cat([a, other(a)], 1),
    "stack": lambda a, x: torch.stack([a, other(a)], 1),
    "rows": lambda a, x: a[1::2],
    "block": lambda a, x: a[:-1, 1:],
    "rows by number": lambda a, x: a[torch.tensor([0, -1, 0])],
    "columns by number": lambda a, x: a.index_select(1, torch.tensor([0, 0])),
    "rows by mask": lambda a, x: a[x[:, 0] > 0],
    "row": lambda a, x: a[-1],
    "element": lambda a, x: a[0, 0],
    "masked_select": lambda a, x: torch.masked_select(a, x > 0),
    "diagonals": lambda a, x: torch.cat([a.diagonal(), torch.diag(a, 1), a.diagonal(-1, 1, 0), a.diagonal(99)]),
    "trace": lambda a, x: torch.trace(a),
    "kron": lambda a, x: torch.kron(a[:2], a[1:]),
    "kron with dense": lambda a, x: torch.kron(x[:2, :1], a),
    "block_diag": lambda a, x: torch.block_diag(a, 2 * a, a.T),
    "powers": lambda a, x: torch.linalg.matrix_power(a @ a.T, 2),
    "tril": lambda a, x: a.tril(-1),
    "triu": lambda a, x: torch.triu(a, 1) * x,
}
SOFTMAX: dict[str, Operation] = {
    "softmax of rows": lambda a, x: torch.softmax(a, 1),
    "softmax of columns": lambda a, x: F.softmax(a, dim=0),
    "log_softmax of rows": lambda a, x: a.log_softmax(-1),
}
DENSE: dict[str, Operation] = {
    "plus dense": lambda a, x: x - a + 1,
    "cos": lambda a, x: torch.cos(a),
    "division": lambda a, x: x / (a * a + 1).reciprocal(),
    "over sparse": lambda a, x: a / a,
    "exp": lambda a, x: a.exp() + a**-2,
    "comparison": lambda a, x: a > 0,
    "functional": lambda a, x: F.gelu(a) + F.normalize(a) + torch.where(a > 0, a, x),
    "cumsum": lambda a, x: torch.cumsum(a, 0) + a.max(1, keepdim=True).values,
    "cat with dense": lambda a, x: torch.cat([a, x]),
}
"""Those that no sparse tensor can hold."""

OPERATIONS = {**PRODUCTS, **ELEMENTWISE, **REDUCTIONS, **SHAPES, **SOFTMAX, **DENSE}
GIVE_SPARSE = {
    "SDDMM", "SpGEMM", *ELEMENTWISE, *SOFTMAX, *(set(SHAPES) - {"to_dense", "row", "element", "diagonals", "trace"}),
}  # fmt: skip
TOO_FULL_FOR_2_4 = {"functions", "union", "difference", "cat of columns", "block", "columns by number", "kron", "block_diag"}
"""What may leave more than 2 of 4 elements, which 2:4 refuses to store."""


def other(a: Tensor) -> Tensor:
    """A tensor of the same shape with nonzeros elsewhere, in another format if it is sparse."""
    if not isinstance(a, SparseTensor):
        return a.flip(0) * 3
    at = torch.arange(a.shape[0] - 1, -1, -1)
    return (a.to_format(Format.DCSR).index_select(0, at)) * 3


def expected(name: str, dense: Tensor, x: Tensor, a: SparseTensor) -> Tensor:
    """The result that dense torch gives; of a softmax, that over what `a` stores."""
    if name not in SOFTMAX:
        return OPERATIONS[name](dense, x)
    stored = a.with_values(torch.ones_like(a.values())).to_dense() != 0
    return torch.where(stored, OPERATIONS[name](dense.where(stored, -torch.inf), x), 0)
