"""DistributedDataParallel: Dynamo's DDPOptimizer compiles a graph in parts, with fake tensors in place of parameters.

Each process is one of its own, as gloo wants it; what it finds is compared with the model without the wrapper.
"""

import os
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gossamer
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.report.report import collect
from tests.processes import in_processes, leave

LAYERS, WIDTH = 3, 512
OPTIONS = {"min_gain": 0, "strict": True, "dense": "eager"}


class Network(nn.Module):
    """Layers of a megabyte each, so that a bucket of DDP holds one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def masked() -> Network:
    torch.manual_seed(0)
    return gossamer.sparsify(Network(), "magnitude", density=0.1)


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    y.square().mean().backward()
    return y.detach()


def worker(rank: int, size: int, directory: str) -> None:
    torch.set_num_threads(1)
    os.environ["GOSSAMER_CACHE_DIR"] = f"{directory}/cache"
    dist.init_process_group("gloo", f"file://{directory}/meet", rank=rank, world_size=size)
    model, parts = masked(), torch.randn(size, 16, WIDTH, generator=torch.Generator().manual_seed(1))
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    compiled = torch.compile(wrapped, backend="sparse", options=OPTIONS)
    with collect() as collected:
        y = step(compiled, parts[rank])
    found = Counter((d.op, d.sparse) for d in collected.decisions)
    assert found["linear", True] == LAYERS and found["linear backward", True] >= LAYERS - 1, collected.decisions
    reference = masked()
    outputs = [step(reference, part) for part in parts]
    torch.testing.assert_close(y, outputs[rank], rtol=1e-4, atol=1e-5)
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad / size, rtol=1e-4, atol=1e-6)
    leave()


def test_a_masked_model_trains_sparse_under_ddp(tmp_path: Path) -> None:
    in_processes(worker, (2, str(tmp_path)), 2)


def test_static_tensors_without_content_stay_dense_and_say_so() -> None:
    """No parameter of a graph is read if it is fake and nobody knows what it stands for."""
    from torch._subclasses import FakeTensorMode

    graph = torch.fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    graph.output((graph.call_function(torch.mm, (x, weight)),))
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(nn.Parameter(torch.zeros(32, 32))), mode.from_tensor(torch.zeros(4, 32))]
    inputs = Inputs.of(torch.fx.GraphModule({}, graph), given)
    assert inputs.statics == {} and list(inputs.unknown) == [("weight", (32, 32))]
    with collect() as collected:
        gossamer.backend.sparse(inputs.module, given, options={"dense": "eager"})
    assert [(d.name, d.sparse) for d in collected.decisions] == [("weight", False)]
    assert "unknown at compile time" in collected.decisions[0].reason
