"""Sizes that change from call to call, or that only the values of tensors tell: never an error that eager code does not have,
few compilations, and eager torch's numbers, in inference and training.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from gossamer import Format, SparseTensor, einsum, graph_attention
from gossamer.backend import sparse
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.report.report import collect
from tests.backend.harness import assert_same, compile_and_run, prune_
from tests.backend.messages import aggregated, edges

HOW = ["automatic", "dynamic", "marked", "masked edges", "masked nodes"]
EVERYTHING = {"dense": "eager", "min_gain": 0, "strict": True}


@pytest.fixture(autouse=True)
def sizes_from_values() -> Iterator[None]:
    """Has Dynamo take operations into its graph whose results have sizes that only values tell."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield
    torch._dynamo.reset()


class Extremes(nn.Module):
    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        place = index[1][:, None].expand(-1, x.shape[1])
        return torch.zeros_like(x).scatter_reduce(0, place, x[index[0]], "amax", include_self=False)


class Pooled(nn.Module):
    def __init__(self, layer: nn.Module, pool: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.pool = layer, pool

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        graphs = torch.arange(x.shape[0]) * 4 // x.shape[0]
        return self.pool(torch.relu(self.layer(x, index)), graphs, 4)


class WithFeaturesOfEdges(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        out: Tensor = self.layer(x, index, x[index[0], :5] * 2)
        return out


class ByHand(nn.Module):
    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return aggregated(x, index)


class Masked(nn.Module):
    """A layer on a part of the graph, whose size the graph's values tell."""

    def __init__(self, layer: nn.Module, how: str) -> None:
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        if self.how == "masked edges":
            found: Tensor = self.layer(x, index[:, index[0] != index[1]])
            return found
        kept = x[:, 0] > 0
        number, both = kept.cumsum(0) - 1, kept[index[0]] & kept[index[1]]
        found = self.layer(x[kept], number[index[:, both]])
        return found


LAYERS: dict[str, Callable[[Any], nn.Module]] = {
    "sum by hand": lambda g: ByHand(),
    "maxima by hand": lambda g: Extremes(),
    "GCN": lambda g: g.GCNConv(12, 8),
    "GraphSAGE": lambda g: g.SAGEConv(12, 8),
    "GraphSAGE, maxima": lambda g: g.SAGEConv(12, 8, aggr="max"),
    "GIN": lambda g: g.GINConv(nn.Linear(12, 8)),
    "GAT": lambda g: g.GATConv(12, 8, heads=2),
    "GATv2, features of edges": lambda g: WithFeaturesOfEdges(g.GATv2Conv(12, 8, heads=2, edge_dim=5)),
    "graph transformer": lambda g: g.TransformerConv(12, 8, heads=2),
    "graph transformer, features of edges": lambda g: WithFeaturesOfEdges(g.TransformerConv(12, 8, heads=2, edge_dim=5)),
    "mean pooling": lambda g: Pooled(g.GraphConv(12, 8), g.global_mean_pool),
}
ASKS_WHETHER_THERE_ARE_EDGES = ("GAT", "GATv2", "graph transformer")
"""Layers of which Dynamo itself refuses to take unknown numbers of edges into one graph, for any backend."""


def follows_eager(model: nn.Module, how: str, training: bool, fullgraph: bool = True) -> int:
    """Checks three graphs, each larger than the one before, and gradients; how many regions were made."""
    model = Masked(model, how) if how.startswith("masked") else model
    reference = copy.deepcopy(model)
    with collect() as collected, torch.set_grad_enabled(training):
        dynamic = how == "dynamic" or None
        compiled = torch.compile(model, backend=sparse, fullgraph=fullgraph, dynamic=dynamic, options=EVERYTHING)
        for scale in (1, 2, 3):
            index = edges(60 * scale, 400 * scale)
            ours, theirs = (torch.linspace(-1, 1, 720 * scale).sin().view(-1, 12).requires_grad_(training) for _ in range(2))
            if how == "marked":
                torch._dynamo.mark_dynamic(ours, 0)
                torch._dynamo.mark_dynamic(index, 1)
            found, expected = compiled(ours, index), reference(theirs, index)
            assert_same(found, expected)
            if training:
                found.square().sum().backward()
                expected.square().sum().backward()
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)
                for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-3)
    return sum(decision.sparse for decision in collected.decisions)


