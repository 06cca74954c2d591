"""Programs as TorchSparse's examples are written: its modules by import, voxels, batches, functions, pooling, backbones."""

import importlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
import gossamer.torchsparse.nn as spnn
import gossamer.torchsparse.nn.functional as spf
from gossamer import torchsparse
from gossamer.torchsparse import SparseTensor
from gossamer.torchsparse.nn.utils import fapply, get_kernel_offsets
from gossamer.torchsparse.utils.collate import sparse_collate, sparse_collate_fn
from gossamer.torchsparse.utils.quantize import sparse_quantize
from tests.sparsity.clouds import close, cloud

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_its_modules_are_imported_by_name() -> None:
    for name in ("nn", "nn.functional", "nn.utils", "utils", "utils.quantize", "utils.collate", "backbones"):
        importlib.import_module(f"gossamer.torchsparse.{name}")


class Scans(torch.utils.data.Dataset[dict[str, Any]]):
    """Points of four features, a label for each voxel by its height."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        random = np.random.default_rng(number)
        points = random.uniform(0, 20, (500, 4))
        coords, indices = sparse_quantize(points[:, :3], 2.0, return_index=True)
        coords = torch.tensor(coords, dtype=torch.int)
        feats = torch.tensor(points[indices] / 10 - 1, dtype=torch.float)
        return {
            "input": SparseTensor(coords=coords, feats=feats),
            "label": SparseTensor(coords=coords, feats=(coords[:, 2] > 4).long()),
            "number": np.array([number]),
            "name": str(number),
        }

    def __len__(self) -> int:
        return 6


def test_the_example_of_training_runs() -> None:
    flow = torch.utils.data.DataLoader(Scans(), batch_size=2, collate_fn=sparse_collate_fn)
    model = nn.Sequential(
        spnn.Conv3d(4, 16, 3),
        spnn.BatchNorm(16),
        spnn.ReLU(True),
        spnn.Conv3d(16, 16, 2, stride=2),
        spnn.BatchNorm(16),
        spnn.ReLU(True),
        spnn.Conv3d(16, 16, 2, stride=2, transposed=True),
        spnn.BatchNorm(16),
        spnn.ReLU(True),
        spnn.Conv3d(16, 2, 1),
    ).to("cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        for sample in flow:
            inputs, labels = sample["input"].to(device="cpu"), sample["label"].to(device="cpu")
            assert sample["number"].shape == (2, 1) and len(sample["name"]) == 2
            loss = F.cross_entropy(model(inputs).feats, labels.feats)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert max(losses[-3:]) < 0.5 * losses[0]


@pytest.mark.parametrize("name", ["SparseResNet21D", "SparseResUNet42"])
def test_the_backbones_run(name: str) -> None:
    model = getattr(torchsparse.backbones, name)(in_channels=4, width_multiplier=0.25).eval()
    with torch.no_grad():
        outputs = model(cloud())
    strides = [output.s[0] for output in outputs]
    assert strides == ([1, 2, 4, 8, 8] if name == "SparseResNet21D" else [1, 2, 4, 8, 16, 8, 4, 2, 1])
    assert all(output.feats.isfinite().all() for output in outputs)


def test_voxels_are_those_of_their_points() -> None:
    points = np.random.default_rng(0).uniform(-3, 3, (400, 3))
    voxels, index, inverse = sparse_quantize(points, (0.5, 1, 2.5), return_index=True, return_inverse=True)
    cells = np.floor(points / (0.5, 1, 2.5)).astype(np.int32)
    assert voxels.dtype == np.int32 and (voxels[inverse] == cells).all() and (cells[index] == voxels).all()
    assert [tuple(v) for v in voxels] == sorted({tuple(c) for c in cells})
    assert (sparse_quantize(points, (0.5, 1, 2.5)) == voxels).all()
    far = np.array([[0.0, 0, 0], [1e9, -1e9, 2e9], [0.2, 0, 0]])  # whose extents no 64 bits can number
    assert sparse_quantize(far, return_inverse=True)[1].tolist() == [0, 1, 0]
    assert sparse_quantize(np.zeros((0, 3))).shape == (0, 3)


def test_a_batch_has_its_numbers_first() -> None:
    parts = [SparseTensor(np.ones((n, 2), np.float32) * n, np.arange(3 * n).reshape(n, 3)) for n in (2, 3)]
    batch = sparse_collate(parts)
    assert batch.coords.dtype == torch.int32 and batch.coords[:, 0].tolist() == [0, 0, 1, 1, 1]
    assert (batch.coords[2:, 1:] == torch.arange(9).view(3, 3)).all() and batch.F[:, 0].tolist() == [2, 2, 3, 3, 3]
    assert sparse_collate_fn([{"a": {"x": part}} for part in parts])["a"]["x"].C.equal(batch.C)
    assert sparse_collate_fn([1, 2]) == [1, 2]


def test_functions_compute_what_modules_do() -> None:
    x, layer, down = cloud(), spnn.Conv3d(4, 6, 3, bias=True), spnn.Conv3d(4, 6, 2, stride=2)
    with torch.no_grad():
        assert spf.conv3d(x, layer.kernel, 3, layer.bias).F.equal(layer(x).F)
        found = spf.conv3d(x, down.kernel, kernel_size=2, stride=2)
        assert found.F.equal(down(x).F) and found.s == (2, 2, 2)
        for function, expected in ((spf.relu, F.relu), (spf.silu, F.silu), (lambda t: fapply(t, torch.exp), torch.exp)):
            assert function(x.with_feats(x.F.clone())).F.equal(expected(x.F))
        assert spf.leaky_relu(x, inplace=False).F.equal(F.leaky_relu(x.F, 0.1))


def test_instance_norm_is_that_of_each_grid() -> None:
    x, norm = cloud(channels=5), spnn.InstanceNorm(5, affine=True)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    found = norm(x).F
    for grid in (0, 1):
        rows = x.C[:, 0] == grid
        close(found[rows].detach(), nn.InstanceNorm1d.forward(norm, x.F[rows].T[None])[0].T.detach())


@pytest.mark.parametrize("known", [True, False])
def test_pooling_goes_over_each_grid(known: bool) -> None:
    given = cloud(grids=3)
    x = SparseTensor(given.F, given.C, spatial_range=given.spatial_range if known else None)
    rows = [x.F[x.C[:, 0] == grid] for grid in range(3)]
    close(spnn.GlobalAvgPool()(x), torch.stack([each.mean(0) for each in rows]))
    close(spnn.GlobalMaxPool()(x), torch.stack([each.amax(0) for each in rows]))
    none = SparseTensor(torch.empty(0, 4), torch.empty(0, 4, dtype=torch.int32))
    assert spf.global_max_pool(none).shape == (0, 4)


class Classifier(nn.Module):
    """Takes a SparseTensor, as models of TorchSparse do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(spnn.Conv3d(4, 8, 3), spnn.InstanceNorm(8), spnn.ReLU(True), spnn.Conv3d(8, 8, 2, stride=2))
        self.pool, self.head = spnn.GlobalAvgPool(), nn.Linear(8, 3)

    def forward(self, x: SparseTensor) -> Tensor:
        return self.head(self.pool(self.stem(x)))


