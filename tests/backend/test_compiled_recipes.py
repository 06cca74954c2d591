"""Recipes train compiled models as eager ones: sparse forward and backward, moving nonzeros, no graph again; on all ranks."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
from tests.backend.harness import assert_same, compile_and_run
from tests.processes import in_processes, leave

STEPS = 13


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(32, 64, generator=generator), torch.randn(32, 48, generator=generator)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int, part: slice = slice(None)) -> list[float]:
    losses = []
    for step in range(steps):
        x, target = batch(step)
        loss = F.mse_loss(model(x[part]), target[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("name", "options"), [("rigl", {"sparsity": 0.8, "every": 4}), ("sr-ste", {})])
def test_compiled_training_is_eager_training(name: str, options: dict[str, Any]) -> None:
    found = []
    for compiled in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.1)
        training = gossamer.train_sparse(model, optimizer, name, steps=STEPS, **options)
        call: Any = model
        if compiled:
            run = compile_and_run(model, batch(0)[0], grad=True, regions=3)
            assert [d.op for d in run.regions] == ["linear", "linear", "linear backward"]
            run.output.sum().backward()
            call = run.function
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found.append(torch.tensor(train(call, optimizer, STEPS)))
    assert_same(found[1], found[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert sum(training.densities().values()) / 2 == pytest.approx(0.5 if name == "sr-ste" else 0.2, abs=0.02)


def test_what_trained_sparse_goes_on_with_stored_values() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    training = gossamer.train_sparse(model, optimizer, "rigl", steps=STEPS, sparsity=0.8, every=4)
    train(model, optimizer, STEPS)
    training.detach()
    twin = gossamer.store_sparse(copy.deepcopy(model))
    assert_same(twin(batch(0)[0]).detach(), model(batch(0)[0]).detach())


def worker(rank: int, size: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/meet", rank=rank, world_size=size)
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = gossamer.train_sparse(model, optimizer, "rigl", steps=STEPS, sparsity=0.8, every=4)
    train(model, optimizer, STEPS, slice(rank * 16, rank * 16 + 16))
    alone = network()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    reference = gossamer.train_sparse(alone, optimizer, "rigl", steps=STEPS, sparsity=0.8, every=4)
    first = reference.masks.layers[0].mask.clone()
    train(alone, optimizer, STEPS)
    for ours, theirs in zip(training.masks.layers, reference.masks.layers, strict=True):
        assert torch.equal(ours.mask, theirs.mask)
        assert_same(ours.parameter.detach(), theirs.parameter.detach())
    assert not torch.equal(first, reference.masks.layers[0].mask)
    leave()


def test_masks_are_in_step_on_all_ranks(tmp_path: Path) -> None:
    in_processes(worker, (2, str(tmp_path)), 2)
