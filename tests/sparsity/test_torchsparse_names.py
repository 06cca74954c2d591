"""TorchSparse's modules against dense convolutions in float64, eager, compiled, in training and under autocast."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
import gossamer.torchsparse as torchsparse
from gossamer.sparsity.nn import sparse_conv_tensor
from tests.sparsity.clouds import SHAPE, at, close, cloud, dense

spnn = torchsparse.nn
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def as_torch(layer: nn.Module, size: tuple[int, ...]) -> Tensor:
    """A kernel as conv3d takes it, by TorchSparse's order of taps: x first for odd numbers of them, z first for even ones."""
    kernel = layer.kernel.detach().double()
    if kernel.dim() == 2:
        kernel = kernel[None]
    order = "zyxio" if len(kernel) % 2 else "xyzio"
    spread = kernel.view(*(size[::-1] if len(kernel) % 2 else size), *kernel.shape[1:])
    return torch.einsum(f"{order}->oixyz", spread)


@pytest.mark.parametrize("size", [(1, 1, 1), (3, 3, 3), (5, 1, 3)])
def test_a_stride_of_one_stays_on_its_sites(size: tuple[int, ...]) -> None:
    x, layer = cloud(), spnn.Conv3d(4, 6, size, bias=True)
    with torch.no_grad():
        y = layer(x)
        grid = dense(x.F, x.C, 2, SHAPE)
        expected = F.conv3d(grid, as_torch(layer, size), layer.bias.double(), padding=tuple(k // 2 for k in size))
        close(y.feats, at(expected, x.coords))
        assert y.s == (1, 1, 1) and y.C is x.C
        close(y.dense(), dense(y.F, y.C, 2, SHAPE))
        back = spnn.Conv3d(6, 5, size, transposed=True)  # TorchSparse transposes the map from each site to its window
        kernel, around = as_torch(back, size).transpose(0, 1), tuple(k // 2 for k in size)
        close(back(y).feats, at(F.conv_transpose3d(dense(y.F, y.C, 2, SHAPE), kernel, padding=around), x.coords))
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).feats.dtype == torch.bfloat16


@pytest.mark.parametrize(("size", "stride"), [((2, 2, 2), 2), ((3, 3, 3), 2), ((1, 1, 1), 2), ((3, 1, 2), (3, 1, 2))])
def test_strides_lead_to_coarser_coordinates_and_back(size: tuple[int, ...], stride: int | tuple[int, ...]) -> None:
    x, down = cloud(), spnn.Conv3d(4, 6, size, stride)
    up = spnn.Conv3d(6, 5, size, stride, transposed=True)
    strides = (stride,) * 3 if isinstance(stride, int) else stride
    with torch.no_grad():
        y = down(x)
        assert y.s == strides and y.spatial_range == (2, *(-(-n // s) for n, s in zip(SHAPE, strides, strict=True)))
        margin = [m for k, s in zip(size[::-1], strides[::-1], strict=True) for m in ((k - 1) // 2, s + k)]
        around = F.pad(dense(x.F, x.C, 2, SHAPE), margin)
        close(y.F, at(F.conv3d(around, as_torch(down, size), stride=strides), y.C))
        z = up(y)
        assert z.C is x.C and z.s == (1, 1, 1) and z.spatial_range == x.spatial_range
        coarse = dense(y.F, y.C, 2, tuple(n + 2 for n in SHAPE))
        back = F.conv_transpose3d(coarse, as_torch(up, size).transpose(0, 1), stride=strides)
        first = [(k - 1) // 2 for k in size]
        close(z.F, at(back[:, :, first[0] :, first[1] :, first[2] :], x.C))


class Block(nn.Module):
    def __init__(self, channels: int, made: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            spnn.Conv3d(channels, made, 3),
            spnn.BatchNorm(made),
            spnn.ReLU(True),
            spnn.Conv3d(made, made, 3),
            spnn.BatchNorm(made),
        )
        self.shortcut = nn.Sequential(spnn.Conv3d(channels, made, 1), spnn.BatchNorm(made))
        self.relu = spnn.ReLU(True)

    def forward(self, x: torchsparse.SparseTensor) -> torchsparse.SparseTensor:
        return self.relu(self.main(x) + self.shortcut(x))


class Unet(nn.Module):
    """As models of TorchSparse are written."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(spnn.Conv3d(4, 8, 3), spnn.BatchNorm(8), spnn.LeakyReLU(0.1))
        self.down = nn.Sequential(spnn.Conv3d(8, 12, 2, stride=2), spnn.BatchNorm(12), spnn.SiLU())
        self.middle = Block(12, 16)
        self.up = spnn.Conv3d(16, 8, 2, stride=2, transposed=True)
        self.end = nn.Sequential(Block(16, 8), spnn.GroupNorm(2, 8))

    def forward(self, feats: Tensor, coords: Tensor) -> Tensor:
        x = self.stem(torchsparse.SparseTensor(feats, coords))
        y = self.up(self.middle(self.down(x)))
        return self.end(torchsparse.cat([y, x])).F


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_network_is_one_graph_and_trains(backend: str) -> None:
    network = Unet()
    compiled = torch.compile(network, backend="sparse", fullgraph=True, options={"dense": backend})
    for count in (400, 333):
        x = cloud(count)
        for each in (x.F, x.C):
            torch._dynamo.mark_dynamic(each, 0)
        found, expected = (
            torch.autograd.grad(each(x.F, x.C).square().sum(), list(network.parameters())) for each in (compiled, network)
        )
        wide = Unet().double()
        wide.load_state_dict(network.state_dict())
        reference = torch.autograd.grad(wide(x.F.double(), x.C).square().sum(), list(wide.parameters()))
        for a, b, c in zip(found, expected, reference, strict=True):
            scale = max(1.0, float(c.abs().max()))
            torch.testing.assert_close(a.double() / scale, c / scale, rtol=0, atol=2e-3)
            torch.testing.assert_close(b.double() / scale, c / scale, rtol=0, atol=2e-3)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_group_norm_is_that_of_each_grid() -> None:
    x, norm = cloud(), spnn.GroupNorm(2, 4)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    found = norm(x).F
    for grid in (0, 1):
        rows = x.C[:, 0] == grid
        close(found[rows].detach(), nn.GroupNorm.forward(norm, x.F[rows].T[None])[0].T.detach())


def test_features_move_with_their_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    given = cloud()
    with monkeypatch.context() as patch:
        patch.setattr(sparse_conv_tensor, "_check", lambda *_: None)  # which refuses other devices than CPUs and GPUs
        there = given.cuda("meta").half()
    assert (there.feats.is_meta, there.coords.is_meta, there.feats.dtype) == (True, True, torch.float16)
    assert there.spatial_range == given.spatial_range
    assert given.cpu().to(torch.float64).coords is given.coords


def test_what_does_not_fit_is_refused() -> None:
    x = cloud()
    wrong = [
        (lambda: spnn.Conv3d(4, 4, 2), "must be odd to have a centre"),
        (lambda: spnn.Conv3d(4, 4, 3, 2, padding=2), r"padding is 2, must be 0 or \[1, 1, 1\]"),
        (lambda: spnn.Conv3d(4, 4, 3, 2, transposed=True, generative=True), "generative"),
        (lambda: spnn.Conv3d(4, 4, 2, 2, transposed=True)(x), "no convolution with kernel_size"),
        (lambda: spnn.Conv3d(3, 4, 3)(x), "4 channels come in, the weight takes 3"),
        (lambda: torchsparse.SparseTensor(x.F, x.C).dense(), "spatial_range is None"),
        (lambda: torchsparse.SparseTensor(x.F, x.C, stride=(1, 2)), "must be a number or three"),
        (lambda: spnn.Conv3d(4, 4, 3)(torchsparse.SparseTensor(x.F, x.C - 1)), "rows are outside"),
    ]
    for call, message in wrong:
        with pytest.raises(gossamer.GossamerError, match=message):
            call()