def test_a_model_that_takes_sparse_tensors_is_one_graph() -> None:
    model = Classifier()
    compiled = torch.compile(model, backend="sparse", fullgraph=True, options={"dense": "eager"})
    for count in (300, 280):
        x = cloud(count)
        again = SparseTensor(x.F, x.C, spatial_range=x.spatial_range)
        found, expected = (torch.autograd.grad(f.square().sum(), list(model.parameters())) for f in (compiled(x), model(again)))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert not torch._dynamo.utils.counters["graph_break"]


def test_points_are_interpolated_between_voxels() -> None:
    """Against torch.nn.functional.grid_sample on the full grid."""
    shape = (5, 4, 6)
    coords = torch.cat([torch.zeros(120, 1, dtype=torch.int32), torch.cartesian_prod(*map(torch.arange, shape)).int()], 1)
    feats = torch.randn(120, 3, dtype=torch.float64)
    points = torch.rand(50, 3, dtype=torch.float64) * (torch.tensor(shape) - 1.0)
    corners = torch.cat([torch.zeros(50, 1, dtype=torch.int32), points.floor().int()], 1)
    query = spf.sphashquery(spf.sphash(corners, get_kernel_offsets(2)), spf.sphash(coords))
    found = spf.spdevoxelize(feats, query.T, spf.calc_ti_weights(points, query).T)
    grid = feats.T.reshape(1, 3, *shape)
    place = (points / (torch.tensor(shape) - 1.0) * 2 - 1).flip(1).view(1, 50, 1, 1, 3)
    torch.testing.assert_close(found, F.grid_sample(grid, place, align_corners=True)[0, :, :, 0, 0].T, rtol=0, atol=1e-6)


