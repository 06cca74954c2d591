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
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_dropout_of_attention(dense: str) -> None:
    pyg = pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed")
    layer, x, index = pyg.GATConv(12, 8, heads=2, dropout=0.4).double(), torch.randn(NODES, 12).double(), edges()
    run = compile_and_run(layer, x.requires_grad_(), index, grad=True, dense=dense)
    assert operations(run) == ["graph attention", "graph attention backward"]

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        out: Tensor = run.function(x, index)
        return out

    weights, step = torch.randn(NODES, 16).double(), 1e-6 * torch.randn(NODES, 12).double()
    (gradient,) = torch.autograd.grad((seeded(x) * weights).sum(), x)
    with torch.no_grad():  # another graph, in which the same numbers are drawn
        change = ((seeded(x + step) - seeded(x - step)) * weights).sum()
    torch.testing.assert_close((gradient * step).sum() * 2, change, rtol=1e-4, atol=1e-12)
    if dense == "eager":
        with torch.no_grad():
            outs = torch.stack([run.function(x, index) for _ in range(400)])
            expected = layer.eval()(x, index)
            assert_same(run.function(x, index), expected)
        deviation = outs.std(0) / 400**0.5 + 1e-9
        assert ((outs.mean(0) - expected).abs() < 6 * deviation).all()
        assert outs.std(0).max() > 0


