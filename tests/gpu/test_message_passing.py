"""Message passing over edge lists on a GPU: what is recognised, launched, and eager torch's numbers."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.backend.devices.cuda_device import Gpu
from gossamer.sparsity.edges.sorted_edges import SortedEdges
from tests.backend.harness import assert_same, compile_and_run
from tests.gpu.emulated_device import EmulatedDevice, emulated_device

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")
NODES, EDGES = 10, 40


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """A GPU in place of the CPU."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    emulated = emulated_device()
    with emulated.installed(monkeypatch), emulated.operations(monkeypatch):
        yield emulated


class Convolution(nn.Module):
    """A mean over weighted neighbours, with as many weights as heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.lift, self.heads = nn.Linear(6, heads * 4), heads

    def forward(self, x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
        source, target = edges
        rows = self.lift(x).view(-1, self.heads, 4)
        messages = rows.index_select(0, source) * weight[:, :, None]
        return torch.zeros_like(rows).index_add(0, target, messages)


class Attention(nn.Module):
    """A layer of a graph attention network, of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.score = nn.Linear(6, 8), nn.Parameter(torch.randn(2, 2, 4))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        rows = self.lift(x).view(-1, 2, 4)
        of_source, of_target = ((rows * part).sum(2) for part in self.score)
        z = F.leaky_relu(of_source.index_select(0, source) + of_target.index_select(0, target), 0.2)
        index = target[:, None].expand(-1, 2)
        highest = torch.full((NODES, 2), -torch.inf).scatter_reduce(0, index, z, "amax")
        p = torch.exp(z - highest.index_select(0, target))
        w = p / torch.zeros(NODES, 2).scatter_add(0, index, p).index_select(0, target)
        return torch.zeros_like(rows).index_add(0, target, rows.index_select(0, source) * w[:, :, None])


def edges() -> Tensor:
    """Random edges, with a node that has none."""
    return torch.randint(0, NODES - 1, (2, EDGES))


@pytest.mark.parametrize(
    ("layer", "weights", "operations", "launched"),
    [
        (lambda: Convolution(1), 1, ["aggregation", "aggregation backward", "edge products backward"], {"rows", "dots"}),
        (lambda: Convolution(3), 3, ["aggregation", "aggregation backward", "edge products backward"], {"rows", "dots"}),
        (Attention, 0, ["graph attention", "graph attention backward"], {"rows", "dots", "segments"}),
    ],
    ids=["one weight", "heads", "attention"],
)
def test_forward_and_backward(
    layer: Callable[[], nn.Module], weights: int, operations: list[str], launched: set[str], gpu: EmulatedDevice
) -> None:
    given = [torch.randn(EDGES, weights)] if weights else []
    exact, x = layer(), torch.randn(NODES, 6)
    model, inputs = copy.deepcopy(exact), [x.clone().requires_grad_(), edges(), *(w.clone().requires_grad_() for w in given)]
    others = [x.clone().requires_grad_(), inputs[1], *(w.clone().requires_grad_() for w in given)]
    run = compile_and_run(model, *inputs, grad=True, dense="eager")
    expected = exact(*others)
    assert_same(run.output, expected)
    upstream = torch.randn_like(expected)
    run.output.backward(upstream)
    expected.backward(upstream)
    for ours, theirs in zip([*model.parameters(), *inputs], [*exact.parameters(), *others], strict=True):
        if theirs.grad is not None:
            assert_same(ours.grad, theirs.grad)
    assert sorted(d.op for d in run.regions if "linear" not in d.op) == operations
    assert launched <= set(gpu.schedules)


def test_small_graphs_stay_as_they_are() -> None:
    """A call costs a GPU more than a CPU, in what it could have moved in that time."""
    inputs = torch.randn(NODES, 6), edges(), torch.randn(EDGES, 1)
    run = compile_and_run(Convolution(1), *inputs, regions=0, dense="eager", min_gain=1.1)
    assert [d.reason for d in run.decisions if d.op == "aggregation"] == ["too small for a gain of 1.1x"]
    assert Gpu.edge_call > 1e6


def test_a_sorted_edge_list_is_where_its_edges_are() -> None:
    """What is made on the default device would be on "meta", and of no use."""
    source, target = edges()
    a, b, weight = torch.randn(NODES, 2, 3), torch.randn(NODES, 2, 3), torch.randn(EDGES, 2)
    with torch.device("meta"):
        found = SortedEdges.of(source, target, NODES, NODES)
        products, sums = found.products(a, b), found.sums(b, found.with_heads(2).sorted(weight.flatten()))
    assert_same(products, (a[target] * b[source]).sum(2))
    assert_same(sums, torch.zeros_like(b).index_add(0, target, weight[:, :, None] * b[source]))
