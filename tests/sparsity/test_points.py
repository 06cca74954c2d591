"""Convolutions of points: kernels, maps and modules against torch's dense convolutions in float64."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
import gossamer.nn as spconv
from gossamer.dialects.points import ConvolvePointsGradOp, ConvolvePointsOp
from gossamer.sparsity.compiler.compile_kernel import compile_region
from gossamer.sparsity.compiler.op_ir import op_ir
from gossamer.sparsity.compiler.op_kernels import schedule_of
from gossamer.sparsity.nn.convolve import coarse_sites, convolve_sites, convolve_sites_weight
from gossamer.sparsity.nn.site_maps import _known, site_maps
from gossamer.sparsity.nn.windows import Window
from tests.sparsity.clouds import TOLERANCE, Shape, at, close, dense, sites
from tests.sparsity.made import team_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def ones(size: int, value: int = 1) -> Shape:
    return (value,) * size


CASES = [  # shape, channels in and out, sites, window
    ((9,), 1, 1, 7, Window((3,), (1,), (1,), (1,))),
    ((30,), 16, 33, 60, Window((5,), (3,), (1,), (1,))),
    ((35, 16), 17, 130, 300, Window((3, 5), (1, 1), (2, 4), (2, 2))),
    ((20, 21), 64, 48, 800, Window((3, 3), (1, 1), (1, 1), (1, 1))),
    ((8, 9, 10), 5, 64, 700, Window((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1))),
    ((8, 9, 10), 20, 70, 500, Window((3, 1, 2), (2, 1, 3), (1, 0, 1), (1, 2, 1))),
    ((8, 9, 10), 3, 4, 0, Window((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1))),
    ((8, 9, 10), 3, 4, 1, Window((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1))),
    ((8, 9, 10), 3, 4, 100, Window((1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1))),
]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_against_dense_convolutions(dtype: torch.dtype) -> None:
    for shape, channels, made, count, window in CASES:
        indices = sites(2, shape, count)
        x, bias = (torch.randn(*size, dtype=dtype, requires_grad=True) for size in ((count, channels), (made,)))
        weight = torch.randn(torch.Size(window.kernel).numel(), channels, made, dtype=dtype, requires_grad=True)
        grid = dense(x, indices, 2, shape).requires_grad_()
        wide = weight.detach().double().view(*window.kernel, channels, made)
        wide = wide.movedim((-1, -2), (0, 1)).contiguous().requires_grad_()
        convolution = (F.conv1d, F.conv2d, F.conv3d)[len(shape) - 1]
        full = convolution(grid, wide, bias.detach().double(), window.stride, window.padding, window.dilation)
        same = "same" if full.shape[2:] == shape else "down"
        for kind in {"down", same}:
            to = indices if kind == "same" else coarse_sites(indices, shape, 2, window.numbers)
            y = convolve_sites(x, weight, bias, indices, shape, 2, (), window.numbers, kind, len(to))
            reference = at(full, to)
            close(y.detach(), reference.detach())
            gradient = torch.randn_like(y)
            found = torch.autograd.grad(y, (x, weight, bias), gradient)
            of_grid, of_weight = torch.autograd.grad(reference, (grid, wide), gradient.double(), retain_graph=True)
            close(found[0], at(of_grid, indices))
            close(found[1], of_weight.movedim((0, 1), (-1, -2)).reshape(weight.shape))
            close(found[2], gradient.double().sum(0))


def test_all_outputs_that_a_window_reaches_are_there_and_sorted() -> None:
    for shape, _, _, count, window in CASES:
        indices = sites(2, shape, count)
        there = dense(torch.ones(count, 1), indices, 2, shape)
        convolution = (F.conv1d, F.conv2d, F.conv3d)[len(shape) - 1]
        weight = torch.ones(1, 1, *window.kernel, dtype=torch.float64)
        reached = convolution(there, weight, None, window.stride, window.padding, window.dilation)[:, 0] > 0
        found = coarse_sites(indices, shape, 2, window.numbers)
        assert found.dtype == torch.int32 and torch.equal(found.long(), reached.nonzero())


def test_four_dimensions_and_back() -> None:
    indices, x = sites(2, (4, 5, 6, 3), 200), torch.randn(200, 6, dtype=torch.float64)
    tensor = spconv.SparseConvTensor(x, indices, (4, 5, 6, 3), 2)
    torch.manual_seed(0)
    down, up = spconv.SparseConv4d(6, 8, 2, 2, 1, indice_key="d").double(), spconv.SparseInverseConv4d(8, 5, 2, "d").double()
    middle = down(tensor)
    y = up(middle)
    assert torch.equal(y.indices, indices) and middle.spatial_shape == [3, 3, 4, 2]
    lines = {tuple(place): row for row, place in enumerate(middle.indices.tolist())}
    expected, fine = down.bias.expand(len(lines), -1).clone(), up.bias.expand(200, -1).clone()
    pairs = []
    for row, (batch, *place) in enumerate(indices.tolist()):
        to = tuple((p + 1) // 2 for p in place)
        pairs.append((row, lines[batch, *to], tuple((p + 1) % 2 for p in place)))
    for row, line, k in pairs:
        expected[line] = expected[line] + down.weight[(slice(None), *k)] @ x[row]
    for row, line, k in pairs:
        fine[row] = fine[row] + up.weight[(slice(None), *k)] @ expected[line]
    close(middle.features.detach(), expected.detach())
    close(y.features.detach(), fine.detach())


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_teams(threads: int) -> None:
    window = Window(ones(3, 3), ones(3), ones(3), ones(3))
    indices, x, weight = sites(1, (16, 17, 18), 3000), torch.randn(3000, 40), torch.randn(27, 40, 24)
    where = indices, (16, 17, 18), 1, (), window.numbers, "same"
    with team_of(1):
        alone = convolve_sites(x, weight, None, *where, 3000), convolve_sites_weight(x, x[:, :24], *where)
    with team_of(threads):
        assert torch.equal(convolve_sites(x, weight, None, *where, 3000), alone[0])
        assert torch.equal(convolve_sites_weight(x, x[:, :24], *where), alone[1])


def test_what_is_not_finite_stays_where_it_is() -> None:
    window = Window((3,), (1,), (1,), (1,))
    indices = torch.tensor([[0, n] for n in range(300)], dtype=torch.int32)
    x = torch.ones(300, 3)
    x[100, 1], x[200, 2] = torch.nan, torch.inf
    y = convolve_sites(x, torch.ones(3, 3, 17), None, indices, (300,), 1, (), window.numbers, "same", 300)
    reached = torch.arange(300)
    assert torch.equal(y.isnan().any(1), (reached - 100).abs() < 2)
    assert torch.equal(y.isinf().any(1), (reached - 200).abs() < 2)


def test_second_derivatives_and_tangents() -> None:
    indices = sites(1, (4, 5), 12)
    window = Window((2, 3), (2, 1), (1, 1), (1, 1))
    to = coarse_sites(indices, (4, 5), 1, window.numbers)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return convolve_sites(x, weight, bias, indices, (4, 5), 1, (), window.numbers, "down", len(to))

    given = [torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((12, 2), (6, 2, 3), (3,))]
    assert torch.autograd.gradcheck(function, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, given)


# Maps


def test_layers_share_a_map_until_the_coordinates_change() -> None:
    indices = sites(1, (9, 9, 9), 101)
    indices, free = indices[:-1].clone(), indices[-1]
    first = site_maps(indices, (9, 9, 9), 1)
    window = Window(ones(3, 3), ones(3), ones(3), ones(3))
    assert site_maps(indices, [9, 9, 9], 1).map("same", (), window) is first.map("same", (), window)
    assert site_maps(indices, (9, 9, 10), 1) is not first
    indices[0] = free
    assert site_maps(indices, (9, 9, 9), 1) is not first
    before = len(_known)
    del indices
    assert len(_known) < before


def test_maps_are_no_larger_than_their_pairs() -> None:
    indices = sites(1, (30, 30, 30), 5000)
    pairs = site_maps(indices, (30, 30, 30), 1).map("same", (), Window(ones(3, 3), ones(3), ones(3), ones(3)))
    assert pairs.inputs.untyped_storage().nbytes() == 4 * len(pairs.inputs)
    assert pairs.bytes < 8 * len(pairs.inputs) + 4 * 5000 + 4 * 27 * 22


BAD = {
    "below": (torch.tensor([[0, 1], [0, -1]]), "row 1 is \\[0, -1\\], must be at least 0 and below \\[2, 5\\]"),
    "beyond": (torch.tensor([[0, 1], [0, 5]]), "row 1 is \\[0, 5\\].*1 of 2 rows"),
    "batch": (torch.tensor([[2, 1]]), "row 0 is \\[2, 1\\]"),
    "twice": (torch.tensor([[1, 3], [0, 1], [1, 3]]), "rows 0 and 2 are both \\[1, 3\\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_coordinates_are_refused(name: str) -> None:
    indices, message = BAD[name]
    tensor = spconv.SparseConvTensor(torch.ones(len(indices), 2), indices.int(), [5], 2)
    with pytest.raises(gossamer.GossamerError, match=message):
        spconv.SubMConv1d(2, 2, 3)(tensor)


def test_windows_wider_than_the_grid() -> None:
    tensor = spconv.SparseConvTensor(torch.randn(60, 3), sites(2, (6, 7), 60), [6, 7], 2)
    for kernel, dilation in ((5, 5), (3, (1, 6)), (3, 10**12)):
        layer = spconv.SubMConv2d(3, 4, kernel, dilation=dilation)
        reach = min(kernel // 2 * max(layer.window.dilation), 20)
        weight = layer.weight.movedim(-1, 1)
        if max(layer.window.dilation) > 20:
            weight, dilation = weight[:, :, 1:2, 1:2], 1
            reach = 0
        padding = [reach * d // max(layer.window.dilation) for d in layer.window.dilation] if reach else 0
        dense = torch.nn.functional.conv2d(tensor.dense(), weight, layer.bias, padding=padding, dilation=dilation)
        at = tensor.indices.long()
        torch.testing.assert_close(layer(tensor).features, dense[at[:, 0], :, at[:, 1], at[:, 2]], rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    x, indices = torch.ones(3, 4), torch.tensor([[0, 1, 1], [0, 1, 2], [0, 2, 1]], dtype=torch.int32)
    tensor = spconv.SparseConvTensor(x, indices, [5, 5], 1)
    far = spconv.SparseConvTensor(x[:1], torch.tensor([[0, 2**31 - 2]], dtype=torch.int32), [2**31 - 1], 1)

    def with_parameters(**parameters: torch.Tensor) -> torch.nn.Module:
        layer = spconv.SubMConv2d(4, 4, 3)
        for name, value in parameters.items():
            setattr(layer, name, torch.nn.Parameter(value))
        return layer

    wrong = [
        (lambda: spconv.SparseConvTensor(x, indices.long(), [5, 5], 1), "torch.int64 .* must be torch.int32"),
        (lambda: spconv.SparseConvTensor(x, indices, [5, 5, 5], 1), "3 dimensions.*they have 3"),
        (lambda: spconv.SparseConvTensor(x[:2], indices, [5, 5], 1), "2 rows of features and 3 of indices"),
        (lambda: spconv.SparseConvTensor(x.long(), indices, [5, 5], 1), "features are torch.int64"),
        (lambda: spconv.SparseConvTensor(x.to("meta"), indices, [5, 5], 1), "features are on meta"),
        (lambda: spconv.SubMConv2d(4, 4, 2), "must be odd"),
        (lambda: spconv.SparseConv2d(4, 4, (3, 3, 3)), "kernel_size .* must be 2 numbers"),
        (lambda: spconv.SubMConv2d(3, 4, 3)(tensor), "4 channels come in, the weight takes 3"),
        (lambda: spconv.SubMConv3d(4, 4, 3)(tensor), "the sites have 2 dimensions"),
        (lambda: spconv.SubMConv2d(4, 4, 3).to("meta")(tensor), "the weight is on meta, features are on cpu"),
        (lambda: spconv.SparseConv2d(4, 4, 9)(tensor), "does not fit in a grid"),
        (lambda: spconv.SparseInverseConv2d(4, 4, 3, "none")(tensor), "no SparseConv with the indice_key 'none'"),
        (lambda: convolve_sites(x[:2], torch.ones(1, 4, 1), None, indices, (5, 5), 1, (), (1, 1, 1, 1, 0, 0, 1, 1), "same", 3),
         r"x is torch.float32 \[2, 4\], must be f32 or f64 \[3, 4\]"),
        (lambda: spconv.SparseConvTensor(x, indices, [5, -5], 1), "spatial_shape: -5 is negative"),
        (lambda: spconv.SparseConvTensor(x, indices, [5, 5.5], 1), "spatial_shape: 5.5 is not a whole number"),
        (lambda: spconv.SparseConvTensor(x.tolist(), indices, [5, 5], 1), "features are list"),
        (lambda: with_parameters(weight=torch.ones(4, 3, 3, 3))(tensor), "4 channels come in, the weight takes 3"),
        (lambda: with_parameters(weight=torch.ones(4, 1, 1, 4))(tensor), r"weight is .*\[1, 4, 4\], must be .* \[9, 4, 4\]"),
        (lambda: with_parameters(bias=torch.ones(3))(tensor), r"bias is .*\[3\], must be floats \[4\]"),
        (lambda: spconv.SubMConv2d(4, 4, 3)(tensor.replace_feature(x[:, :, None])), r"x is .*\[3, 4, 1\]"),
        (lambda: spconv.SubMConv2d(4, 4, 3)(tensor.replace_feature(x * 1j)), "features are torch.complex64"),
        (lambda: spconv.SparseConv1d(4, 4, 3, padding=2)(far), "too large for int32 coordinates"),
        (lambda: spconv.SparseConv2d(4, 4, 3, padding=2**29)(spconv.SparseConvTensor(x, indices, [2**30, 2**30], 3)),
         r"more than 2\*\*62 places"),
    ]  # fmt: skip
    for call, message in wrong:
        with pytest.raises(gossamer.GossamerError, match=message):
            call()


# Networks


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin = spconv.SparseSequential(spconv.SubMConv3d(4, 16, 3, indice_key="0"), nn.BatchNorm1d(16), nn.ReLU())
        self.down = spconv.SparseSequential(spconv.SparseConv3d(16, 24, 2, 2, indice_key="d"), nn.BatchNorm1d(24))
        self.branch = spconv.SparseConv3d(16, 24, 2, 2)  # to the same sites
        self.middle = spconv.SubMConv3d(24, 24, 3, bias=False)
        self.up = spconv.SparseInverseConv3d(24, 16, 2, indice_key="d")
        self.end = nn.Linear(32, 5)

    def forward(self, features: Tensor, indices: Tensor) -> Tensor:
        x = self.begin(spconv.SparseConvTensor(features, indices, [20, 20, 21], 2))
        y = self.down(x)
        y = self.middle(y.replace_feature(y.features + self.branch(x).features))
        return self.end(torch.cat([x.features, self.up(y).features], 1))


def clouds(*counts: int) -> Iterator[tuple[Tensor, Tensor]]:
    for count in counts:
        features, indices = torch.randn(count, 4), sites(2, (20, 20, 21), count)
        for each in (features, indices):
            torch._dynamo.mark_dynamic(each, 0)
        yield features, indices


def kernels_of(network: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """How many convolutions were called."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        network(*inputs)
    return sum(event.count for event in profile.key_averages() if event.key == "gossamer::convolve_sites")


