"""prepare: pruning hooks become mask parametrizations, and nothing else changes."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import gossamer
from gossamer.sparsity import Mask


def pruned() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", 0.9)
    return model


def test_hooks_become_parametrizations_with_the_same_values() -> None:
    model, x = pruned(), torch.randn(8, 256)
    expected = model(x)
    originals = [model[0].weight_orig, model[2].weight_orig]
    assert gossamer.prepare(model) is model
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    for layer, original in zip((model[0], model[2]), originals, strict=True):
        assert not layer._forward_pre_hooks
        assert isinstance(layer.parametrizations.weight[0], Mask)
        assert layer.parametrizations.weight.original is original


def test_gradients_are_those_of_the_hooks() -> None:
    model, other, x = pruned(), gossamer.prepare(pruned()), torch.randn(8, 256)
    model(x).square().sum().backward()
    other(x).square().sum().backward()
    torch.testing.assert_close(other[0].parametrizations.weight.original.grad, model[0].weight_orig.grad)


def test_an_optimizer_goes_on() -> None:
    model, x = pruned(), torch.randn(8, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossamer.prepare(model)
    before = model[0].weight.clone()
    model(x).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert ((model[0].weight != 0) == (before != 0)).all()


def test_a_prepared_model_compiles_sparse_without_the_masking() -> None:
    model, x = gossamer.prepare(pruned()), torch.randn(64, 256)
    with torch.no_grad():
        compiled = torch.compile(model, backend="sparse", fullgraph=True, options={"dense": "eager", "min_gain": 0})
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        report = gossamer.explain(model, x, options={"dense": "eager", "min_gain": 0})
    assert [(d.name, d.sparse) for d in report.decisions] == [("0.weight", True), ("2.weight", True)]


def test_an_unpruned_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in gossamer.prepare(model).named_parameters()] == names
    assert not parametrize.is_parametrized(model[0])


def test_the_fused_path_of_transformer_layers_is_opened() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    with torch.no_grad():
        layer.linear1.weight[torch.rand_like(layer.linear1.weight) < 0.9] = 0
        x = torch.randn(2, 16, 64)
        expected = layer(x)
        enabled = torch.backends.mha.get_fastpath_enabled()
        try:
            report = gossamer.explain(gossamer.prepare(layer), x, options={"dense": "eager", "min_gain": 0})
            torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
        finally:
            torch.backends.mha.set_fastpath_enabled(enabled)
    assert "linear1.weight" in [d.name for d in report.decisions if d.sparse]


class Graph(nn.Module):
    """Products with a torch.sparse buffer, parameter, attribute and argument."""

    def __init__(self, adjacency: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("fixed", adjacency)
        self.learned = nn.Parameter(adjacency.clone())
        self.steps = [adjacency]

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return self.fixed @ x + self.learned @ x + self.steps[0] @ x + adjacency @ x


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_torch_sparse_tensors_compile_in_one_graph(layout: torch.layout) -> None:
    dense, x = torch.randn(40, 40) * (torch.rand(40, 40) < 0.2), torch.randn(40, 8)
    adjacency = dense.to_sparse(layout=layout)
    model = Graph(adjacency)
    checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
    assert gossamer.prepare(model) is model
    assert type(model).__name__ == "Graph" and isinstance(model, Graph)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="sparse", fullgraph=True, options={"dense": "eager"})
    for run in (compiled, model):
        torch.testing.assert_close(run(x, adjacency), 4 * dense @ x, rtol=1e-4, atol=1e-4)
    compiled(x, adjacency).sum().backward()
    assert isinstance(model.learned.grad, gossamer.SparseTensor)
    # State dicts of before and after load.
    other = gossamer.prepare(Graph((2 * dense).to_sparse(layout=layout)))
    for state in (checkpoint, model.state_dict()):
        other.load_state_dict(state)
        torch.testing.assert_close(other.learned.to_dense(), dense)
    torch.testing.assert_close(copy.deepcopy(model)(x, adjacency), model(x, adjacency))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_an_adjacency_first_seen_in_inference_mode_trains(layout: torch.layout) -> None:
    dense, x = torch.randn(9, 9) * (torch.rand(9, 9) < 0.4), torch.randn(9, 4)
    adjacency = dense.to_sparse(layout=layout)
    model = gossamer.prepare(Graph(adjacency.clone()))
    with torch.inference_mode():
        model(x, adjacency)
    x.requires_grad_()
    model(x, adjacency).sum().backward()
    torch.testing.assert_close(x.grad, 4 * dense.sum(0)[:, None].expand(9, 4), rtol=1e-4, atol=1e-5)


class Layer(nn.Module):
    """Looks as those of PyTorch Geometric do, and returns what it is given."""

    propagate = message = None

    def forward(self, x: object, edge_index: object, *more: object, edge_weight: object = None, **named: object) -> object:
        return x, edge_index, edge_weight, more, named


@pytest.mark.parametrize("format", [gossamer.Format.CSR, gossamer.Format.CSC, gossamer.Format.bsr(2, 2)])
def test_an_adjacency_becomes_its_edges(format: gossamer.Format) -> None:
    dense = torch.zeros(5, 5)
    dense[4, 4], dense[0, 1], dense[3, 0] = 1, 2, 3
    layer = gossamer.prepare(nn.Sequential(Layer()))[0]
    adjacency = gossamer.SparseTensor.from_dense(dense, format)
    for result, rest in (
        (layer(7, adjacency, 8, 9, other=10), (8, 9)),
        (layer(x=7, edge_index=adjacency, edge_weight=None, other=10), ()),
    ):
        x, edges, weights, more, named = result
        assert (x, more, named) == (7, rest, {"other": 10})
        assert edges.shape == (2, 3)
        torch.testing.assert_close(torch.zeros(5, 5).index_put((edges[1], edges[0]), weights), dense)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(torch.ones(5), adjacency)
    assert torch.equal(compiled[1], edges) and torch.equal(compiled[2], weights)


def test_layers_of_pytorch_geometric_take_an_adjacency() -> None:
    pyg = pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed")
    edges = torch.randint(0, 50, (2, 300)).unique(dim=1)
    weights, x = torch.rand(edges.shape[1]), torch.randn(50, 12)
    adjacency = gossamer.SparseTensor.from_edge_index(edges, weights, 50)
    for layer, more in ((pyg.GCNConv(12, 8), {"edge_weight": weights}), (pyg.GATConv(12, 8, heads=2), {})):
        expected = layer(x, edges, **more)
        prepared = gossamer.prepare(copy.deepcopy(layer))
        torch.testing.assert_close(prepared(x, adjacency), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(prepared(x, edges, **more), expected, rtol=1e-4, atol=1e-5)


class Encoder(nn.Module):
    """A layer whose arguments have names, as a Hugging Face Trainer wants to know them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 32)
        prune.l1_unstructured(self.layer, "weight", 0.9)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """What it returns."""
        return torch.relu(self.layer(input_ids))