def test_dropout_under_a_checkpoint() -> None:
    pyg = pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed")
    layer, index = pyg.GATConv(12, 8, dropout=0.4).double(), edges()
    x = torch.randn(NODES, 12).double().requires_grad_()
    run = compile_and_run(lambda x: checkpoint(layer, x, index, use_reentrant=False), x, grad=True)
    assert operations(run) == ["graph attention", "graph attention backward"]

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        out: Tensor = run.function(x).sum()
        return out

    step = 1e-6 * torch.randn(NODES, 12).double()
    (gradient,) = torch.autograd.grad(seeded(x), x)
    change = seeded(x + step) - seeded(x - step)
    torch.testing.assert_close((gradient * step).sum() * 2, change, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("grad", [False, True])
def test_weights_that_are_returned_are_those_that_dropout_left(grad: bool) -> None:
    pyg = pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed")
    layer, x, index = pyg.GATConv(12, 8, dropout=0.5, add_self_loops=False, bias=False), torch.randn(NODES, 12), edges()
    run = compile_and_run(lambda x: layer(x, index, return_attention_weights=True), x, grad=grad)
    out, (_, weights) = run.output
    assert "aggregation" in operations(run)
    assert_same(out, torch.zeros(NODES, 8).index_add(0, index[1], layer.lin(x)[index[0]] * weights))


def test_a_mask_that_is_read_again_is_no_dropout() -> None:
    layer = ByHandAttention("softmax")

    def masked(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.rand(EDGES) > 0.5
        return layer(x, index, mask), mask

    x, index = torch.randn(NODES, 6), edges()
    run = compile_and_run(masked, x, index)
    out, mask = run.output
    assert "graph attention" not in operations(run)
    assert_same(out, layer(x, index, mask))


def test_two_kinds_of_nodes_and_no_edges() -> None:
    pyg = pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed")
    layer = pyg.TransformerConv((12, 10), 8, heads=2)
    x, y, index = torch.randn(NODES, 12), torch.randn(7, 10), edges()
    index[1] %= 7

    def both(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        out: Tensor = layer((x, y), index)
        return out

    run = compile_and_run(both, x, y, index)
    assert operations(run) == ["graph attention"]
    with torch.no_grad():
        for some in (index, index[:, :50], index[:, :0]):
            assert_same(run.function(x, y, some), both(x, y, some))
    assert counters["stats"]["unique_graphs"] <= 3  # no edges are a case of their own for torch


def test_attention_over_another_graph_recompiles_once() -> None:
    pyg = pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed")
    layer, x = pyg.GATConv(12, 8, heads=2, dropout=0.5), torch.randn(NODES, 12)
    run = compile_and_run(layer, x, edges(), grad=True)
    for count in (100, 300, 50, 600):
        run.function(x, edges(count=count)).sum().backward()
    assert counters["stats"]["unique_graphs"] <= 2
    assert operations(run).count("graph attention") >= 1


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

    def forward(self, x: Tensor, index: Tensor, mask: Tensor | None = None) -> Tensor:
        source, target = index
        rows = 5 if self.form == "fewer sources" else NODES
        logits = F.leaky_relu(self.source[:rows].sin()[source] + self.target.sin()[target], 0.2)
        shift = torch.full((NODES,), -torch.inf).scatter_reduce(0, target, logits.detach(), "amax")
        shifted = logits if self.form == "epsilon, no shift" else logits - shift[target]
        weight = self.normalised(shifted.exp(), target)
        weight = weight if mask is None else weight * mask * 2.0
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


class ByFunction(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.forward = function


class HeadsByHand(nn.Module):
    """Attention of two heads over nodes whose heads are one dimension, taken apart before or after they are gathered."""

    def __init__(self, form: str, late: bool) -> None:
        super().__init__()
        self.form, self.late, self.direction = form, late, nn.Parameter(torch.randn(2, 3))

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
        source, target = index
        q, k, v = self.gathered(queries, target), self.gathered(keys, source), self.gathered(values, source)
        directed = F.leaky_relu(q + k, 0.2) * self.direction
        z = ((directed if self.form == "directed" else q * k) * 0.5).sum(-1)
        weight = softmax_by(target, z)
        return torch.zeros(NODES, 2, v.shape[2]).index_add(0, target, v * weight[:, :, None])

    def gathered(self, x: Tensor, index: Tensor) -> Tensor:
        return x[index].view(EDGES, 2, -1) if self.late else x.view(NODES, 2, -1)[index]


def softmax_by(target: Tensor, z: Tensor) -> Tensor:
    """Of z [edges, heads], over the edges of each target."""
    p, each = z.exp(), target[:, None].expand_as(z)
    return p / torch.zeros(NODES, z.shape[1], dtype=z.dtype).scatter_add(0, each, p)[target]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("form", ["product", "directed"])
def test_heads_taken_apart_before_or_after_the_gather(form: str, late: bool) -> None:
    layer, index = HeadsByHand(form, late), edges()
    given = torch.randn(NODES, 6), torch.randn(NODES, 6), torch.randn(NODES, 10), index
    run = compile_and_run(layer, *given)
    assert operations(run) == ["graph attention"]
    assert_same(run.output, layer(*given))
    torch._dynamo.reset()
    run, ours, expected = trained(layer, *given)
    assert {"graph attention", "graph attention backward"} <= set(operations(run))
    for mine, theirs in zip(ours, expected, strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("wide", [None, "values", "scores", "added"])
def test_attention_is_of_one_type(wide: str | None) -> None:
    def attended(values: Tensor, a: Tensor, b: Tensor, index: Tensor) -> Tensor:
        message = values * softmax_by(index[1], a[index[0]] + b)[:, :, None]
        sums = torch.zeros(NODES, 2, 3, dtype=message.dtype).index_add(0, index[1], message)
        return sums + aggregated(a, index)[:, :, None]

    given = {"values": torch.randn(EDGES, 2, 3), "scores": torch.randn(NODES, 2), "added": torch.randn(EDGES, 2)}
    given = {name: x.double() if name == wide else x for name, x in given.items()}
    index = edges()
    run, ours, expected = trained(ByFunction(attended), *given.values(), index)
    assert ("graph attention" in operations(run)) == (wide is None)
    assert_same(run.output, attended(*given.values(), index))
    for mine, theirs in zip(ours, expected, strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("form", ["fewer sources", "more targets"])
def test_attention_whose_scores_are_of_other_nodes_takes_them_edge_by_edge(form: str) -> None:
    index = edges()
    index[0] %= 5 if form == "fewer sources" else NODES
    run, ours, expected = trained(ByHandAttention(form), torch.randn(NODES, 6), index)
    assert {"graph attention", "graph attention backward"} <= set(operations(run))
    for mine, theirs in zip(ours, expected, strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("form", ["hops", "values of logits"])
def test_attention_that_is_no_whole_keeps_its_gradients(form: str) -> None:
    run, ours, expected = trained(ByHandAttention(form), torch.randn(NODES, 6), edges())
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
