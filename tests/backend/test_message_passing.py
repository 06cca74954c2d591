"""Message passing over an edge list becomes products with a sparse matrix: what was recognised, and eager torch's numbers."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from gossamer.backend import message_ops
from gossamer.dialects.errors import FormatError
from gossamer.sparsity.sorted_edges import SortedEdges
from tests.backend.harness import Run, assert_same, compile_and_run

NODES, EDGES = 60, 400


def edges(nodes: int = NODES, count: int = EDGES) -> Tensor:
    """Random edges, with self loops, parallel edges, and a node that has none."""
    found = torch.randint(0, nodes - 1, (2, count))
    found[:, 1] = found[:, 0]
    return found


def operations(run: Run) -> list[str]:
    """What was recognised, without the linear layers around it."""
    return sorted(d.op for d in run.regions if "linear" not in d.op)


def trained(layer: nn.Module, *inputs: Tensor, **options: Any) -> tuple[Run, list[Tensor], list[Tensor]]:
    """The compiled layer after a backward pass: the gradients of its parameters and inputs, ours and eager torch's."""
    both = []
    given = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    own = copy.deepcopy(layer)
    run = compile_and_run(own, *given, grad=True, **options)
    weights = torch.linspace(-1, 1, run.output.numel()).view_as(run.output)
    for model, output, leaves in ((own, run.output, given), (layer, None, [x.detach().clone() for x in given])):
        if output is None:
            leaves = [x.requires_grad_(x.is_floating_point()) for x in leaves]
            output = model(*leaves)
        (output * weights).sum().backward()
        both.append([p.grad for p in (*leaves, *model.parameters()) if p.grad is not None])
    return run, both[0], both[1]