def test_forward_keeps_its_signature() -> None:
    for model in (prepared := gossamer.prepare(Encoder()), copy.deepcopy(prepared)):
        assert inspect.signature(model.forward) == inspect.signature(Encoder().forward)
        assert list(inspect.signature(model.forward).parameters) == ["input_ids", "attention_mask"]


@pytest.mark.parametrize("strict", [False, True])
def test_a_prepared_model_can_be_exported(strict: bool) -> None:
    model, x = gossamer.prepare(Encoder()).eval(), torch.randn(4, 64)
    program = torch.export.export(model, (x,), strict=strict)
    assert program.state_dict.keys() == model.state_dict().keys()
    torch.testing.assert_close(program.module()(x), model(x), rtol=0, atol=0)


def test_a_prepared_model_is_compiled_within_another_graph() -> None:
    model, x = gossamer.prepare(Encoder()), torch.randn(4, 64)
    torch._dynamo.reset()
    with torch.no_grad():
        options = {"dense": "eager", "min_gain": 0}
        report = gossamer.explain(lambda x: model(x) + 1, x, options=options)
        whole = torch.compile(lambda x: model(x) + 1, backend="sparse", fullgraph=True, options=options)
        torch.testing.assert_close(whole(x), model(x) + 1)
    assert [(d.name, d.sparse) for d in report.decisions] == [("model.layer.weight", True)] and not report.graph_breaks
