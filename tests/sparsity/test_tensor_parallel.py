"""Stored weights under tensor parallelism: steps are those of one process, and no weight becomes dense."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import gossamer
from gossamer import OptionError, SparseTensor
from gossamer.backend.report.report import collect
from tests.backend.harness import prune_
from tests.processes import in_processes, leave

STEPS = 4
X = torch.randn(STEPS, 6, 18, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(18, 21), nn.Linear(21, 18)  # neither is dealt evenly

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def block(stored: bool = True) -> Block:
    torch.manual_seed(0)
    made = prune_(Block(), 0.3)
    return gossamer.store_sparse(made) if stored else made  # type: ignore[return-value, type-var]


def train(model: nn.Module, run: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    losses = []
    for x in X:
        optimizer.zero_grad()
        y = run(x)
        loss = (y.full_tensor() if isinstance(y, DTensor) else y).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def worker(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = block()
    alone = train(whole, whole)
    plan: dict[str, Any] = {"up": gossamer.distributed.ColwiseParallel(), "down": gossamer.distributed.RowwiseParallel()}
    for compiled in (False, True):
        model = parallelize_module(block(), mesh, plan)
        assert isinstance(model.up.weight, SparseTensor) and isinstance(model.down.weight, SparseTensor)
        assert model.up.weight.shape == (11 - rank, 18) and model.down.weight.shape == (18, 11 - rank)
        assert model.up.bias.shape == (11 - rank,)
        options: Any = {"options": {"dense": "eager", "strict": True, "min_gain": 0}, "fullgraph": True}
        with collect() as collected:
            found = train(model, torch.compile(model, backend="sparse", **options) if compiled else model)
        assert found == pytest.approx(alone, rel=1e-4)
        assert bool([d for d in collected.decisions if d.sparse]) == compiled, collected.decisions
        for ours, theirs, dim in ((model.up, whole.up, 0), (model.down, whole.down, 1)):
            expected = theirs.weight.detach().to_dense().tensor_split([11], dim)[rank]
            torch.testing.assert_close(ours.weight.detach().to_dense(), expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(model.down.bias, whole.down.bias, rtol=1e-3, atol=1e-4)

    dealt = {"up": gossamer.distributed.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    dealt |= {"down": gossamer.distributed.RowwiseParallel(output_layouts=Shard(0), use_local_output=False)}  # type: ignore[dict-item]
    model = parallelize_module(block(), mesh, dealt)
    y = model.down(torch.relu(model.up(X[0])))
    assert isinstance(y, DTensor) and y.placements == (Shard(0),)
    fresh = block(stored=False)
    expected = fresh.down(torch.relu(fresh.up(X[0])))
    torch.testing.assert_close(y.full_tensor(), expected)
    y.square().sum().full_tensor().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(model.down.bias.grad, fresh.down.bias.grad)
    torch.testing.assert_close(model.up.bias.grad, fresh.up.bias.grad.tensor_split([11])[rank])

    plain = parallelize_module(block(stored=False), mesh, plan)
    assert isinstance(plain.up.weight, DTensor)
    narrow = gossamer.store_sparse(prune_(nn.Sequential(nn.Linear(64, 1)), 0.3))
    with pytest.raises(OptionError, match="cannot be dealt to 2 processes by dimension 0"):
        parallelize_module(narrow, mesh, {"0": gossamer.distributed.ColwiseParallel()})
    leave()


def test_steps_are_those_of_one_process(tmp_path: Path) -> None:
    in_processes(worker, (str(tmp_path),), 2)
