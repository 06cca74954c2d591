"""Pooling and transposed convolutions of points, against torch's on grids in float64."""

from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
import gossamer.nn as spconv
from tests.sparsity.clouds import TOLERANCE, at, close, dense, sites

SHAPES = ((13,), (9, 10), (6, 7, 8))
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def grid(features: Tensor, indices: Tensor, shape: tuple[int, ...], nothing: float) -> Tensor:
    """[2, C, *shape] in float64, from which gradients flow back."""
    empty = torch.full((2, *shape, features.shape[1]), nothing, dtype=torch.float64)
    return empty.index_put(tuple(indices.long().T), features.double()).movedim(-1, 1)


def on_a_grid(layer: nn.Module, features: Tensor, indices: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What a layer computes, by torch's."""
    dims, window = len(shape), layer.window
    numbers = window.kernel, window.stride, window.padding
    if isinstance(layer, spconv.SparseMaxPool1d | spconv.SparseMaxPool2d | spconv.SparseMaxPool3d):
        way = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1]
        return way(grid(features, indices, shape, -torch.inf), *numbers, window.dilation)
    x = grid(features, indices, shape, 0.0)
    if window.transposed:
        way = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        weight = layer.weight.double().movedim(-1, 0)
        return way(x, weight, layer.bias.double(), window.stride, window.padding, dilation=window.dilation)
    way = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]
    return way(x, *numbers) / way(dense(torch.ones(len(indices), 1), indices, 2, shape), *numbers)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_against_grids(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        dims, many = len(shape), 2 * torch.Size(shape).numel()
        layers = [
            getattr(spconv, f"SparseMaxPool{dims}d")(2),
            getattr(spconv, f"SparseMaxPool{dims}d")(3, 2, 1, 1),
            getattr(spconv, f"SparseMaxPool{dims}d")(2, 1, 0, 2),
            getattr(spconv, f"SparseAvgPool{dims}d")(3, 2, 1),
            getattr(spconv, f"SparseConvTranspose{dims}d")(5, 4, 3, 2, 1).to(dtype),
            getattr(spconv, f"SparseConvTranspose{dims}d")(5, 4, 2, 3, 0, 2).to(dtype),
        ]
        for layer in layers:
            for count in (0, 1, many // 3):
                indices = sites(2, shape, count)
                x = torch.randn(count, 5, dtype=dtype, requires_grad=True)
                wide = x.detach().double().requires_grad_()
                y = layer(spconv.SparseConvTensor(x, indices, shape, 2))
                full = on_a_grid(layer, wide, indices, shape)
                assert tuple(y.spatial_shape) == full.shape[2:] and y.features.dtype == dtype
                reference = at(full, y.indices)
                close(y.features.detach(), reference.detach())
                gradient = torch.randn_like(y.features)
                (found,) = torch.autograd.grad(y.features, x, gradient)
                (expected,) = torch.autograd.grad(reference, wide, gradient.double())
                close(found, expected)


def test_all_that_a_transposed_window_reaches_is_there_and_leads_back() -> None:
    indices, x = sites(2, (5, 6), 20), torch.randn(20, 3)
    layer = spconv.SparseConvTranspose2d(3, 4, (2, 3), (2, 3), 0, indice_key="up")
    y = layer(spconv.SparseConvTensor(x, indices, (5, 6), 2))
    there = dense(torch.ones(20, 1), indices, 2, (5, 6))
    reached = F.conv_transpose2d(there, torch.ones(1, 1, 2, 3, dtype=torch.float64), None, (2, 3))[:, 0] > 0
    assert torch.equal(y.indices.long(), reached.nonzero())
    back = spconv.SparseInverseConv2d(4, 5, (2, 3), "up")
    z = back(y)
    expected = F.conv2d(y.dense(), back.weight.movedim(-1, 1), back.bias, (2, 3))
    assert torch.equal(z.indices, indices)
    close(z.features.detach(), at(expected, indices).detach())


def test_four_dimensions() -> None:
    indices, x = sites(2, (4, 5, 6, 3), 200), torch.randn(200, 6, dtype=torch.float64)
    tensor = spconv.SparseConvTensor(x, indices, (4, 5, 6, 3), 2)
    shown = defaultdict(list)
    for row, (batch, *place) in enumerate(indices.tolist()):
        if place[1] < 4 and place[3] < 2:  # a window that begins at the last place would end behind the grid
            shown[batch, *(p // 2 for p in place)].append(row)
    for layer, reduced in ((spconv.SparseMaxPool4d(2), torch.amax), (spconv.SparseAvgPool4d(2), torch.mean)):
        y = layer(tensor)
        expected = {place: reduced(x[rows], 0) for place, rows in shown.items()}
        assert y.spatial_shape == [2, 2, 3, 1]
        assert [tuple(place) for place in y.indices.tolist()] == sorted(expected)
        close(y.features, torch.stack([expected[place] for place in sorted(expected)]))


def test_whole_grids() -> None:
    indices = torch.tensor([[0, 1], [2, 0], [0, 4], [2, 2], [2, 3]], dtype=torch.int32)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    tensor = spconv.SparseConvTensor(x, indices, [5], 4)
    rows = [[0, 2], [], [1, 3, 4], []]
    for layer, reduced in ((spconv.SparseGlobalMaxPool(), torch.amax), (spconv.SparseGlobalAvgPool(), torch.mean)):
        found = layer(tensor)
        expected = torch.stack([reduced(x[each], 0) if each else x.new_zeros(3) for each in rows])
        close(found.detach(), expected.detach())
        gradient = torch.randn_like(found)
        close(torch.autograd.grad(found, x, gradient)[0], torch.autograd.grad(expected, x, gradient)[0])


def test_sums_of_means_may_exceed_the_range_of_their_type() -> None:
    indices = torch.cat([torch.zeros(64, 1), torch.cartesian_prod(*[torch.arange(4)] * 3)], 1).int()
    tensor = spconv.SparseConvTensor(torch.full((64, 3), 3000.0, dtype=torch.float16), indices, [4, 4, 4], 1)
    means = spconv.SparseAvgPool3d(4)(tensor).features, spconv.SparseGlobalAvgPool()(tensor)
    assert all(bool((each == 3000).all()) and each.dtype == torch.float16 for each in means)


def test_what_is_not_finite() -> None:
    indices = torch.tensor([[0, n] for n in range(12)], dtype=torch.int32)
    x = torch.full((12, 2), -torch.inf)
    x[3, 0], x[6, 1] = torch.nan, 5.0
    x[4:6] = torch.tensor([[torch.inf, 1.0], [2.0, torch.nan]])
    leaf = x.clone().requires_grad_()
    for layer in (spconv.SparseMaxPool1d(3, 1, 1), spconv.SparseAvgPool1d(3, 1, 1)):
        y = layer(spconv.SparseConvTensor(leaf, indices, [12], 1))
        torch.testing.assert_close(y.features.detach().double(), at(on_a_grid_of(layer, x, indices), y.indices), equal_nan=True)
        y.features.sum().backward()
        assert leaf.grad is not None and bool(leaf.grad.isfinite().all())


def on_a_grid_of(layer: nn.Module, x: Tensor, indices: Tensor) -> Tensor:
    """For grids without a gap: an average has as many places as there are in the grid."""
    full = x.double().t()[None]
    if isinstance(layer, spconv.SparseMaxPool1d):
        return F.max_pool1d(full, 3, 1, 1)
    return F.avg_pool1d(full, 3, 1, 1, count_include_pad=False)


def test_second_derivatives_and_tangents() -> None:
    indices = sites(1, (4, 5), 12)
    for layer in (spconv.SparseMaxPool2d(2, 1), spconv.SparseAvgPool2d((2, 3), (2, 1), (1, 1))):

        def function(x: Tensor, layer: nn.Module = layer) -> Tensor:
            return layer(spconv.SparseConvTensor(x, indices, [4, 5], 1)).features

        x = torch.randn(12, 2, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(function, x, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, x)


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin = spconv.SparseSequential(spconv.SubMConv2d(3, 8, 3, bias=False), nn.ReLU(), spconv.SparseMaxPool2d(2))
        self.mean = spconv.SparseAvgPool2d(2)
        self.wider = spconv.SparseConvTranspose2d(8, 5, 3, 2)
        self.end = spconv.SparseGlobalMaxPool()

    def forward(self, features: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wider(self.mean(self.begin(spconv.SparseConvTensor(features, indices, [12, 14], 2))))
        return x.features, self.end(x)


def test_one_graph_for_any_number_of_points() -> None:
    network = Pyramid()
    compiled = torch.compile(network, backend="sparse", fullgraph=True, options={"dense": "eager"})
    for count in (150, 201, 30):
        x, indices = torch.randn(count, 3), sites(2, (12, 14), count)
        for each in (x, indices):
            torch._dynamo.mark_dynamic(each, 0)
        found = expected = None
        for way in (compiled, network):
            network.zero_grad()
            leaf = x.clone().requires_grad_()
            if way is compiled:
                torch._dynamo.mark_dynamic(leaf, 0)
            points, whole = way(leaf, indices)
            (points.square().sum() + whole.sum()).backward()
            found, expected = [points, whole, leaf.grad, *(p.grad for p in network.parameters())], found
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    tensor = spconv.SparseConvTensor(torch.ones(2, 4), torch.tensor([[0, 1], [0, 2]], dtype=torch.int32), [5], 1)
    wrong = [
        (lambda: spconv.SparseMaxPool2d(2)(tensor), "the sites have 1 dimensions"),
        (lambda: spconv.SparseAvgPool1d(6)(tensor), "does not fit in a grid"),
        (lambda: spconv.SparseMaxPool1d((2, 2)), "kernel_size .* must be 1 numbers"),
        (lambda: spconv.SparseMaxPool1d(2, 0), "stride is 0"),
        (lambda: spconv.SparseConvTranspose1d(4, 4, 2, padding=5)(tensor), "does not fit in a grid"),
        (lambda: spconv.SubMConv1d(4, 4, 3, groups=2), "groups is 2, must be 1"),
    ]
    for call, message in wrong:
        with pytest.raises(gossamer.GossamerError, match=message):
            call()


@pytest.mark.parametrize("compiles", [False, True])
def test_sites_of_a_dense_tensor(compiles: bool) -> None:
    layer = spconv.SubMConv2d(3, 4, 3)

    def convolved(x: Tensor) -> Tensor:
        found = spconv.SparseConvTensor.from_dense(x)
        return layer(found).dense(channels_first=False) + found.features.sum()

    function = torch.compile(convolved, backend="sparse", fullgraph=True, options={"dense": "eager"}) if compiles else convolved
    for many in (40, 3, 0):
        x = torch.zeros(2, 9, 8, 3)
        x.view(-1)[torch.randperm(x.numel())[:many]] = torch.randn(many)
        x.requires_grad_()
        occupied = (x != 0).any(-1, keepdim=True)
        full = F.conv2d(x.movedim(-1, 1), layer.weight.movedim(-1, 1), layer.bias, padding=1).movedim(1, -1)
        expected = torch.where(occupied, full, 0) + x.sum()
        result = function(x)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        grads = [torch.autograd.grad(each.square().sum(), x)[0] for each in (result, expected)]
        torch.testing.assert_close(grads[0], torch.where(occupied, grads[1], 0), rtol=1e-4, atol=1e-4)
    with pytest.raises(gossamer.GossamerError, match=r"x is \[3, 4\], must be a tensor"):
        spconv.SparseConvTensor.from_dense(torch.ones(3, 4))
