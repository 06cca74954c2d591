"""Recipes on weights of which each process has a part (DTensor): masks and steps are those of one process with all batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gossamer
from gossamer import OptionError
from tests.processes import in_processes, leave

STEPS, HALF = 8, 4
X = torch.randn(STEPS, 4, 8, 12, generator=torch.Generator().manual_seed(1))
RECIPES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "one-shot": {"sparsity": 0.7, "at": 2},
    "gradual": {"sparsity": 0.8, "every": 2, "distribution": "global"},
    "gradual, first order": {"sparsity": 0.8, "every": 2, "saliency": "first-order", "begin": 2},
    "random": {"sparsity": 0.8},
    "set": {"sparsity": 0.8, "every": 2},
    "rigl": {"sparsity": 0.8, "every": 2},
    "soft": {"sparsity": 0.5, "every": 2},
}


def network(recipe: str = "") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 6))
    if recipe == "fixed":
        with torch.no_grad():
            for layer in (model[0], model[2]):
                layer.weight.mul_(torch.rand(layer.weight.shape, generator=torch.Generator().manual_seed(3)) < 0.3)
    return model


def attached(model: nn.Module, recipe: str) -> tuple[torch.optim.Optimizer, gossamer.SparseTraining]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    return optimizer, gossamer.train_sparse(model, optimizer, recipe.partition(",")[0], steps=STEPS, **RECIPES[recipe])


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, ranks: int, probe: bool = False
) -> None:  # fmt: skip
    """Each process has its share of four parts of a batch, in two passes where it has two or more.

    probe  whether the loop computes other gradients before each step, which it discards
    """
    parts = X.shape[1] // ranks
    for step in steps:
        if probe:
            model(30 * X[step, 0].flip(0, 1)).square().mean().backward()
        optimizer.zero_grad()
        for part in range(rank * parts, rank * parts + parts):
            (model(X[step, part]).square().mean() / parts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def equal(model: nn.Module, reference: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.detach()), theirs.detach(), rtol=1e-4, atol=1e-5)
        assert torch.equal(whole(ours.detach()) == 0, theirs == 0)


def begin(rank: int, ranks: int, directory: str) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/meet{ranks}", rank=rank, world_size=ranks)
    return init_device_mesh("cpu", (ranks,))


def sharded(rank: int, directory: str) -> None:
    mesh = begin(rank, 2, directory)
    for recipe in RECIPES:
        alone, model = network(recipe), network(recipe)
        optimizer, reference = attached(alone, recipe)
        train(alone, optimizer, range(STEPS), 0, 1)
        fully_shard(model, mesh=mesh)
        optimizer, training = attached(model, recipe)
        train(model, optimizer, range(STEPS), rank, 2)
        model.reshard()  # type: ignore[operator]
        equal(model, alone)
        assert training.densities() == reference.densities()
        training.detach()
        equal(model, alone)
    discarded(mesh, rank)
    with pytest.raises(OptionError, match="needs a parametrization"):
        model = fully_shard(network(), mesh=mesh)
        gossamer.train_sparse(model, torch.optim.AdamW(model.parameters()), "sr-ste", steps=STEPS)
    leave()


def discarded(mesh: Any, rank: int) -> None:
    """Nonzeros do not grow by gradients that the loop discards. They grow by gradients that it assigns."""
    alone, model, assigned = network(), network(), network()
    optimizer, _ = attached(alone, "rigl")
    train(alone, optimizer, range(STEPS), 0, 1)
    optimizer, _ = attached(fully_shard(model, mesh=mesh), "rigl")
    train(model, optimizer, range(STEPS), rank, 2, probe=True)
    model.reshard()  # type: ignore[operator]
    equal(model, alone)
    optimizer, _ = attached(fully_shard(assigned, mesh=mesh), "rigl")
    for step in range(STEPS):
        twin = network()
        twin.load_state_dict({name: whole(each) for name, each in assigned.state_dict().items()})
        torch.stack([twin(part).square().mean() for part in X[step]]).mean().backward()
        for parameter, same in zip(assigned.parameters(), twin.parameters(), strict=True):
            assert isinstance(parameter, DTensor) and same.grad is not None
            parameter.grad = distribute_tensor(same.grad, mesh, parameter.placements)
        torch.nn.utils.clip_grad_norm_(assigned.parameters(), 0.5)
        optimizer.step()
    equal(assigned, alone)


def parted(rank: int, directory: str) -> None:
    mesh = begin(rank, 2, directory)
    alone, model = network(), network()
    optimizer, _ = attached(alone, "rigl")
    train(alone, optimizer, range(STEPS), 0, 1)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer, _ = attached(model, "rigl")
    train(model, optimizer, range(STEPS), 0, 1, probe=True)
    equal(model, alone)
    leave()


def half(rank: int, directory: str, ranks: int, first: bool) -> None:
    """Half of the steps: the first with so many processes, the other ones with others."""
    mesh = begin(rank, ranks, directory)
    for recipe in ("gradual", "rigl"):
        model = fully_shard(network(), mesh=mesh)
        optimizer, training = attached(model, recipe)
        if not first:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments}
            dcp.load(state, checkpoint_id=f"{directory}/{recipe}")
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            training.load_state_dict(torch.load(f"{directory}/{recipe}.masks"))
        train(model, optimizer, range(HALF) if first else range(HALF, STEPS), rank, ranks)
        model.reshard()
        if first:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{directory}/{recipe}")
            masks = training.state_dict()
            if rank == 0:
                torch.save(masks, f"{directory}/{recipe}.masks")
        else:
            alone = network()
            optimizer, _ = attached(alone, recipe)
            train(alone, optimizer, range(STEPS), 0, 1)
            equal(model, alone)
    leave()


@pytest.mark.parametrize("worker", [sharded, parted])
def test_steps_are_those_of_one_process(worker: object, tmp_path: Path) -> None:
    in_processes(worker, (str(tmp_path),), 2)  # type: ignore[arg-type]


def test_a_checkpoint_of_two_processes_goes_on_with_four(tmp_path: Path) -> None:
    in_processes(half, (str(tmp_path), 2, True), 2)
    in_processes(half, (str(tmp_path), 4, False), 4)
