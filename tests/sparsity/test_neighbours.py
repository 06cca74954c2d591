"""Kernels of any shape, composed of `neighbours` and einsum, and convolutions of points in mixed precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
import gossamer.nn as spconv
from tests.sparsity.clouds import SHAPE, at, close, dense, sites


def composed(pairs: gossamer.SparseTensor, x: Tensor, weight: Tensor) -> Tensor:
    return gossamer.einsum("koi,ic,kcd->od", pairs, x, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernels_that_are_no_cubes(dtype: torch.dtype) -> None:
    """A ball of radius 2, with gradients, eager and in one graph, against a dense kernel with zeros in its corners."""
    torch.manual_seed(0)
    indices, x = sites(2, SHAPE, 400), torch.randn(400, 4, dtype=dtype)
    offsets = torch.cartesian_prod(*[torch.arange(-2, 3)] * 3)
    ball = offsets[offsets.square().sum(1) <= 4]
    pairs = spconv.neighbours(spconv.SparseConvTensor(x, indices, list(SHAPE), 2), ball)
    assert pairs.shape == (len(ball), 400, 400) and pairs.dtype == dtype
    weight = torch.randn(len(ball), 4, 6, dtype=dtype)
    cube = torch.zeros(6, 4, 5, 5, 5, dtype=torch.float64)
    cube[(slice(None), slice(None), *(ball + 2).T)] = weight.double().permute(2, 1, 0)
    grid, kernel = dense(x, indices, 2, SHAPE).requires_grad_(), cube.requires_grad_()
    expected = at(F.conv3d(grid, kernel, padding=2), indices)
    of_x, of_kernel = torch.autograd.grad(expected.square().sum(), [grid, kernel])
    of_weight = of_kernel[(slice(None), slice(None), *(ball + 2).T)].permute(2, 1, 0)
    torch._dynamo.reset()
    for call in (composed, torch.compile(composed, backend="sparse", fullgraph=True)):
        given = x.clone().requires_grad_(), weight.clone().requires_grad_()
        found = call(pairs, *given)
        close(found.detach(), expected.detach())
        for a, b in zip(torch.autograd.grad(found.square().sum(), given), (at(of_x, indices), of_weight), strict=True):
            close(a, b)


def test_pairs_have_weights_of_their_own_and_lie_at_any_level() -> None:
    torch.manual_seed(0)
    x = spconv.SparseConvTensor(torch.randn(300, 4), sites(2, SHAPE, 300), list(SHAPE), 2)
    y = spconv.SparseConv3d(4, 3, 2, 2)(x)
    offsets = [[0, 0, 0], [0, 0, 1], [-1, 2, 0], [40, 0, 0]]
    pairs = spconv.neighbours(y, offsets)
    there = y.indices[None, :, None] + F.pad(torch.tensor(offsets), (1, 0))[:, None, None]
    expected = (there == y.indices[None, None]).all(-1)
    assert torch.equal(pairs.to_dense(), expected.float())
    weighed = pairs.with_values(torch.arange(1.0, len(pairs.values()) + 1))
    assert weighed.to_dense().sum() == len(pairs.values()) * (len(pairs.values()) + 1) / 2


def test_no_offsets_no_sites_and_what_is_wrong() -> None:
    x = spconv.SparseConvTensor(torch.randn(3, 2), torch.tensor([[0, 1], [0, 3], [1, 0]], dtype=torch.int32), [5], 2)
    assert spconv.neighbours(x, []).shape == (0, 3, 3)
    empty = spconv.SparseConvTensor(torch.randn(0, 2), torch.zeros(0, 2, dtype=torch.int32), [5], 2)
    assert spconv.neighbours(empty, [[0], [1]]).to_dense().shape == (2, 0, 0)
    for offsets in ([[0, 1]], [[0.5]], [1]):
        with pytest.raises(gossamer.GossamerError, match=r"whole numbers \[offsets, 1\], one a dimension"):
            spconv.neighbours(x, offsets)
    twice = spconv.SparseConvTensor(x.features, x.indices * 0, [5], 2)
    with pytest.raises(gossamer.GossamerError, match="rows repeat another"):
        spconv.neighbours(twice, [[1]])


# Mixed precision


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin = spconv.SparseSequential(spconv.SubMConv3d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU())
        self.down, self.pool = spconv.SparseConv3d(8, 6, 2, 2, indice_key="d"), spconv.SparseMaxPool3d(3, 1, 1)
        self.up = spconv.SparseInverseConv3d(6, 5, 2, indice_key="d", bias=False)

    def forward(self, features: Tensor, indices: Tensor) -> Tensor:
        x = self.begin(spconv.SparseConvTensor(features, indices, list(SHAPE), 2))
        return self.up(self.down(x)).features + self.pool(x).features.mean()


@pytest.mark.parametrize("backend", [None, "eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(backend: str | None, dtype: torch.dtype) -> None:
    """Results are of the lower precision, gradients of that of the parameters, and near those of float64."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    network, x, indices = Network(), torch.randn(300, 4), sites(2, SHAPE, 300)
    wide = Network().double()
    wide.load_state_dict(network.state_dict())
    call = network if backend is None else torch.compile(
        network, backend="sparse", fullgraph=True, options={"dense": backend}
    )  # fmt: skip
    with torch.autocast("cpu", dtype):
        y = call(x, indices)
        assert network.begin[0](spconv.SparseConvTensor(x, indices, list(SHAPE), 2)).features.dtype == dtype
    assert y.dtype == dtype
    reference = wide(x.double(), indices)
    tolerance = 0.05 if dtype == torch.bfloat16 else 0.01
    assert (y.double() - reference).abs().max() <= tolerance * reference.abs().max()
    y.float().square().mean().backward()
    reference.square().mean().backward()
    for parameter, twin in zip(network.parameters(), wide.parameters(), strict=True):
        assert parameter.grad is not None and twin.grad is not None and parameter.grad.dtype == torch.float32
        assert (parameter.grad - twin.grad).norm() <= 2 * tolerance * max(float(twin.grad.norm()), 0.05)


def test_autocast_leaves_float64_alone() -> None:
    layer, indices = spconv.SubMConv3d(4, 3, 3).double(), sites(1, SHAPE, 50)
    x = torch.randn(50, 4, dtype=torch.float64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = layer(spconv.SparseConvTensor(x, indices, list(SHAPE), 1)).features
    assert found.dtype == torch.float64
    expected = F.conv3d(dense(x, indices, 1, SHAPE), layer.weight.movedim(-1, 1), layer.bias, padding=1)
    close(found, at(expected, indices).detach())
