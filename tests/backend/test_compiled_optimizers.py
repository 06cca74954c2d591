"""Steps of optimizers under torch.compile, on parameters that store their nonzeros alone: the same as eager steps."""

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

import gossamer
from gossamer import SparseTensor
from tests.backend.harness import prune_

Make = Callable[[Iterable[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": partial(optim.AdamW, lr=0.01),
    "AdamW, one by one": partial(optim.AdamW, lr=0.01, foreach=False),
    "AdamW, lr a tensor": partial(optim.AdamW, lr=torch.tensor(0.01)),
    "Adam, fused": partial(optim.Adam, lr=0.01, fused=True),
    "AdamW, foreach": partial(optim.AdamW, lr=0.01, foreach=True, amsgrad=True),
    "Adamax, foreach": partial(optim.Adamax, lr=0.01, foreach=True),
    "Adagrad": partial(optim.Adagrad, lr=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.01),
    "Adadelta": partial(optim.Adadelta, foreach=True),
}


def stored() -> nn.Module:
    torch.manual_seed(0)
    return gossamer.store_sparse(prune_(nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8)), 0.2))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_compiled_steps_are_eager_ones(make: Make) -> None:
    x = torch.randn(16, 24)
    models = stored(), stored()
    eager, other = (make(model.parameters()) for model in models)
    compiled = torch.compile(other.step, backend="sparse", options={"dense": "eager"})
    structures = [p.components[:-1] for p in models[1].parameters() if isinstance(p, SparseTensor)]
    for _ in range(3):
        for model, step in zip(models, (eager.step, compiled), strict=True):
            model.zero_grad()
            model(x).square().sum().backward()
            step()
    for one, same in zip(*(model.parameters() for model in models), strict=True):
        assert type(one) is type(same)
        dense = (p.to_dense() if isinstance(p, SparseTensor) else p for p in (one, same))
        torch.testing.assert_close(*dense, rtol=1e-3, atol=1e-4)
    now = [p.components[:-1] for p in models[1].parameters() if isinstance(p, SparseTensor)]
    assert all(a is b for before, after in zip(structures, now, strict=True) for a, b in zip(before, after, strict=True))


def test_an_update_that_cannot_be_compiled_runs_as_it_is() -> None:
    """Outside an optimizer, where only values could tell that the sum keeps the pattern."""

    def update(weight: Tensor, momentum: Tensor) -> Tensor:
        return weight.addcmul_((momentum + 1).sqrt(), momentum)

    weight = SparseTensor.from_dense(torch.eye(6, 8))
    momentum = weight * 2
    expected = update(weight.clone(), momentum)
    with pytest.warns(UserWarning, match=r"could not be compiled and runs uncompiled: SparseTensor: addcmul_, which changes"):
        found = torch.compile(update, backend="sparse", fullgraph=True)(weight.clone(), momentum)
    torch.testing.assert_close(found.to_dense(), expected.to_dense())
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="SparseTensor: addcmul_, which changes the pattern"):
        torch.compile(update, backend="sparse", fullgraph=True, options={"strict": True})(weight.clone(), momentum)
