"""Stored weights under tensor parallelism: steps are those of one process, and no weight becomes dense."""

import copy
import io
import math
import pickle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
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


def joined(rank: int, directory: str, ranks: int = 2) -> DeviceMesh:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/meet", rank=rank, world_size=ranks)
    return init_device_mesh("cpu", (ranks,))


def plan_of(up: Any = MappingProxyType({}), down: Any = MappingProxyType({})) -> dict[str, Any]:
    return {"up": gossamer.distributed.ColwiseParallel(**up), "down": gossamer.distributed.RowwiseParallel(**down)}


def worker(rank: int, directory: str) -> None:
    mesh = joined(rank, directory)
    whole = block()
    alone = train(whole, whole)
    plan = plan_of()
    for compiled in (False, True):
        model = parallelize_module(block(), mesh, plan)
        assert isinstance(model.up.weight, SparseTensor) and isinstance(model.down.weight, SparseTensor)
        assert model.up.weight.shape == (11 - rank, 18) and model.down.weight.shape == (18, 11 - rank)
        assert model.up.bias.shape == (21,)
        options: Any = {"options": {"dense": "eager", "strict": True, "min_gain": 0}, "fullgraph": True}
        with collect() as collected:
            found = train(model, torch.compile(model, backend="sparse", **options) if compiled else model)
        assert found == pytest.approx(alone, rel=1e-4)
        assert bool([d for d in collected.decisions if d.sparse]) == compiled, collected.decisions
        for ours, theirs, dim in ((model.up, whole.up, 0), (model.down, whole.down, 1)):
            expected = theirs.weight.detach().to_dense().tensor_split([11], dim)[rank]
            torch.testing.assert_close(ours.weight.detach().to_dense(), expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(model.up.bias, whole.up.bias, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(model.down.bias, whole.down.bias, rtol=1e-3, atol=1e-4)

    kept = {"use_local_output": False}
    dealt = plan_of({"output_layouts": Shard(-1), **kept}, {"output_layouts": Shard(0), **kept})
    model = parallelize_module(block(), mesh, dealt)
    y = model.down(torch.relu(model.up(X[0])))
    assert isinstance(y, DTensor) and y.placements == (Shard(0),)
    fresh = block(stored=False)
    expected = fresh.down(torch.relu(fresh.up(X[0])))
    torch.testing.assert_close(y.full_tensor(), expected)
    y.square().sum().full_tensor().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(model.down.bias.grad, fresh.down.bias.grad)
    torch.testing.assert_close(model.up.bias.grad, fresh.up.bias.grad)

    plain = parallelize_module(block(stored=False), mesh, plan)
    assert isinstance(plain.up.weight, DTensor)
    narrow = gossamer.store_sparse(prune_(nn.Sequential(nn.Linear(64, 1)), 0.3))
    with pytest.raises(OptionError, match="cannot be dealt to 2 processes by dimension 0"):
        parallelize_module(narrow, mesh, {"0": gossamer.distributed.ColwiseParallel()})
    leave()


def test_steps_are_those_of_one_process(tmp_path: Path) -> None:
    in_processes(worker, (str(tmp_path),), 2)


def clipped(model: nn.Module, norm_type: float, foreach: bool | None) -> list[Tensor]:
    """Returns the norms and the weights after steps with clipped gradients."""
    optimizer, norms = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5), []
    for x in X:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type, foreach=foreach))
        optimizer.step()
    plain = gossamer.finalize(copy.deepcopy(model)).parameters()
    return [*norms, *(p.full_tensor() if isinstance(p, DTensor) else p for p in plain)]


def parts(rank: int, directory: str) -> None:
    mesh = joined(rank, directory)

    def parallel(plan: dict[str, Any] | None = None) -> nn.Module:
        return parallelize_module(block(), mesh, plan or plan_of())

    for norm_type, foreach in ((2.0, None), (math.inf, None), (2.0, True)):
        torch.testing.assert_close(clipped(parallel(), norm_type, foreach), clipped(block(), norm_type, foreach))

    model = parallel()
    expected, copied = model(X[0]).detach(), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    torch.testing.assert_close(copied(X[0]).detach(), expected)
    torch.testing.assert_close(clipped(copied, 2.0, None), clipped(block(), 2.0, None))
    with pytest.raises(OptionError, match="cannot be pickled"):
        pickle.dumps(model)

    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(X[0]).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(model(X[1]).sum()).backward()
    if rank == 0:
        model.up.weight.grad.mul_(math.inf)
    before = model.down.bias.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0 and torch.equal(model.down.bias, before)

    saved, resumed = io.BytesIO(), parallel()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    loaded, other = torch.load(saved), torch.optim.AdamW(resumed.parameters())
    resumed.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optimizer"])
    steps = [[], []]
    for each, its, losses in ((model, optimizer, steps[0]), (resumed, other, steps[1])):
        for x in X:
            its.zero_grad()
            losses.append(each(x).square().sum())
            losses[-1].backward()
            its.step()
    assert steps[0] == steps[1]

    for state in (model.state_dict(), {"moment": optimizer.state[model.up.weight]["exp_avg"]}):
        with pytest.raises(CheckpointException, match=r"is a part \(1[01], 18\) of a stored weight"):
            dcp.save(state, checkpoint_id=f"{directory}/parts")
    plain, dense = gossamer.finalize(copy.deepcopy(model)), block(stored=False)
    torch.testing.assert_close(plain(X[0]), model(X[0]))
    dcp.save(plain.state_dict(), checkpoint_id=f"{directory}/whole")
    state = dense.state_dict()
    dcp.load(state, checkpoint_id=f"{directory}/whole")
    dense.load_state_dict(state)
    torch.testing.assert_close(dense(X[0]), model(X[0]))

    losses = []
    for plan in (plan_of(), plan_of({"output_layouts": Replicate()}, {"input_layouts": Replicate()})):
        model = parallel(plan)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        gossamer.train_sparse(model, optimizer, "rigl", steps=8, sparsity=0.7, every=2)
        losses.append([])
        for x in X:
            torch.testing.assert_close(copy.deepcopy(model)(x), model(x))
            losses[-1].append(model(x).square().sum())
            optimizer.zero_grad()
            losses[-1][-1].backward()
            optimizer.step()
    torch.testing.assert_close(*losses)
    leave()


def test_parts_are_clipped_copied_and_saved_as_the_whole_weight(tmp_path: Path) -> None:
    in_processes(parts, (str(tmp_path),), 2)


def uneven(rank: int, directory: str) -> None:
    mesh = joined(rank, directory, 3)
    for outputs in (4, 7):  # dealt as 2, 2, 0 and 3, 3, 1
        torch.manual_seed(0)
        layer = prune_(nn.Sequential(nn.Linear(18, outputs)), 0.3)
        stored = gossamer.store_sparse(copy.deepcopy(layer))
        plan = {"0": gossamer.distributed.ColwiseParallel(output_layouts=Replicate())}
        model = parallelize_module(stored, mesh, plan)  # type: ignore[arg-type]
        mine, whole = X[0].clone().requires_grad_(), X[0].clone().requires_grad_()
        y, expected = model(mine), layer(whole)
        torch.testing.assert_close(y, expected)
        y.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(mine.grad, whole.grad)
        torch.testing.assert_close(model[0].bias.grad, layer[0].bias.grad)
    leave()


def test_outputs_that_no_number_of_processes_divides_are_gathered(tmp_path: Path) -> None:
    in_processes(uneven, (str(tmp_path),), 3)