# Every layer in one way, every way with several layers: all of them together take minutes.
@pytest.mark.parametrize(("name", "how"), [(n, HOW[i % len(HOW)]) for i, n in enumerate(LAYERS)])
def test_layers_on_graphs_of_any_size(name: str, how: str) -> None:
    layer = LAYERS[name](pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed"))
    fullgraph = not (how.startswith("masked") and name.startswith(ASKS_WHETHER_THERE_ARE_EDGES))
    for training in (False, True):
        counters.clear()
        torch._dynamo.reset()
        made = follows_eager(layer, how, training, fullgraph)
        assert made or how == "masked nodes"  # what only values tell about nodes may leave a scatter to Inductor
        if fullgraph:
            assert counters["stats"]["unique_graphs"] <= (1 if how in ("dynamic", "marked") else 2)


@pytest.mark.parametrize("training", [False, True])
def test_layers_whose_features_are_open_too(training: bool) -> None:
    """No parameter says how many features there are, so that they are a symbol that no node of the rewritten part has."""
    g = pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed")
    assert follows_eager(g.AGNNConv(requires_grad=False), "dynamic", training)


def test_relations_whose_edges_are_selected() -> None:
    g = pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed")

    class Relations(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = g.RGCNConv(12, 8, 3)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            out: Tensor = self.layer(x, index, torch.arange(index.shape[1]) % 3)
            return out

    for training in (False, True):  # in parts: Dynamo takes the layer into one graph for no backend
        torch._dynamo.reset()
        assert follows_eager(Relations(), "dynamic", training, fullgraph=False)


def attention(a: SparseTensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(einsum("ij,ik,jk->ij", a, q, k) * 0.5, 1) @ v


def normalised(a: SparseTensor, x: Tensor, w: Tensor) -> Tensor:
    scale = (a.abs().sum(1) + 1).rsqrt()
    return einsum("ij,i,j->ij", a, scale, scale) @ x


def attended(a: SparseTensor, x: Tensor, w: Tensor, **terms: Any) -> Tensor:
    return graph_attention(a, x[:, None], target=x[:, :1], source=x[:, 1:2], slope=0.2, **terms)


SPARSE: dict[str, Callable[..., Tensor]] = {
    "fused rows": lambda a, x, w: torch.relu(a @ x + 1),
    "transform first": lambda a, x, w: torch.relu(a @ F.linear(x, w)),
    "aggregate first": lambda a, x, w: F.linear(a @ x, w),
    "sample": lambda a, x, w: einsum("ij,ik,jk->ij", a, x, x).sum(1),
    "attention": lambda a, x, w: attention(a, x, x * 2, x),
    "folded values": normalised,
    "graph attention": attended,
    "sums": lambda a, x, w: a.sum(0) + a.sum(1),
    "parts": lambda a, x, w: a.split(5, 0)[0] @ x,
    "columns that values select": lambda a, x, w: torch.relu(a @ x[:, x[0] > 0] + 1),
    "rows that values select": lambda a, x, w: F.linear((a @ x)[x[:, 0] > 0], w),
    "not contiguous": lambda a, x, w: (a @ x)[x[:, 0] > 0][:, :3] @ w.t()[:3],
    "what index_add spreads": lambda a, x, w: a @ (x * 0).index_add(0, torch.nonzero(x[:, 0] > 0)[:, 0], x[x[:, 0] > 0]),
}  # fmt: skip


def _graphs(name: str, otherwise: int) -> int:
    return 3 if name == "parts" else otherwise  # another number of parts is another program


DENSE = Format.parse("#sparse_tensor.encoding<{ map = (i, j) -> (i : dense, j : dense) }>")


def in_every_size(function: Callable[..., Tensor], make: Callable[[int], Tensor], training: bool, dynamic: bool | None) -> int:
    """Checks three sizes, with gradients; how many graphs were compiled."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, backend=sparse, fullgraph=True, dynamic=dynamic, options=EVERYTHING)
    for nodes in (20, 40, 60):
        a, both = make(nodes), []
        x, w = torch.randn(nodes, 6), torch.randn(4, 6)
        for each in (compiled, function):
            given = [t.clone().requires_grad_(training) for t in (x, w)]
            out = each(a, *given)
            if training and out.requires_grad:
                out.square().sum().backward()
            both.append([out, *(t.grad for t in given if t.grad is not None)])
        for mine, expected in zip(*both, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)
    return int(counters["stats"]["unique_graphs"])


def weighted(nodes: int, format: Format = Format.CSR) -> SparseTensor:
    return SparseTensor.from_dense(torch.randn(nodes, nodes) * (torch.rand(nodes, nodes) < 0.3), format)


@pytest.mark.parametrize(("name", "training"), [(n, bool(i % 3)) for i, n in enumerate(SPARSE)])
def test_operations_on_sparse_tensors(name: str, training: bool) -> None:
    assert in_every_size(SPARSE[name], weighted, training, True) == _graphs(name, 1)


@pytest.mark.parametrize("format", [Format.COO, Format.CSC, Format.DCSR, DENSE], ids=lambda f: f.name)
@pytest.mark.parametrize("name", ["sums", "parts", "graph attention"])
def test_formats(name: str, format: Format) -> None:
    if name == "graph attention" and format is DENSE:
        pytest.skip("every entry is an edge there: a dense attention")
    training = format in (Format.COO, DENSE)
    assert in_every_size(SPARSE[name], lambda nodes: weighted(nodes, format), training, None) <= _graphs(name, 2)


IN_THE_GRAPH: dict[str, Callable[..., Tensor]] = {
    "product": lambda index, x, w: torch.relu(adjacency(index, x) @ F.linear(x, w)),
    "weights": lambda index, x, w: adjacency(index, x, True) @ x,
    "attention": lambda index, x, w: attention(adjacency(index, x), x, x, x),
    "graph attention": lambda index, x, w: attended(adjacency(index, x), x, w),
}


def adjacency(index: Tensor, x: Tensor, weights: bool = False) -> SparseTensor:
    index = index[:, index[0] != index[1]]
    return SparseTensor.from_edge_index(index, x[index[0], 0] if weights else None, x.shape[0])


@pytest.mark.parametrize("name", IN_THE_GRAPH)
def test_sparse_tensors_made_of_selected_edges(name: str) -> None:
    for training in (False, True):
        assert in_every_size(IN_THE_GRAPH[name], lambda nodes: torch.randint(nodes, (2, 6 * nodes)), training, True) == 1


def test_edges_out_of_bounds_are_refused_in_a_graph() -> None:
    compiled = torch.compile(IN_THE_GRAPH["product"], backend=sparse, fullgraph=True, options=EVERYTHING)
    x, w = torch.randn(20, 6), torch.randn(4, 6)
    compiled(torch.randint(20, (2, 50)), x, w)
    with pytest.raises(Exception, match=r"node 20, must be in \[0, 20\)"):
        compiled(torch.tensor([[0, 20] * 25, [3, 4] * 25]), x, w)


def sampled(index: Tensor, seeds: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Which nodes two rounds of sampling neighbours reach, and the edges between them, by their numbers among those."""
    reached = torch.zeros(nodes, dtype=torch.bool)
    reached[seeds] = True
    front, chosen = reached, []
    for _ in range(2):
        taken = index[:, front[index[1]] & (torch.rand(index.shape[1]) < 0.5)]
        chosen.append(taken)
        front = torch.zeros_like(reached).index_fill(0, taken[0], True)
        reached = reached | front
    return reached, (reached.cumsum(0) - 1)[torch.cat(chosen, 1)]


class Network(nn.Module):
    """Two layers."""

    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(16, 16), make(16, 4)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(x, index)), index)
        return out


def test_nothing_fails_that_inductor_alone_compiles() -> None:
    """Self loops on an unknown number of edges, in training, with nothing rewritten: Inductor of torch 2.13 fails alike."""
    g = pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed")
    model, nodes = Network(g.GATConv), 2000
    reached, index = sampled(torch.randint(nodes, (2, 8 * nodes)), torch.arange(20), nodes)
    x = torch.randn(nodes, 16)[reached]
    failed = dict[str, bool]()
    for backend, options in (("inductor", {}), ("sparse", {"min_gain": 1.1})):
        torch._dynamo.reset()
        try:
            torch.compile(model, backend=backend, fullgraph=True, options=options)(x, index).sum().backward()
            failed[backend] = False
        except torch._inductor.exc.InductorError:
            failed[backend] = True
    assert failed["inductor"] or not failed["sparse"]


@pytest.mark.parametrize(("name", "min_gain"), [("SAGEConv", 0), ("GCNConv", 1.1), ("GATConv", 0)])
def test_sampled_batches(name: str, min_gain: float) -> None:
    """With Inductor, as a user trains."""
    g = pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed")
    nodes, model = 2000, Network(getattr(g, name))
    reference = copy.deepcopy(model)
    x, labels, index = torch.randn(nodes, 16), torch.randint(4, (nodes,)), torch.randint(nodes, (2, 8 * nodes))
    compiled = torch.compile(model, backend="sparse", fullgraph=True, options={"min_gain": min_gain, "strict": True})
    sizes, made = set(), []
    with collect() as collected:
        for batch in range(12):
            reached, edges_of_batch = sampled(index, torch.randperm(nodes)[: 20 + 12 * batch], nodes)
            sizes.add(edges_of_batch.shape)
            losses = []
            for each, by in ((model, compiled), (reference, reference)):
                loss = F.cross_entropy(by(x[reached], edges_of_batch), labels[reached])
                loss.backward()
                with torch.no_grad():
                    for parameter in each.parameters():
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
                losses.append(loss)
            torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-4)
        made = [decision for decision in collected.decisions if decision.sparse]
    assert len(sizes) == 12
    assert counters["stats"]["unique_graphs"] <= 3
    assert min_gain > 0 or made


