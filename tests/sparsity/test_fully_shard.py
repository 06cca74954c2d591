"""`gossamer.distributed.fully_shard`: stored weights on all processes, the rest by FSDP2, to the steps of one process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import gossamer
from gossamer import OptionError, SparseTensor
from gossamer.backend.report.report import collect
from tests.processes import in_processes, leave

STEPS, TOKENS = 8, 8
X = torch.randn(STEPS, 4, TOKENS, 24, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """Two stored weights, and what is none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 44), nn.Linear(44, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList([Block(), Block()]), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    model = gossamer.sparsify(Network(), "magnitude", density=0.2, skip=["last"])
    return gossamer.store_sparse(model)


def shard(model: Network, mesh: Any) -> Network:
    for block in model.blocks:
        gossamer.distributed.fully_shard(block, mesh=mesh)
    return gossamer.distributed.fully_shard(model)  # over all processes


def train(model: nn.Module, rank: int, ranks: int, recipe: str = "") -> None:
    attached(model, recipe, fused=True).take(range(STEPS), rank, ranks)


@dataclass
class Training:
    """Each process has its share of four parts of a batch, in passes of one part."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    recipe: "gossamer.SparseTraining | None"

    def take(self, steps: range, rank: int, ranks: int, clip: float = 0.0) -> None:
        parts = X.shape[1] // ranks
        for step in steps:
            self.optimizer.zero_grad()
            for part in range(rank * parts, rank * parts + parts):
                (self.model(X[step, part]).square().mean() / parts).backward()
            if clip:
                total = nn.utils.clip_grad_norm_(self.model.parameters(), clip)
                assert float(total.full_tensor() if isinstance(total, DTensor) else total) > clip
            self.optimizer.step()


def attached(model: nn.Module, recipe: str, fused: bool) -> Training:
    stored = [p for p in model.parameters() if isinstance(p, SparseTensor)]
    others = [p for p in model.parameters() if not isinstance(p, SparseTensor)]
    optimizer = torch.optim.AdamW([{"params": stored}, {"params": others}], 1e-2, fused=fused)
    if not recipe:
        return Training(model, optimizer, None)
    made = gossamer.train_sparse(model, optimizer, recipe, steps=STEPS, sparsity=0.8, every=3, skip=["last"])
    return Training(model, optimizer, made)


def equal(model: nn.Module, reference: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if isinstance(ours, SparseTensor):
            assert isinstance(theirs, SparseTensor)
            for array, expected in zip(ours.components[:-1], theirs.components[:-1], strict=True):
                assert torch.equal(array, expected)
            torch.testing.assert_close(ours.values().detach(), theirs.values().detach(), rtol=1e-3, atol=1e-4)
        else:
            assert isinstance(ours, DTensor)
            torch.testing.assert_close(ours.detach().full_tensor(), theirs.detach(), rtol=1e-3, atol=1e-4)


def worker(rank: int, ranks: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/meet", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for recipe in ("", "rigl"):
        alone, model = network(), network()
        train(alone, 0, 1, recipe)
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(1.0 + rank)  # type: ignore[union-attr, operator]
        shard(model, mesh)
        train(model, rank, ranks, recipe)
        equal(model, alone)
    alone, model = network(), shard(network(), mesh)
    train(alone, 0, 1)
    for block in model.blocks:
        block.compile(backend="sparse", options={"dense": "inductor", "min_gain": 0, "strict": True})
    with collect() as collected:
        train(model, rank, ranks)
    assert len([d for d in collected.decisions if d.sparse]) >= 6, collected.decisions  # both ways, and gradients of weights
    equal(model, alone)
    with pytest.raises(OptionError, match=r"gossamer\.distributed\.fully_shard"):
        torch_fully_shard(network(), mesh=mesh)
    with pytest.raises(OptionError, match=r"mp_policy computes in torch\.bfloat16"):
        gossamer.distributed.fully_shard(network(), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(OptionError, match="processes store other elements of"):
        gossamer.distributed.fully_shard(network(rank), mesh=mesh)
    leave()


def test_steps_are_those_of_one_process(tmp_path: Path) -> None:
    in_processes(worker, (2, str(tmp_path)), 2)


def half(rank: int, directory: str, ranks: int, first: bool) -> None:
    """Trains the first half of the steps and saves, or loads and trains the second; gradients are clipped."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/meet{ranks}{first}", rank=rank, world_size=ranks)
    for recipe, fused in (("", True), ("rigl", False)):
        place = f"{directory}/{recipe}{fused}"
        training = attached(shard(network(), init_device_mesh("cpu", (ranks,))), recipe, fused)
        if not first:
            weights, moments = get_state_dict(training.model, training.optimizer)
            state = {"model": weights, "optimizer": moments}
            dcp.load(state, checkpoint_id=place)
            model, optimizer = state["model"], state["optimizer"]
            set_state_dict(training.model, training.optimizer, model_state_dict=model, optim_state_dict=optimizer)
            if training.recipe is not None:
                training.recipe.load_state_dict(torch.load(f"{place}.masks"))
        training.take(range(STEPS // 2) if first else range(STEPS // 2, STEPS), rank, ranks, clip=0.05)
        alone = attached(network(), recipe, fused)
        alone.take(range(STEPS // 2 if first else STEPS), 0, 1, clip=0.05)
        equal(training.model, alone.model)
        if first:
            weights, moments = get_state_dict(training.model, training.optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=place)
            if training.recipe is not None and rank == 0:
                torch.save(training.recipe.state_dict(), f"{place}.masks")
    leave()


@pytest.mark.parametrize(("ranks", "then"), [(2, 4), (4, 2)])
def test_a_checkpoint_goes_on_with_another_number_of_processes(ranks: int, then: int, tmp_path: Path) -> None:
    in_processes(half, (str(tmp_path), ranks, True), ranks)
    in_processes(half, (str(tmp_path), then, False), then)


def test_a_list_of_modules_is_sharded_as_one() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, alone, mesh = network(), network(), init_device_mesh("cpu", (1,))
        assert len(gossamer.distributed.fully_shard([model.blocks[1], model.last], mesh=mesh)) == 2
        gossamer.distributed.fully_shard(model, mesh=mesh)
        for each in (model, alone):
            each(X[0, 0]).square().mean().backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            found = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad.to_dense()
            torch.testing.assert_close(found, theirs.grad.to_dense())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("parts", [("blocks.0.up", "blocks.0.down"), ("blocks.0",)])
def test_gradients_of_stored_weights_are_divided_by_the_factor_of_their_module(parts: tuple[str, ...]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, alone, mesh = network(), network(), init_device_mesh("cpu", (1,))
        for part in (*parts, ""):
            gossamer.distributed.fully_shard(model.get_submodule(part), mesh=mesh)
        for factor in (4.0, 2.0):
            for part in parts:
                module: Any = model.get_submodule(part)
                module.set_gradient_divide_factor(factor)
            for each in (model, alone):
                each(X[0, 0]).square().mean().backward()
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            found = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad.to_dense()
            share = (1 / 4 + 1 / 2) / 2 if name.startswith(parts) else 1.0
            torch.testing.assert_close(found, theirs.grad.to_dense() * share)
    finally:
        dist.destroy_process_group()
