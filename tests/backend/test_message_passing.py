"""Message passing over an edge list becomes products with a sparse matrix: what was recognised, and eager torch's numbers."""

import gc
import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import gossamer
from gossamer.backend.run import message_ops
from gossamer.dialects.errors import IndexRangeError
from gossamer.runtime.remembered import Remembered
from gossamer.sparsity.edges.sorted_edges import SortedEdges
from tests.backend.harness import assert_same, compile_and_run
from tests.backend.messages import EDGES, NODES, aggregated, edges, operations, trained


class WithFeaturesOfEdges(nn.Module):
    """A layer with features of edges that are learned."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.features = layer, nn.Parameter(torch.randn(EDGES, 5))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        out: Tensor = self.layer(x, index, self.features)
        return out


Operations = tuple[list[str], list[str]]
SUM: Operations = (["aggregation"], ["aggregation", "aggregation backward"])
MAXIMUM: Operations = (["max aggregation"], ["max aggregation", "max aggregation backward"])
ATTENTION: Operations = (["graph attention"], ["graph attention", "graph attention backward"])
LAYERS: dict[str, tuple[Callable[[Any], nn.Module], Operations]] = {
    "GCN": (lambda g: g.GCNConv(12, 8), SUM),
    "GCN, not normalised": (lambda g: g.GCNConv(12, 8, normalize=False), SUM),
    "GraphSAGE": (lambda g: g.SAGEConv(12, 8), SUM),
    "GraphSAGE, maxima": (lambda g: g.SAGEConv(12, 8, aggr="max"), MAXIMUM),
    "GIN": (lambda g: g.GINConv(nn.Linear(12, 8)), SUM),
    "GAT": (lambda g: g.GATConv(12, 8, heads=2), ATTENTION),
    "GAT, features of edges": (
        lambda g: WithFeaturesOfEdges(g.GATConv(12, 8, heads=2, edge_dim=5, add_self_loops=False)), ATTENTION,
    ),
    "GATv2": (lambda g: g.GATv2Conv(12, 8, heads=2), ATTENTION),
    "GATv2, shared weights, one head": (lambda g: g.GATv2Conv(12, 8, share_weights=True), ATTENTION),
    "GATv2, features of edges": (
        lambda g: WithFeaturesOfEdges(g.GATv2Conv(12, 8, heads=2, edge_dim=5, add_self_loops=False)), ATTENTION,
    ),
    "graph transformer, features of edges": (
        lambda g: WithFeaturesOfEdges(g.TransformerConv(12, 8, heads=2, edge_dim=5)), ATTENTION,
    ),
    "graph transformer": (lambda g: g.TransformerConv(12, 8, heads=2), ATTENTION),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_pytorch_geometric(name: str) -> None:
    make, (inference, training) = LAYERS[name]
    layer = make(pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed"))
    x, index = torch.randn(NODES, 12), edges()
    run = compile_and_run(layer, x, index)
    assert operations(run) == inference
    assert_same(run.output, layer(x, index))
    torch._dynamo.reset()
    run, ours, expected = trained(layer, x, index)
    found = operations(run)
    if "features" in name:  # what is not attention is the gradient of the features
        found = [op for op in found if "attention" in op]
    assert found == training
    assert len(ours) == len(expected)
    for mine, theirs in zip(ours, expected, strict=True):
        assert_same(mine, theirs)
    assert not counters["graph_break"]


@pytest.mark.parametrize("kind", ["amax", "amin"])
def test_extremes_of_messages_by_hand(kind: str) -> None:
    class Extremes(nn.Module):
        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            messages = F.relu(x)[index[0]]  # with many zeros that are equal
            each = index[1][:, None].expand_as(messages)
            return torch.zeros_like(x).scatter_reduce(0, each, messages, kind, include_self=False)

    run, ours, expected = trained(Extremes(), torch.randn(NODES, 6), edges())
    assert operations(run) == [f"{kind[1:]} aggregation", f"{kind[1:]} aggregation backward"]
    for mine, theirs in zip(ours, expected, strict=True):
        assert_same(mine, theirs)


class ByHand(nn.Module):
    """A weighted sum over edges, with a weight for each of them that is learned."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.weight = form, nn.Parameter(torch.rand(EDGES))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        source, target = index
        zeros = torch.zeros(x.shape[0], x.shape[1])
        weight = self.weight.unsqueeze(-1)
        match self.form:
            case "index_add":
                return zeros.index_add(0, target, x[source] * weight)
            case "index_put":
                return zeros.index_put((target,), weight * x.index_select(0, source), accumulate=True)
            case "scatter_add":
                each = target.unsqueeze(-1).expand(-1, x.shape[1])
                return zeros.scatter_add(0, each, torch.gather(x, 0, source.unsqueeze(-1).expand(-1, x.shape[1])) * weight)
            case "scatter_reduce":
                each = target[:, None].repeat(1, x.shape[1])
                return zeros.scatter_reduce(0, each, x[source] / weight, "sum")
            case "embedding":
                return zeros.index_add(0, target, F.embedding(source, x) * weight)
            case "added to x":
                return x.index_add(0, target, x[source] * weight)
        raise AssertionError(self.form)