def test_sizes_among_the_operands_of_a_chain() -> None:
    layers = prune_(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))).bfloat16()
    run = compile_and_run(lambda x: layers(x) / x.shape[0], torch.randn(6, 16, dtype=torch.bfloat16), dynamic=True, regions=2)
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    assert_same(run.function(x), layers(x) / 3)


def test_sizes_that_guards_have_fixed_are_numbers_in_graphs() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    open_sizes: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    value = mode.from_tensor(torch.randn(6, 4), symbolic_context=open_sizes)
    assert int(value.shape[1]) == 4 and isinstance(value.shape[1], torch.SymInt)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = value
    last = graph.call_function(torch.ops.aten.relu.default, (x,))
    last.meta["val"] = value
    emit = Emitter(last)
    flat = emit(torch.ops.aten.reshape.default, x, [-1, value.shape[1]])
    assert flat.args[1] == [-1, 4]
    assert emit.sizes(x, (0, 1))[1] == 4


@pytest.mark.parametrize("training", [False, True])
def test_what_a_comprehension_captures_after_a_graph_break_is_no_weight(training: bool) -> None:
    """Places of tokens, mostly zeros, are new at every call: no graph for each number of tokens. What was made before stays."""
    experts, before = prune_(nn.ModuleList(nn.Linear(32, 32) for _ in range(3))), prune_(nn.Linear(32, 32)).weight.detach()

    def mixture(x: Tensor) -> Tensor:
        places = F.one_hot(x[:, :3].argmax(-1), 3).T[:, :, None] * torch.eye(len(x))
        torch._dynamo.graph_break()
        return torch.stack([expert(places[n] @ x) @ before for n, expert in enumerate(experts)]).sum(0)

    compiled = torch.compile(mixture, backend=sparse, options=EVERYTHING)
    with collect() as collected, torch.set_grad_enabled(training):
        for tokens in (12, 20, 9, 15):
            x = torch.randn(tokens, 32)
            assert_same(compiled(x), mixture(x))
    assert counters["stats"]["unique_graphs"] == 4  # two for the first number of tokens, two for all others
    names = {f"experts.{n}.weight" for n in range(3)} | {"before"}
    assert {decision.name for decision in collected.decisions if decision.sparse} == names
