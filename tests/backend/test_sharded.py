"""Weights that others hold: FSDP2 gathers them before every forward pass, tensor parallelism keeps a part of each (DTensor).

Torch counts no writes to either, so a kernel that went by the count would compute with the weights of the first step.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gossamer
from gossamer.backend.report.report import collect
from tests.backend.harness import prune_
from tests.processes import in_processes, leave

STEPS, RANKS = 6, 2
X = torch.randn(STEPS, RANKS, 12, 32, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def network(masks: bool = False) -> Network:
    torch.manual_seed(0)
    return gossamer.sparsify(Network(), "magnitude", density=0.2) if masks else prune_(Network(), 0.2)  # type: ignore[return-value]


def losses(model: nn.Module, run: nn.Module, ranks: list[int]) -> list[Tensor]:
    """Before each of some steps, those of `ranks` summed; the model's gradients are means over all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    found = []
    for x in X:
        optimizer.zero_grad()
        loss = torch.stack([run(x[rank]).square().sum() for rank in ranks])
        loss.sum().div(len(ranks)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(loss.detach())
    return found


def begin(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/meet", rank=rank, world_size=RANKS)


def compiled(model: nn.Module, dense: str = "eager") -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, backend="sparse", options={"dense": dense, "min_gain": 0, "strict": True})  # type: ignore[return-value]


def gathered(rank: int, directory: str) -> None:
    begin(rank, directory)
    mesh = init_device_mesh("cpu", (RANKS,))
    for masks, blocks in ((False, False), (True, False), (False, True), (True, True)):
        whole = network(masks)
        alone = losses(whole, whole, [0, 1])
        model = network(masks)
        for block in model.blocks if blocks else ():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with collect() as collected:
            found = losses(model, compiled(model), [rank])
        done = Counter((d.op, d.sparse) for d in collected.decisions)
        assert done["linear", True] == 4, collected.decisions
        for ours, theirs in zip(found, alone, strict=True):
            torch.testing.assert_close(ours[0], theirs[rank], rtol=1e-4, atol=1e-4)
    leave()


def parted(rank: int, directory: str) -> None:
    begin(rank, directory)
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = network()
    alone = losses(whole, whole, [0])
    model = network()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with collect() as collected:
        found = losses(model, compiled(model), [0])
        assert isinstance(model.blocks[0].up.weight, DTensor)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
            for parameter in whole.parameters():
                parameter.mul_(2.0)
            torch.testing.assert_close(compiled(model)(X[0, 0]), whole(X[0, 0]), rtol=1e-4, atol=1e-4)
            again = compiled(model)
            for _ in range(3):
                again(X[0, 0])
                model.blocks[1].down.weight.add_(0.1)
                whole.blocks[1].down.weight.add_(0.1)
                torch.testing.assert_close(again(X[0, 0]), whole(X[0, 0]), rtol=1e-4, atol=1e-4)
    done = Counter((d.op, d.sparse) for d in collected.decisions)
    assert done["linear", True] >= 4, collected.decisions
    for ours, theirs in zip(found, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    leave()


@pytest.mark.parametrize("worker", [gathered, parted])
def test_steps_are_those_of_one_process(worker: object, tmp_path: Path) -> None:
    in_processes(worker, (str(tmp_path),), RANKS)  # type: ignore[arg-type]