@pytest.mark.parametrize("form", ["index_add", "index_put", "scatter_add", "scatter_reduce", "embedding", "added to x"])
def test_spelled_by_hand(form: str) -> None:
    run, ours, expected = trained(ByHand(form), torch.randn(NODES, 6), edges())
    assert [op for op in operations(run) if op == "aggregation"] == ["aggregation"]
    if form != "scatter_reduce":
        assert "edge products backward" in operations(run)
    for mine, theirs in zip(ours, expected, strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("weight", [None, (EDGES,), (EDGES, 1), (EDGES, 2, 1)], ids=str)
def test_means(weight: tuple[int, ...] | None) -> None:
    def mean(x: Tensor, index: Tensor, weight: Tensor | None) -> Tensor:
        message = x[index[0]] if weight is None else x[index[0]] * weight.view(EDGES, -1, 1)
        target = index[1][:, None, None].expand_as(message)
        return torch.zeros_like(x).scatter_reduce(0, target, message, "mean", include_self=False)

    x, index = torch.randn(NODES, 2, 3, dtype=torch.float64), edges()
    weights = None if weight is None else torch.rand(weight, dtype=torch.float64)
    run = compile_and_run(mean, x, index, weights)
    assert operations(run) == ["aggregation"]
    assert_same(run.output, mean(x, index, weights))


def test_what_is_overwritten_is_no_sum() -> None:
    def overwritten(x: Tensor, index: Tensor) -> Tensor:
        return x.scatter_reduce(0, index[1][:, None].expand(-1, x.shape[1]), x[index[0]], "sum", include_self=False)

    x, index = torch.randn(NODES, 6), edges()
    run = compile_and_run(overwritten, x, index, regions=0)
    assert_same(run.output, overwritten(x, index))


def test_a_size_is_no_weight() -> None:
    def sized(x: Tensor, index: Tensor) -> Tensor:
        products = (x[index[0]] * x.shape[1]).sum(-1)
        return aggregated(x, index) + torch.zeros_like(x).index_add(0, index[1], x[index[0]] * x.shape[0]) + products.sum()

    x, index = torch.randn(NODES, 6), edges()
    run = compile_and_run(sized, x, index, dynamic=True)
    assert operations(run) == ["aggregation", "aggregation"]
    assert_same(run.output, sized(x, index))


def test_an_edge_list_is_sorted_once_and_again_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    sorts: list[int] = []
    real = SortedEdges.of
    monkeypatch.setattr(message_ops.SortedEdges, "of", lambda *args: (sorts.append(1), real(*args))[1])
    x, index = torch.randn(NODES, 6), edges()
    run = compile_and_run(aggregated, x, index)
    sorts.clear()
    with torch.no_grad():
        run.function(x, index)
        assert not sorts
        index[1] = index[1].flip(0)
        assert_same(run.function(x, index), aggregated(x, index))
        assert_same(run.function(x, index), aggregated(x, index))
        assert len(sorts) == 1


def test_inference_tensors_and_full_verification_compare_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    sorts: list[int] = []
    real = SortedEdges.of
    monkeypatch.setattr(message_ops.SortedEdges, "of", lambda *args: (sorts.append(1), real(*args))[1])
    x = torch.randn(NODES, 6)
    for mode, options in ((torch.inference_mode, {}), (torch.no_grad, {"verify": "full"})):
        with mode():
            index = edges()
            run = compile_and_run(aggregated, x, index, **options)
            sorts.clear()
            assert_same(run.function(x, index), aggregated(x, index))
            assert not sorts
            index.data.copy_(edges())
            assert_same(run.function(x, index), aggregated(x, index))
            assert sorts == [1]


def test_what_is_remembered_keeps_neither_edges_nor_graphs_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def weighted(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, index[1], x[index[0]] * weight[:, None])

    expressions: list[weakref.ref[Any]] = []
    real = message_ops.edge_list
    monkeypatch.setattr(message_ops, "edge_list", lambda e, *rest: (expressions.append(weakref.ref(e)), real(e, *rest))[1])
    x, index = torch.randn(NODES, 6), edges().to(torch.int32)
    run = compile_and_run(weighted, x, index, torch.rand(EDGES))
    with torch.no_grad():
        weight = torch.rand(EDGES)
        index = torch.stack([index[0], index[1].sort().values])
        assert_same(run.function(x, index, weight), weighted(x, index, weight))
    storages = [weakref.ref(leaf.untyped_storage()) for leaf in (index, weight)]
    del index, weight
    gc.collect()
    assert len(expressions) == 1
    assert not any(each() is not None for each in (*storages, *expressions))


def test_another_number_of_edges_recompiles_once() -> None:
    x = torch.randn(NODES, 6)
    run = compile_and_run(aggregated, x, edges())
    with torch.no_grad():
        for count in (100, 300, 50, 600):
            index = edges(count=count)
            assert_same(run.function(x, index), aggregated(x, index))
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("grad", [False, True])
def test_means_over_graphs_of_any_size(grad: bool) -> None:
    pyg = pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed")
    layer = pyg.SAGEConv(12, 8)
    run = compile_and_run(layer, torch.randn(NODES, 12).requires_grad_(grad), edges(), grad=grad, dynamic=True)
    assert operations(run) == (["aggregation", "aggregation backward"] if grad else ["aggregation"])
    for nodes, count in ((50, 300), (70, 600)):
        x, index = torch.randn(nodes, 12).requires_grad_(grad), edges(nodes, count)
        ours, expected = run.function(x, index), layer(x, index)
        assert_same(ours, expected)
        if grad:
            assert_same(*(torch.autograd.grad(out.square().sum(), x)[0] for out in (ours, expected)))
    assert counters["stats"]["unique_graphs"] <= 2


def test_an_edge_out_of_bounds_is_refused() -> None:
    x, index = torch.randn(NODES, 6), edges()
    run = compile_and_run(aggregated, x, index)
    index[0, 7] = NODES
    for kind in (IndexRangeError, IndexError, RuntimeError):  # torch raises one of the last two, depending on the operation
        with torch.no_grad(), pytest.raises(kind, match=f"source {NODES} is out of bounds"):
            run.function(x, index)


def test_small_graphs_and_other_scatters_stay_dense() -> None:
    x, index = torch.randn(NODES, 6), edges()
    run = compile_and_run(aggregated, x, index, min_gain=1.1, regions=0)
    assert "too small" in run.decisions[0].reason
    torch._dynamo.reset()
    summed = lambda x, index: torch.zeros(NODES, 6).index_add(0, index[1], x)
    run = compile_and_run(summed, torch.randn(EDGES, 6), index, regions=0)
    assert not run.decisions


@pytest.mark.parametrize("grad", [False, True])
def test_edges_that_are_others_at_every_call_are_not_remembered(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relational layer cuts the edges of each relation out anew: neither are they sorted nor are degrees kept for them."""
    pyg = pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed")
    kept: list[int] = []
    real = Remembered.get
    monkeypatch.setattr(Remembered, "get", lambda *args: (kept.append(1), real(*args))[1])
    layer, x, index, kinds = pyg.RGCNConv(16, 16, 4), torch.randn(NODES, 16), edges(), torch.randint(0, 4, (EDGES,))
    run = compile_and_run(layer, x, index, kinds, fullgraph=False, grad=grad, min_gain=1.1, regions=0)
    reasons = {d.reason for d in run.decisions if d.op.startswith("aggregation")}
    assert reasons == {"too small for a gain of 1.1x"} and not kept
    assert_same(run.output, layer(x, index, kinds))


def test_large_edge_lists_of_any_size_say_that_sorting_takes_the_gain() -> None:
    nodes, count = 2000, 100_000
    x, index = torch.randn(nodes, 32), edges(nodes, count)
    run = compile_and_run(aggregated, x, index, dynamic=True, min_gain=1.5, regions=0)
    assert [d.reason for d in run.decisions] == [
        "the edges may change at every call, and sorting them each time leaves no gain of 1.5x"
    ]
    assert_same(run.output, aggregated(x, index))


def test_degrees_are_kept_with_the_edges_that_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    real = message_ops.StructureValue.current
    monkeypatch.setattr(message_ops.StructureValue, "current", lambda *args: (kept.append(1), real(*args))[1])

    def mean(x: Tensor, index: Tensor) -> Tensor:
        degrees = torch.zeros(NODES).index_add(0, index[1], torch.ones(EDGES))
        return aggregated(x, index) + degrees.sqrt()[:, None]

    x, index = torch.randn(NODES, 6), edges()
    run = compile_and_run(mean, x, index)
    assert operations(run) == ["aggregation"] and kept
    assert_same(run.output, mean(x, index))


def test_training_with_degrees_that_a_graph_writes_to() -> None:
    """What is added to a vector after it was read has another value in the backward pass."""

    class Layer(nn.Module):
        def forward(self, x: Tensor, index: Tensor, scale: Tensor) -> Tensor:
            y = torch.zeros_like(x).index_add(0, index[1], x[index[0]] * scale[index[0]][:, None])
            scale.add_(1)
            return y

    x, index, scale = torch.randn(NODES, 8), edges(), torch.rand(NODES)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    scales = [scale.clone() for _ in range(2)]
    run = compile_and_run(Layer(), leaves[0], index, scales[0], grad=True)
    expected = Layer()(leaves[1], index, scales[1])
    for output in (run.output, expected):
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    assert_same(run.output, expected)
    assert_same(leaves[0].grad, leaves[1].grad)
    assert_same(scales[0], scales[1])


def test_one_layer_is_one_kernel_and_its_page_says_so(tmp_path: Path) -> None:
    """The numbers are those of the layer's paper (Kipf and Welling, 2017), by SciPy in float64."""
    layer = pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed").GCNConv(12, 8).eval()
    x, index = torch.randn(NODES, 12), edges()
    options: dict[str, Any] = {"disable": ["sparse-weights"]}  # which would decide on the weight, too
    run = compile_and_run(layer, x, index, regions=1, **options)
    assert operations(run) == ["aggregation"] and not counters["graph_break"]
    from_node, to = index[:, index[0] != index[1]].numpy()
    adjacency = scipy.sparse.coo_matrix((np.ones(len(to)), (to, from_node)), (NODES, NODES)) + scipy.sparse.identity(NODES)
    scale = scipy.sparse.diags_array(np.asarray(adjacency.sum(1)).ravel() ** -0.5)
    weight, bias = layer.lin.weight.detach().double().numpy(), layer.bias.detach().double().numpy()
    expected = scale @ adjacency @ scale @ x.double().numpy() @ weight.T + bias
    np.testing.assert_allclose(run.output.numpy(), expected, rtol=1e-4, atol=1e-6)

    with torch.no_grad():
        report = gossamer.explain(layer, x, index, fullgraph=True, options={"dense": "eager", "min_gain": 0, **options})
    assert [(each.name, each.op) for each in report.sparse] == [("edge_index", "aggregation")]
    report.save(tmp_path / "report.html")
    data = json.loads(re.findall(r'id="data">(.*?)</script>', (tmp_path / "report.html").read_text(), re.DOTALL)[0])
    assert (data["sparse"], data["dense"], data["kernels"], data["breaks"]) == (1, 0, 1, [])