def test_a_network_is_one_graph_for_any_number_of_points() -> None:
    network = Unet().eval()
    compiled = torch.compile(network, backend="sparse", fullgraph=True, options={"dense": "eager"})
    with torch.no_grad():
        for inputs in clouds(500, 777, 3, 2000):
            found = compiled(*inputs)
            close(found, network(*inputs))
            close(found, network.double()(inputs[0].double(), inputs[1]))
            network.float()
        assert kernels_of(compiled, inputs) == 5
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("compiles", [False, True])
def test_indices_that_are_assigned_are_those_of_a_new_tensor(compiles: bool) -> None:
    """As in VoxelNeXt, which joins the sites of several levels."""
    first = spconv.SparseConv2d(3, 4, 3, stride=2, padding=1, indice_key="a")
    second = spconv.SubMConv2d(4, 5, 3, indice_key="a")

    def joined(features: Tensor, indices: Tensor, more: Tensor, assigns: bool) -> Tensor:
        x = first(spconv.SparseConvTensor(features, indices, [20, 20], 2))
        x = x.replace_feature(torch.cat([x.features, torch.ones(2, 4)]))
        every = torch.cat([x.indices, more])
        if assigns:
            x.indices = every
        else:
            x = spconv.SparseConvTensor(x.features, every, x.spatial_shape, 2)
        result: Tensor = second(x).features
        return result

    more = torch.tensor([[1, 9, 9], [0, 9, 9]], dtype=torch.int32)
    indices = sites(2, (17, 17), 100)  # no window of the stride leads to the last places
    function = torch.compile(joined, backend="sparse", fullgraph=True, options={"dense": "eager"}) if compiles else joined
    features = torch.randn(100, 3)
    torch.testing.assert_close(function(features, indices, more, True), joined(features, indices, more, False))


