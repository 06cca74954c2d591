"""Stored weights under `gossamer.distributed.data_parallel`: two processes make the steps that one makes with both batches."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer import OptionError, SparseTensor
from gossamer.backend.report.report import collect
from gossamer.sparsity.operations.same_pattern import PatternError
from tests.backend.harness import prune_
from tests.processes import in_processes, leave

STEPS, RANKS = 12, 2
X = torch.randn(64, 24, generator=torch.Generator().manual_seed(1))
Y = X[:, :8].argmax(1)


class Network(nn.Module):
    """What Dynamo compiles within DistributedDataParallel: a bare Sequential it skips, as all code of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 48), nn.Linear(48, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.relu(self.first(x)))
        return y


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return gossamer.store_sparse(prune_(Network(), 0.2))  # type: ignore[type-var, return-value]


def train(model: nn.Module, run: nn.Module, rows: slice, steps: int = STEPS) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    gossamer.train_sparse(model, optimizer, "rigl", steps=STEPS, sparsity=0.8, every=4)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(run(X[rows]), Y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def dense(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to_dense() if isinstance(parameter, SparseTensor) else parameter.detach()


def worker(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/meet", rank=rank, world_size=RANKS)
    rows = slice(rank * 32, rank * 32 + 32)
    alone = network()
    train(alone, alone, slice(0, 64))
    for compiled in (False, True):
        inner = network()
        with torch.no_grad():
            inner.last.weight.mul_(1.0 + rank)
        model = gossamer.distributed.data_parallel(inner)
        assert isinstance(model, DistributedDataParallel)
        run = (
            torch.compile(model, backend="sparse", options={"dense": "eager", "min_gain": 0, "strict": True})
            if compiled
            else model
        )
        with collect() as collected:
            train(model, run, rows)
        assert bool([d for d in collected.decisions if d.sparse]) == compiled, collected.decisions
        for ours, theirs in zip(inner.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(dense(ours), dense(theirs), rtol=1e-3, atol=1e-4)
    with model.no_sync():
        model(X[rows]).sum().backward()
        kept = inner.first.weight.grad.values().clone()  # type: ignore[union-attr]
    inner(X[rows]).sum().backward()
    inner.zero_grad()
    averages_as_torch(run, model, rank, rows)
    others = [torch.empty_like(kept) for _ in range(RANKS)]
    dist.all_gather(others, kept)
    assert not torch.equal(*others)
    with pytest.raises(OptionError, match="processes store other elements of"):
        gossamer.distributed.data_parallel(network(rank))
    with pytest.raises(PatternError, match=r"gossamer\.distributed\.data_parallel"):
        DistributedDataParallel(network())
    leave()


def averages_as_torch(run: nn.Module, model: DistributedDataParallel, rank: int, rows: slice) -> None:
    """A gradient is averaged if the forward pass was outside `no_sync()`, wherever the backward pass is."""
    weights = [next(each for name, each in model.named_parameters() if name.endswith(part)) for part in ("weight", "bias")]
    for within in (True, False):
        model.zero_grad()
        with model.no_sync() if within else nullcontext():
            loss = run(X[rows]).square().sum()
        with torch.no_grad():
            run(X[rows])
        with nullcontext() if within else model.no_sync():
            loss.backward()
        for weight in weights:
            assert weight.grad is not None
            own = weight.grad.values() if isinstance(weight.grad, SparseTensor) else weight.grad
            others = [torch.empty_like(own) for _ in range(RANKS)]
            dist.all_gather(others, own.clone())
            assert torch.equal(*others) == (not within)


def pruned_layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return prune_(nn.Linear(16, 16, bias=bias), 0.3)  # type: ignore[return-value]


def tied() -> nn.Module:
    first, second = pruned_layer(), nn.Linear(16, 16)
    second.weight = first.weight
    return nn.Sequential(first, second)


def with_graph() -> nn.Module:
    model = nn.Sequential(pruned_layer())
    model.register_buffer("graph", SparseTensor.from_dense(torch.eye(16)))
    return model


def without_biases() -> nn.Module:
    return nn.Sequential(pruned_layer(bias=False), pruned_layer(bias=False), nn.BatchNorm1d(16, affine=False))


@pytest.mark.parametrize("make", [pruned_layer, tied, with_graph, without_biases])
def test_bare_and_tied_weights_and_sparse_buffers_are_left_out_of_flat_buffers(make: Callable[[], nn.Module]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain, stored, x = make(), gossamer.store_sparse(make()), torch.randn(5, 16)
        run, names = gossamer.distributed.data_parallel(stored), [name for name, _ in plain.named_parameters()]
        for _ in range(2):
            for each in (run, plain):
                each(x).pow(3).sum().backward()
        assert [name for name, _ in stored.named_parameters()] == names
        for ours, theirs in zip(stored.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            expected = theirs.grad * (theirs != 0) if isinstance(ours, SparseTensor) else theirs.grad
            torch.testing.assert_close(ours.grad.to_dense(), expected, rtol=1e-4, atol=1e-4)
    finally:
        dist.destroy_process_group()


def test_steps_are_those_of_one_process(tmp_path: Path) -> None:
    in_processes(worker, (str(tmp_path),), RANKS)
