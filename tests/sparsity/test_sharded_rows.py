"""Graphs of which each process has some nodes: products, GCN and GAT are those of one process, and fetch what they need."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch_geometric.nn import GATConv, SAGEConv

import gossamer
from benchmarks.scaling import fetched_rows
from gossamer import Format, FormatError, OptionError, SparseTensor
from gossamer.backend.report.report import collect
from gossamer.distributed import ShardedRows
from tests.processes import in_processes, leave

NODES, FEATURES, CLASSES, STEPS = 70, 6, 5, 5  # 70 are dealt as 18, 18, 18, 16 to four


def graph(nodes: int = NODES, columns: int = NODES, dtype: torch.dtype = torch.float64) -> SparseTensor:
    generator = torch.Generator().manual_seed(4)
    there = torch.rand(nodes, columns, generator=generator) < 0.08
    return SparseTensor.from_dense(torch.where(there, torch.rand(nodes, columns, generator=generator), 0.0).to(dtype))


X = torch.randn(NODES, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(CLASSES, (NODES,), generator=torch.Generator().manual_seed(2))


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def forward(self, a: ShardedRows | SparseTensor, x: Tensor) -> Tensor:
        return a.matmul(self.last(torch.relu(a.matmul(self.first(x)))))


class Attention(nn.Module):
    """Heads of dot-product attention over neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.last = nn.Linear(FEATURES, 3 * 2 * 8), nn.Linear(16, CLASSES)

    def forward(self, a: ShardedRows | SparseTensor, x: Tensor) -> Tensor:
        own, neighbours = (a.local, a.fetch(x)) if isinstance(a, ShardedRows) else (a, x)
        q = self.qkv(x).view(-1, 3, 2, 8)[:, 0]
        _, k, v = self.qkv(neighbours).view(-1, 3, 2, 8).unbind(1)
        return self.last(gossamer.graph_attention(own, v, queries=q, keys=k, scale=8**-0.5).flatten(1))  # type: ignore[no-any-return]


class Geometric(nn.Module):
    """Layers of PyTorch Geometric, on sources and targets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = GATConv((FEATURES, FEATURES), 8, heads=2, add_self_loops=False)
        self.last = SAGEConv((16, 16), CLASSES)

    def forward(self, a: Any, x: Tensor) -> Tensor:
        x = torch.relu(self.first((a.fetch(x), x), a.edge_index))
        return self.last((a.fetch(x), x), a.edge_index)  # type: ignore[no-any-return]


class Whole:
    """A graph that is on one process, for the layers of PyTorch Geometric."""

    def __init__(self, a: SparseTensor) -> None:
        self.edge_index = a.to_format(Format.COO).to_torch().indices().flip(0)

    def fetch(self, x: Tensor) -> Tensor:
        return x


def train(model: nn.Module, run: Any, a: Any, own: slice) -> list[float]:
    """Losses of some steps; gradients are summed over processes."""
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(run(a, X[own]), Y[own], reduction="sum") / NODES
        loss.backward()  # type: ignore[no-untyped-call]
        total = loss.detach().clone()
        if own != slice(None):
            for each in (total, *(p.grad for p in model.parameters())):
                dist.all_reduce(each)
        optimizer.step()
        losses.append(float(total))
    return losses


def worker(rank: int, directory: str, ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/meet", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    own = slice(rank * math.ceil(NODES / ranks), (rank + 1) * math.ceil(NODES / ranks))
    whole = graph()
    shard = ShardedRows.of(whole, mesh)
    needed = {int(j) for j in whole.to_dense()[own].nonzero()[:, 1]}
    assert shard.fetched == len(needed - set(range(NODES)[own])) < NODES - len(X[own])
    assert shard.fetched == fetched_rows(whole.to_scipy(), ranks)[rank]

    x, weight = X.clone().requires_grad_(), torch.randn(NODES, FEATURES, generator=torch.Generator().manual_seed(5)).double()
    mine = X[own].clone().requires_grad_()
    (whole @ x * weight).sum().backward()
    y = shard @ mine
    (y * weight[own]).sum().backward()
    torch.testing.assert_close(y, (whole @ X)[own])
    torch.testing.assert_close(mine.grad, x.grad[own])  # type: ignore[index]
    dealt = distribute_tensor(X, mesh, [Shard(0)]).requires_grad_()
    result = shard @ dealt
    assert isinstance(result, DTensor)
    torch.testing.assert_close(result.full_tensor(), whole @ X)
    (result.to_local() * weight[own]).sum().backward()
    torch.testing.assert_close(dealt.grad.full_tensor(), x.grad)  # type: ignore[union-attr]

    tall = graph(NODES + 3, NODES)
    torch.testing.assert_close((ShardedRows.of(tall, mesh) @ distribute_tensor(X, mesh, [Shard(0)])).full_tensor(), tall @ X)
    few = ShardedRows.of(graph(2, NODES), mesh)
    assert (few @ X[own]).shape[0] == (0 if rank >= 2 else 2 // min(ranks, 2))

    for kind in (GCN, Attention, Geometric) if ranks == 2 else (GCN,):
        found = {}
        for how in ("alone", "eager", "compiled"):
            torch.manual_seed(0)
            model = kind().double()
            a: Any = shard if how != "alone" else Whole(whole) if kind is Geometric else whole
            options: Any = {"options": {"strict": True, "dense": "eager", "min_gain": 0}, "fullgraph": kind is not Geometric}
            run = torch.compile(model, backend="sparse", **options) if how == "compiled" else model
            with collect() as collected:
                found[how] = train(model, run, a, slice(None) if how == "alone" else own)
            if how == "compiled" and kind is not Attention:  # which is one operation of ours as it stands
                assert {d.sparse for d in collected.decisions} == {True}, collected.decisions
        assert found["eager"] == pytest.approx(found["alone"], rel=1e-6)
        assert found["compiled"] == pytest.approx(found["alone"], rel=1e-5)
        assert found["alone"][-1] < found["alone"][0]

    with pytest.raises(OptionError, match=f"process 0 has {NODES} of {NODES * ranks} rows|should have"):
        ShardedRows(graph(NODES + rank, NODES), mesh)
    with pytest.raises(FormatError, match="of the rows of x, got 3"):
        shard @ X[:3]
    leave()


@pytest.mark.parametrize("ranks", [2, 4])
def test_graphs_in_parts(ranks: int, tmp_path: Path) -> None:
    in_processes(worker, (str(tmp_path), ranks), ranks)
