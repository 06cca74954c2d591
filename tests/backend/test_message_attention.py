"""Attention over an edge list becomes one operation: what was recognised and what was not, and eager torch's numbers."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from gossamer.backend.graph.dropout import dropout_at
from tests.backend.harness import assert_same, compile_and_run
from tests.backend.messages import EDGES, NODES, aggregated, edges, operations, trained

aten = torch.ops.aten


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


@pytest.mark.parametrize("known", [True, False])
def test_a_share_that_is_an_input_is_no_dropout(known: bool) -> None:
    graph = fx.Graph()
    x, share = graph.placeholder("x"), graph.placeholder("share")
    drawn = graph.call_function(aten.rand.default, ([4, 3],))
    mask = graph.call_function(aten.gt.Scalar, (drawn, 0.5 if known else share))
    kept = graph.call_function(aten.mul.Tensor, (mask, x))
    for node in (x, drawn, mask, kept):
        node.meta["val"] = torch.empty(4, 3)
    found = dropout_at(graph.call_function(aten.mul.Tensor, (kept, 2.0)))
    assert (found is not None and found.share == 0.5) if known else found is None


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
    # What is f32 before it meets f64 is summed in another order.
    for mine, theirs in ((run.output, attended(*given.values(), index)), *zip(ours, expected, strict=True)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


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