def test_training_is_one_graph_for_any_number_of_points() -> None:
    network = Unet()
    compiled = torch.compile(network, backend="sparse", fullgraph=True, options={"dense": "eager"})
    for inputs in clouds(500, 777):
        found, expected = (
            torch.autograd.grad(each(*inputs).square().mean(), list(network.parameters())) for each in (compiled, network)
        )
        for a, b in zip(found, expected, strict=True):
            close(a, b)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_the_report_names_the_convolutions_and_their_weights() -> None:
    network, (inputs,) = Unet(), clouds(500)
    weights = ("begin.0", "branch", "down.0", "middle", "up")
    for training in (False, True):
        with torch.set_grad_enabled(training):
            report = gossamer.explain(network.train(training), *inputs, fullgraph=True)
        found = {(d.name, d.op) for d in report.decisions if d.sparse}
        assert {name for name, op in found if op == "convolution"} == {f"{name}.weight" for name in weights}
        assert {name for name, op in found if op == "convolution backward"} <= {f"{name}.weight" for name in weights}
        assert any(op == "convolution backward" for _, op in found) == training
        assert report.layers["up.weight"] and report.decisions[0].shape[1:-1] in ((3, 3, 3), (2, 2, 2))


def test_the_report_names_a_pruned_weight_under_autocast() -> None:
    network, (inputs,) = Unet().eval(), clouds(500)
    with torch.no_grad():
        network.middle.weight *= torch.rand_like(network.middle.weight) < 0.2
        with torch.autocast("cpu", torch.bfloat16):
            report = gossamer.explain(network, *inputs, fullgraph=True)
    (middle,) = (d for d in report.decisions if d.name == "middle.weight" and d.sparse)
    assert middle.density < 0.3 and middle.shape == network.middle.weight.shape


