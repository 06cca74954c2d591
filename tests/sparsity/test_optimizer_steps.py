"""Steps of optimizers on stored weights: what is elementwise acts on stored values, in any optimizer, eager and compiled."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import SparseTensor


class Lively(torch.optim.Optimizer):
    """One that does what users' optimizers do: out of place, by masks, with lists, with tensors of one value."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["sum"], state["rate"] = torch.zeros_like(p), torch.full_like(p, 0.01)
            sign = (state["sum"] * p.grad).sign()
            sign[sign.gt(0)] = 1.2
            sign[sign.lt(0)] = 0.5
            sign = torch.where(sign.eq(0), torch.ones_like(sign), sign)
            state["rate"].mul_(sign).clamp_(1e-4, 0.1)
            state["sum"].copy_(state["sum"].lerp(p.grad, 0.5))
            torch._foreach_mul_([state["rate"]], [torch.full(tuple(p.shape), 0.9, dtype=p.dtype)])
            update = torch.empty_like(p)
            torch.div(state["sum"], (state["sum"].abs() + 1e-3).rsqrt().exp(), out=update)
            norm = torch._foreach_norm([update])[0]
            p.addcdiv_(state["rate"] * update, norm + p.pow(2).mean(dim=-1, keepdim=True) + 1.0, value=-1)
        return loss


class Orthogonal(torch.optim.Optimizer):
    """One that iterates on the whole matrix of a gradient, as Muon does, with results in given tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.dim() == 1:
                continue
            x = p.grad.div(p.grad.norm() + 1e-7)
            gram, other = x.new_empty(p.shape[0], p.shape[0]), torch.empty_like(x)
            for _ in range(3):
                torch.mm(x, x.mT, out=gram)
                torch.addmm(x, gram, x, beta=1.5, alpha=-0.5, out=other)
                x, other = other, x
            p.add_(1.5 * x + x @ (x.mT @ x), alpha=-0.1)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "NAdam of lists": lambda p: torch.optim.NAdam(p, lr=1e-2, foreach=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "Rprop of lists": lambda p: torch.optim.Rprop(p, lr=1e-2, foreach=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "a user's": Lively,
    "of whole matrices": Orthogonal,
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 12)).double()
    for p in model.parameters():
        if p.dim() == 2:
            p.data.mul_(torch.rand(p.shape) < 0.3)
    return model


def _masked(make: Callable[..., torch.optim.Optimizer], x: Tensor, steps: int) -> Tensor:
    model = _model()
    masks = {p: p != 0 for p in model.parameters() if p.dim() == 2}
    optimizer = make(list(model.parameters()))
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for p, mask in masks.items():
            assert p.grad is not None
            p.grad.mul_(mask)
        optimizer.step()
        for p, mask in masks.items():
            p.data.mul_(mask)
    out: Tensor = model(x).detach()
    return out


@pytest.mark.parametrize("how", ["eager", "compiled", "called by what is compiled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stored_weights_train_as_masked_ones(name: str, how: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(16, 24, dtype=torch.float64)
    model = gossamer.store_sparse(_model())
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    step: Callable[[], Any] = optimizer.step
    if how == "compiled":
        step = torch.compile(optimizer.step, backend="sparse")
    elif how != "eager":
        step = torch.compile(lambda: optimizer.step(), backend="sparse")
    patterns = [p.nnz for p in model.parameters() if isinstance(p, SparseTensor)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has no sparse.*|gossamer:.*")
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            step()
    # compiled, torch.optim has numbers of the step in float32
    torch.testing.assert_close(model(x).detach(), _masked(OPTIMIZERS[name], x, 3), rtol=1e-3, atol=2e-6)
    assert len(patterns) == 2
    assert [p.nnz for p in model.parameters() if isinstance(p, SparseTensor)] == patterns
    states = [
        each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor) and each.dim() == 2
    ]
    assert all(isinstance(each, SparseTensor) for each in states)


def test_closures_and_what_follows_compute_with_all_elements() -> None:
    model = gossamer.store_sparse(_model())
    weight = model[0].weight
    assert isinstance(weight, SparseTensor)
    x, seen = torch.randn(4, 24, dtype=torch.float64), []
    optimizer = Lively(list(model.parameters()))

    def closure() -> Tensor:
        optimizer.zero_grad()
        seen.append(weight + 1)
        loss: Tensor = model(x).square().mean() + (weight + 1).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        seen.append(weight + 1)
    assert all(not isinstance(each, SparseTensor) for each in seen)
    assert float(seen[-1].detach().min()) < 1 < float(seen[-1].detach().max())


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    class Fails(Lively):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            raise RuntimeError("no")

    weight = gossamer.store_sparse(_model())[0].weight
    with pytest.raises(RuntimeError, match="no"):
        Fails([weight]).step()
    with torch.no_grad():
        assert not isinstance(weight + 1, SparseTensor)


def test_a_dense_product_is_written_into_a_sparse_tensor() -> None:
    one, other = torch.randn(5, 1), torch.randn(1, 7)
    out = SparseTensor.from_dense(torch.eye(5, 7))
    torch.mul(one, other, out=out)
    torch.testing.assert_close(out.to_dense(), one * other)