def test_voxels_are_means_of_their_points() -> None:
    points = torch.randint(0, 3, (60, 4), dtype=torch.int32)
    hashes, feats = spf.sphash(points), torch.randn(60, 2, requires_grad=True)
    assert (hashes >= 0).all()
    voxels = hashes.unique()
    assert len(voxels) == len(points.unique(dim=0))
    where = spf.sphashquery(hashes, voxels)
    counts = spf.spcount(where, len(voxels))
    found = spf.spvoxelize(feats, where, counts)
    expected = torch.stack([feats[where == number].mean(0) for number in range(len(voxels))])
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    torch.testing.assert_close(feats.grad, (1 / counts[where].float())[:, None].expand(-1, 2))
    assert spf.sphashquery(torch.tensor([1, 2]), torch.tensor([2])).tolist() == [-1, 0]
    assert spf.sphashquery(torch.tensor([1]), torch.empty(0, dtype=torch.int64)).tolist() == [-1]


def test_settings_of_kernels_are_taken() -> None:
    spf.set_conv_mode(2)
    spf.set_kmap_mode("hashmap")
    spf.set_downsample_mode("spconv")
    config = spf.conv_config.get_default_conv_config(conv_mode=spf.get_conv_mode())
    config.kmap_mode = "hashmap"
    spf.conv_config.set_global_conv_config(config)
    assert spf.conv_config.get_global_conv_config() is config
    assert (spf.get_conv_mode(), spf.get_kmap_mode(), spf.get_downsample_mode()) == (2, "hashmap", "spconv")
    spf.conv_config.clear_global_conv_config()


def test_what_does_not_fit_is_refused() -> None:
    x = cloud()
    single = SparseTensor(x.F, x.C[:, 1:])
    wrong = [
        (lambda: spnn.Conv3d(4, 4, 3)(single), r"without the number in the batch.*sparse_collate"),
        (lambda: spnn.Conv3d(4, 4, 3)(SparseTensor(x.C, x.C)), "features are torch.int32"),
        (lambda: sparse_collate([x]), r"coords are \[300, 4\], must be \[N, 3\]"),
        (lambda: sparse_collate([single, SparseTensor(x.F, x.C[:, 1:], 2)]), "strides are"),
        (lambda: sparse_quantize(np.full((2, 3), np.nan)), "point 0 is .* leave out NaN"),
        (lambda: sparse_quantize(np.zeros((2, 3)), 0), "voxel_size is 0, must be 3 positive numbers or one"),
        (lambda: sparse_quantize(np.zeros(3)), "coords have 1 dimensions"),
        (lambda: spf.set_downsample_mode("minkowski"), "must be 'spconv'"),
        (lambda: spf.spdevoxelize(x.F, x.C[:, 0], x.F), "spdevoxelize: coords are"),
    ]
    for call, message in wrong:
        with pytest.raises(gossamer.GossamerError, match=message):
            call()