def test_inductor_and_dense_results() -> None:
    network = spconv.SparseSequential(
        spconv.SubMConv2d(3, 8, 3), nn.ReLU(), spconv.SparseConv2d(8, 4, 3, 2, 1), spconv.ToDense()
    )

    def function(features: Tensor, indices: Tensor) -> Tensor:
        return network(spconv.SparseConvTensor(features, indices, [11, 12], 2)) + 1

    indices, x = sites(2, (11, 12), 90), torch.randn(90, 3)
    compiled = torch.compile(function, backend="sparse", fullgraph=True)
    grid = dense(x, indices, 2, (11, 12))
    first, last = network[0], network[2]
    with torch.no_grad():
        there = dense(torch.ones(90, 1), indices, 2, (11, 12))
        hidden = F.conv2d(grid, first.weight.movedim(-1, 1).double(), first.bias.double(), padding=1).relu() * there
        reached = F.conv2d(there, torch.ones(1, 1, 3, 3, dtype=torch.float64), stride=2, padding=1) > 0
        expected = F.conv2d(hidden, last.weight.movedim(-1, 1).double(), last.bias.double(), 2, 1) * reached + 1
        close(compiled(x, indices), expected)
        close(function(x, indices), expected)
    half = network.bfloat16()
    with torch.no_grad():
        close(half(spconv.SparseConvTensor(x.bfloat16(), indices, [11, 12], 2)) + 1, expected)


def test_other_types_have_no_kernel() -> None:
    for op in (ConvolvePointsOp, ConvolvePointsGradOp):
        types = [torch.bfloat16 if each.element == "W" else torch.int32 for each in op.signature.takes + op.signature.gives]
        with pytest.raises(gossamer.CompileError, match="must be f32 or f64"):
            compile_region(op_ir(op, types), schedule=schedule_of(op))


def test_features_and_weights_of_two_types_are_refused() -> None:
    indices = sites(1, (5, 5), 4)
    layer = spconv.SubMConv2d(3, 4, 3).double()
    with pytest.raises(gossamer.GossamerError, match=r"features are torch.float32, the weight torch.float64: use .to()"):
        layer(spconv.SparseConvTensor(torch.randn(4, 3), indices, [5, 5], 1))
