"""Row-wise Adagrad: its state is one number for each row of a table, the mean of squared gradients, in place of a whole row.

    s += mean of g^2 over the row's columns;    p -= lr g / (sqrt(s) + eps)

Recommenders use it for large tables, because the state of Adagrad takes as much memory as the table. Source: Mudigere et al.,
Software-Hardware Co-design for Fast and Scalable Training of Deep Learning Recommendation Models, ISCA 2022.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from gossamer.dialects.errors import ArgumentError
from gossamer.sparsity.bags.steps import RowStep, coalesced, fits, step_all


class RowWiseAdagrad(Optimizer):
    """Adagrad with one number of state for each row, for parameters of any shape.

    params  parameters, or groups of them, as for other optimizers
    lr      the learning rate
    eps     a number that is added to the root, for rows without gradients so far

    For sparse gradients (`sparse=True` of torch.nn.EmbeddingBag and Embedding) a step reads and writes only the rows that have
    one. Vectors have a number of state for each element.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-10) -> None:
        if lr < 0 or eps < 0:
            raise ArgumentError(f"RowWiseAdagrad: lr is {lr} and eps {eps}, neither may be negative")
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step. A closure computes the gradients again; its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        steps = list[RowStep]()
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["sum"] = torch.zeros(parameter.shape[:1], dtype=parameter.dtype, device=parameter.device)
                if fits(parameter) and state["sum"].is_contiguous() and state["sum"].dtype is parameter.dtype:
                    if (gradient := coalesced(grad))._nnz():
                        steps.append(RowStep(parameter, gradient, (state["sum"],), (group["lr"], group["eps"], 0, 0, 1)))
                else:
                    _plain(parameter, grad, state["sum"], group["lr"], group["eps"])
        if steps:
            step_all("row_adagrad", steps)
        return loss


def _plain(parameter: Tensor, grad: Tensor, total: Tensor, lr: float, eps: float) -> None:
    """Does a step by torch's operations, for dense gradients and for tensors that no kernel takes."""
    if grad.layout is torch.sparse_coo:
        grad = grad.coalesce()
        rows, values = grad.indices()[0], grad.values()
        total.index_add_(0, rows, _squares(values))
        parameter.index_add_(0, rows, values / _roots(total[rows], values, eps), alpha=-lr)
        return
    total += _squares(grad)
    parameter.add_(grad / _roots(total, grad, eps), alpha=-lr)


def _squares(grad: Tensor) -> Tensor:
    squares = grad.square()
    return squares.mean(tuple(range(1, grad.dim()))) if grad.dim() > 1 else squares


def _roots(total: Tensor, grad: Tensor, eps: float) -> Tensor:
    roots = total.sqrt() + eps
    return roots.view(-1, *[1] * (grad.dim() - 1)) if grad.dim() else roots