LAYERS: dict[str, tuple[Callable[[Any], nn.Module], list[str], list[str]]] = {
    "GCN": (lambda g: g.GCNConv(12, 8), ["aggregation"], ["aggregation", "aggregation backward"]),
    "GCN, not normalised": (
        lambda g: g.GCNConv(12, 8, normalize=False), ["aggregation"], ["aggregation", "aggregation backward"],
    ),
    "GraphSAGE": (lambda g: g.SAGEConv(12, 8), ["aggregation"], ["aggregation", "aggregation backward"]),
    "GIN": (lambda g: g.GINConv(nn.Linear(12, 8)), ["aggregation"], ["aggregation", "aggregation backward"]),
    "GAT": (lambda g: g.GATConv(12, 8, heads=2), ["graph attention"], ["graph attention", "graph attention backward"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_pytorch_geometric(name: str) -> None:
    make, inference, training = LAYERS[name]
    layer = make(pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed"))
    x, index = torch.randn(NODES, 12), edges()
    run = compile_and_run(layer, x, index)
    assert operations(run) == inference
    assert_same(run.output, layer(x, index))
    torch._dynamo.reset()
    run, ours, expected = trained(layer, x, index)
    assert operations(run) == training
    assert len(ours) == len(expected)
    for mine, theirs in zip(ours, expected, strict=True):
        assert_same(mine, theirs)
    assert not counters["graph_break"]


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
    run = compile_and_run(overwritten, x, index)
    assert not run.regions
    assert_same(run.output, overwritten(x, index))


def test_a_size_is_no_weight() -> None:
    def sized(x: Tensor, index: Tensor) -> Tensor:
        products = (x[index[0]] * x.shape[1]).sum(-1)
        return aggregated(x, index) + torch.zeros_like(x).index_add(0, index[1], x[index[0]] * x.shape[0]) + products.sum()

    x, index = torch.randn(NODES, 6), edges()
    run = compile_and_run(sized, x, index, dynamic=True)
    assert operations(run) == ["aggregation", "aggregation"]
    assert_same(run.output, sized(x, index))


def aggregated(x: Tensor, index: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, index[1], x[index[0]])


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


def test_an_edge_out_of_bounds_is_refused() -> None:
    x, index = torch.randn(NODES, 6), edges()
    run = compile_and_run(aggregated, x, index)
    index[0, 7] = NODES
    with torch.no_grad(), pytest.raises(FormatError, match=f"source {NODES} is out of bounds"):
        run.function(x, index)


def test_small_graphs_and_other_scatters_stay_dense() -> None:
    x, index = torch.randn(NODES, 6), edges()
    run = compile_and_run(aggregated, x, index, min_gain=1.1)
    assert not run.regions
    assert "too small" in run.decisions[0].reason
    torch._dynamo.reset()
    run = compile_and_run(lambda x, index: torch.zeros(NODES, 6).index_add(0, index[1], x), torch.randn(EDGES, 6), index)
    assert not run.decisions


def test_attention_whose_weights_are_read_keeps_them() -> None:
    pyg = pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed")
    layer = pyg.GATConv(12, 8, heads=2)

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            out, (_, weights) = self.layer(x, index, return_attention_weights=True)
            return out * weights.square().sum()

    run, ours, expected = trained(Reading(), torch.randn(NODES, 12), edges())
    assert "graph attention" not in operations(run)
    assert "edge products backward" in operations(run)
    for mine, theirs in zip(ours, expected, strict=True):
        assert_same(mine, theirs)


class ByHandAttention(nn.Module):
    """Graph attention, and what only looks like it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.source, self.target = (nn.Parameter(torch.randn(NODES)) for _ in range(2))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        source, target = index
        rows = 5 if self.form == "fewer sources" else NODES
        logits = F.leaky_relu(self.source[:rows].sin()[source] + self.target.sin()[target], 0.2)
        shift = torch.full((NODES,), -torch.inf).scatter_reduce(0, target, logits.detach(), "amax")
        shifted = logits if self.form == "epsilon, no shift" else logits - shift[target]
        weight = self.normalised(shifted.exp(), target)
        values = x.index_add(0, target, logits[:, None].expand(-1, 6)) if self.form == "values of logits" else x
        targets = NODES + 5 if self.form == "more targets" else NODES
        for _ in range(3 if self.form == "hops" else 1):
            values = torch.zeros(targets, 6).index_add(0, target, values[source] * weight[:, None])
        return values

    def normalised(self, weight: Tensor, target: Tensor) -> Tensor:
        zeros = torch.zeros(NODES)
        if self.form == "mean":
            return weight / zeros.scatter_reduce(0, target, weight, "mean", include_self=False)[target]
        added = {"epsilon": 1e-8, "epsilon, no shift": 1e-8, "negative": -0.5}.get(self.form, 0.0)
        sums = zeros.scatter_add(0, target, weight)
        return weight / (sums + added if added else sums)[target]


@pytest.mark.parametrize("form", ["softmax", "epsilon"])
def test_attention_spelled_by_hand(form: str) -> None:
    run, ours, expected = trained(ByHandAttention(form), torch.randn(NODES, 6), edges())
    assert operations(run) == ["graph attention", "graph attention backward"]
    for mine, theirs in zip(ours, expected, strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("form", ["hops", "values of logits", "fewer sources", "more targets"])
def test_attention_that_is_no_whole_keeps_its_gradients(form: str) -> None:
    index = edges()
    index[0] %= 5 if form == "fewer sources" else NODES
    run, ours, expected = trained(ByHandAttention(form), torch.randn(NODES, 6), index)
    assert "graph attention" not in operations(run)
    assert "aggregation" in operations(run)
    for mine, theirs in zip(ours, expected, strict=True):
        assert_same(mine, theirs)


def test_attention_refuses_a_source_out_of_bounds() -> None:
    layer, x, index = ByHandAttention("fewer sources"), torch.randn(NODES, 6), edges()
    run = compile_and_run(layer, x, index % 5)
    index[0, 7] = 48
    with torch.no_grad(), pytest.raises(IndexError):
        run.function(x, index)


@pytest.mark.parametrize("form", ["mean", "negative", "epsilon, no shift"])
def test_other_normalisations_are_no_attention(form: str) -> None:
    layer, x, index = ByHandAttention(form), torch.randn(NODES, 6), edges()
    run = compile_and_run(layer, x, index)
    assert "graph attention" not in operations(run)
    assert "aggregation" in operations(run)
    assert_same(run.output, layer(x, index))
