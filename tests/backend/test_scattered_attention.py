"""Graph attention written with gather and scatter as people write it, in all states of a graph's sizes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
from tests.backend.harness import assert_same, compile_and_run
from tests.backend.messages import EDGES, NODES, edges, operations, trained

SIZES = ("static", "marked", "unbacked")


class Attention(nn.Module):
    """Two heads; maxima begin with `least`, sums of exponentials with `added`, which may be `late`: added for each edge."""

    def __init__(self, least: float, added: float, scattered: bool, late: bool = False, heads: int = 2) -> None:
        super().__init__()
        self.least, self.added, self.scattered, self.late = least, added, scattered, late
        self.linear = nn.Linear(6, 8, bias=False)
        self.of_target, self.of_source = (nn.Parameter(torch.randn(heads, 8 // heads)) for _ in range(2))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        heads, features = self.of_target.shape
        h = self.linear(x).view(-1, heads, features)
        z = F.leaky_relu((h * self.of_target).sum(-1)[target] + (h * self.of_source).sum(-1)[source], 0.2)
        at, zeros = target[:, None].expand_as(z), z.new_zeros(x.shape[0], heads)
        most = torch.full_like(zeros, self.least).scatter_reduce(0, at, z.detach(), "amax")
        p = (z - most.gather(0, at) if self.scattered else z - most[target]).exp()
        total = zeros.scatter_add(0, at, p) if self.scattered else zeros.index_add(0, target, p)
        early = total + self.added if self.added and not self.late else total
        weight = p / (early[target] + self.added if self.late else early[target])
        message = h[source] * weight.unsqueeze(-1)
        out = message.new_zeros(x.shape[0], heads, features)
        if self.scattered:
            return out.scatter_add(0, target[:, None, None].expand_as(message), message).flatten(1)
        return out.index_add(0, target, message).flatten(1)


def given(sizes: str) -> list[Tensor]:
    x, (source, target) = torch.randn(NODES, 6), edges().contiguous()
    both = [source.clone(), target.clone()]
    if sizes == "marked":
        torch._dynamo.mark_dynamic(x, 0)
    for index in both:
        if sizes == "marked":
            torch._dynamo.mark_dynamic(index, 0)
        if sizes == "unbacked":
            torch._dynamo.decorators.mark_unbacked(index, 0, shape_id="edges")
    return [x, *both]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(("least", "added"), [(-torch.inf, 0.0), (-1e30, 0.0), (-1e30, 1e-16), (-torch.inf, 1e-16)])
def test_it_is_one_operation(least: float, added: float, scattered: bool, sizes: str) -> None:
    layer, inputs = Attention(least, added, scattered).double(), given(sizes)
    inputs[0] = inputs[0].double()
    with torch.no_grad():
        run = compile_and_run(layer, *inputs)
        assert operations(run) == ["graph attention"]
        assert_same(run.output, layer(*inputs))


def test_what_doubles_can_tell_from_nothing_stays() -> None:
    layer, inputs = Attention(-1e30, 1e-9, False).double(), given("static")
    inputs[0] = inputs[0].double()
    with torch.no_grad():
        run = compile_and_run(layer, *inputs)
        assert operations(run) and "graph attention" not in operations(run)
        torch.testing.assert_close(run.output, layer(*inputs), rtol=1e-13, atol=1e-13)


class OfCounts(nn.Module):
    """A softmax of whole numbers."""

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        z = source % 5
        most = torch.zeros(len(x), dtype=z.dtype).scatter_reduce(0, target, z, "amax")
        p = (z - most[target]).exp()
        weight = p / (torch.zeros(len(x)).index_add(0, target, p) + 1e-16)[target]
        return torch.zeros_like(x).index_add(0, target, x[source] * weight[:, None])


def test_scores_may_be_whole_numbers() -> None:
    layer, inputs = OfCounts(), given("static")
    with torch.no_grad():
        run = compile_and_run(layer, *inputs)
        assert operations(run)
        assert_same(run.output, layer(*inputs))


@pytest.mark.parametrize(("heads", "edges", "taken"), [(1, 13_000, False), (8, 13_000, True), (1, 100_000, True)])
def test_few_scores_are_not_worth_an_attention(heads: int, edges: int, taken: bool) -> None:
    """One head over a small graph is left to torch, but for what its sums are products of."""
    layer = Attention(-1e30, 1e-16, False, heads=heads)
    source, target = torch.randint(0, 500, (2, edges))
    with torch.no_grad():
        report = gossamer.explain(layer, torch.randn(500, 6), source, target, options={"dense": "eager"})
    sparse = [decision.op for decision in report.decisions if decision.sparse]
    assert sparse == (["graph attention"] if taken else ["aggregation"])


def test_what_keeps_from_zero_may_be_added_for_each_edge() -> None:
    layer, inputs = Attention(-1e30, 1e-16, False, late=True), given("static")
    with torch.no_grad():
        run = compile_and_run(layer, *inputs)
        assert operations(run) == ["graph attention"]
        assert_same(run.output, layer(*inputs))
    run, ours, expected = trained(layer, *inputs)
    assert operations(run) == ["graph attention", "graph attention backward"]
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dense", ["eager", "inductor"])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("sizes", ["static", "marked"])
def test_it_trains(sizes: str, scattered: bool, dense: str) -> None:
    run, ours, expected = trained(Attention(-1e30, 1e-16, scattered), *given(sizes), dense=dense)
    assert operations(run) == ["graph attention", "graph attention backward"]
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_other_graphs_recompile_once() -> None:
    layer = Attention(-1e30, 1e-16, True)
    run = compile_and_run(layer, *given("static"))
    for nodes, count in ((31, 60), (64, 900), (12, 1)):
        x, (source, target) = torch.randn(nodes, 6), torch.randint(0, nodes, (2, count))
        with torch.no_grad():
            assert_same(run.function(x, source, target), layer(x, source, target))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3  # a single edge is a case of its own for torch


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_with_its_targets(value: float) -> None:
    layer, (x, source, target) = Attention(-1e30, 0.0, True), given("static")
    x[3, 2] = value
    run = compile_and_run(layer, x, source, target)
    with torch.no_grad():
        expected, found = layer(x, source, target), run.function(x, source, target)
    lost = (source[:EDGES] == 3).nonzero().flatten()
    kept = torch.ones(NODES, dtype=torch.bool)
    kept[target[lost]] = kept[3] = False
    assert found[kept].isfinite().all() and kept.any()
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-4, atol=1e-5)
    assert torch.equal(found.isfinite(), expected.isfinite())
