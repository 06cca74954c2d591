"""Layers of PyTorch Geometric that take adjacencies elsewhere than as `edge_index`, with features, or in dictionaries."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import SparseTensor
from gossamer.backend import sparse as backend
from gossamer.backend.report.report import collect

pyg = pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed")

NODES = 20
KINDS = (["a", "b"], [("a", "x", "b"), ("b", "y", "a"), ("a", "z", "a")])


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, outputs))


def edges(targets: int = NODES, sources: int = NODES) -> Tensor:
    """Different ones, by targets, as an adjacency has them."""
    return torch.unique(torch.stack([torch.randint(0, targets, (60,)), torch.randint(0, sources, (60,))]), dim=1)[[1, 0]]


def adjacency(edge_index: Tensor, targets: int = NODES, sources: int = NODES) -> SparseTensor:
    return SparseTensor.from_edge_index(edge_index, None, (targets, sources))


def check(layer: nn.Module, by_edges: tuple[Any, ...], by_adjacency: tuple[Any, ...], fullgraph: bool = True) -> None:
    """The same results for an adjacency as for its edges, eager and compiled. A graph without breaks has sparse regions."""
    with torch.no_grad():
        expected = layer.eval()(*by_edges)
        prepared = gossamer.prepare(copy.deepcopy(layer))
        torch._dynamo.reset()
        compiled = torch.compile(prepared, backend=backend, fullgraph=fullgraph, options={"dense": "eager", "min_gain": 0})
        torch.testing.assert_close(prepared(*by_adjacency), expected, rtol=1e-4, atol=1e-5)
        with collect() as found:
            torch.testing.assert_close(compiled(*by_adjacency), expected, rtol=1e-4, atol=1e-5)
    assert any(each.sparse for each in found.decisions) == fullgraph, "WLConv multiplies nothing"


LAYERS_OF_KINDS: dict[str, Callable[[], nn.Module]] = {
    "HAN": lambda: pyg.HANConv(8, 16, KINDS, heads=2),
    "HGT": lambda: pyg.HGTConv(8, 16, KINDS, heads=2),
    "SAGE for each kind": lambda: pyg.HeteroConv({kind: pyg.SAGEConv((8, 8), 8) for kind in KINDS[1]}),
}


@pytest.mark.parametrize("name", LAYERS_OF_KINDS)
def test_adjacencies_in_dictionaries(name: str) -> None:
    torch.manual_seed(0)
    nodes = {"a": NODES, "b": 15}
    x = {kind: torch.randn(count, 8) for kind, count in nodes.items()}
    lists = {kind: edges(nodes[kind[2]], nodes[kind[0]]) for kind in KINDS[1]}
    sparse = {kind: adjacency(each, nodes[kind[2]], nodes[kind[0]]) for kind, each in lists.items()}
    check(LAYERS_OF_KINDS[name](), (x, lists), (x, sparse))


def test_adjacencies_of_two_signs() -> None:
    torch.manual_seed(0)
    x, positive, negative = torch.randn(NODES, 8), edges(), edges()
    given = x, adjacency(positive), adjacency(negative)
    check(pyg.SignedConv(8, 16, first_aggr=True), (x, positive, negative), given)


LAYERS_WITH_FEATURES: dict[str, Callable[[], nn.Module]] = {
    "GMM": lambda: pyg.GMMConv(8, 16, 3, 2),
    "NN": lambda: pyg.NNConv(8, 16, mlp(3, 8 * 16)),
    "GINE": lambda: pyg.GINEConv(mlp(8, 8), edge_dim=3),
    "GAT": lambda: pyg.GATConv(8, 16, edge_dim=3),
    "graph transformer": lambda: pyg.TransformerConv(8, 16, edge_dim=3),
}


@pytest.mark.parametrize("name", LAYERS_WITH_FEATURES)
def test_an_adjacency_has_the_features_of_its_edges(name: str) -> None:
    torch.manual_seed(0)
    x, edge_index = torch.randn(NODES, 8), edges()
    features = torch.randn(edge_index.shape[1], 3)
    both = SparseTensor.from_torch(torch.sparse_coo_tensor(edge_index[[1, 0]], features, (NODES, NODES, 3)))
    layer = LAYERS_WITH_FEATURES[name]()
    check(layer, (x, edge_index, features), (x, both))
    check(layer, (x, edge_index, features), (x, adjacency(edge_index), features))


def test_layers_that_pass_no_messages_take_an_adjacency() -> None:
    torch.manual_seed(0)
    x, edge_index = torch.arange(NODES) % 4, edges()
    check(pyg.WLConv(), (x, edge_index), (x, adjacency(edge_index)), fullgraph=False)


def test_a_graph_that_torch_cannot_trace_runs_with_a_warning() -> None:
    """The tracer of torch 2.13 refuses a view in the attention of "Rethinking attention with performers" as PyG has it."""
    torch.manual_seed(0)
    x, edge_index = torch.randn(NODES, 16), edges()
    layer = pyg.GPSConv(16, pyg.GINConv(mlp(16, 16)), heads=4, attn_type="performer", dropout=0.0).eval()
    torch._dynamo.reset()
    with torch.no_grad(), pytest.warns(UserWarning, match="could not be compiled and runs uncompiled"):
        found = torch.compile(layer, backend=backend, options={"dense": "eager"})(x, edge_index)
    torch.testing.assert_close(found, layer(x, edge_index), rtol=1e-4, atol=1e-5)
