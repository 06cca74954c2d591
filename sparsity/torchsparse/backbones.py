"""The networks of TorchSparse's examples, with its names of parameters."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from gossamer.sparsity.nn.layers import Size
from gossamer.sparsity.torchsparse.convolution import Conv3d
from gossamer.sparsity.torchsparse.layers import BatchNorm, ReLU
from gossamer.sparsity.torchsparse.tensors import SparseTensor, cat


class SparseConvBlock(nn.Sequential):
    """A convolution, a batch norm, and a ReLU."""

    transposed = False

    def __init__(self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1, dilation: int = 1) -> None:
        convolution = Conv3d(
            in_channels, out_channels, kernel_size, stride=stride, dilation=dilation, transposed=self.transposed
        )
        super().__init__(convolution, BatchNorm(out_channels), ReLU(True))


class SparseConvTransposeBlock(SparseConvBlock):
    """A SparseConvBlock whose convolution leads back to finer sites."""

    transposed = True


class SparseResBlock(nn.Module):
    """Two convolutions and a shortcut. The shortcut is a convolution of one tap if channels or sites change."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1, dilation: int = 1) -> None:
        super().__init__()
        self.main = nn.Sequential(
            Conv3d(in_channels, out_channels, kernel_size, stride=stride, dilation=dilation),
            BatchNorm(out_channels),
            ReLU(True),
            Conv3d(out_channels, out_channels, kernel_size, dilation=dilation),
            BatchNorm(out_channels),
        )
        strides = (stride,) if isinstance(stride, int) else tuple(stride)
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != out_channels or max(strides) > 1:
            self.shortcut = nn.Sequential(Conv3d(in_channels, out_channels, 1, stride=stride), BatchNorm(out_channels))
        self.relu = ReLU(True)

    def forward(self, x: SparseTensor) -> SparseTensor:
        y: SparseTensor = self.relu(self.main(x) + self.shortcut(x))
        return y


class SparseResNet(nn.ModuleList):
    """Stages of (number of blocks, channels, kernel size, stride). It returns the results of all stages."""

    def __init__(
        self, blocks: Sequence[tuple[int, int, Size, Size]], *, in_channels: int = 4, width_multiplier: float = 1.0
    ) -> None:
        super().__init__()
        for count, channels, kernel_size, stride in blocks:
            channels = int(channels * width_multiplier)
            first = SparseConvBlock(in_channels, channels, kernel_size, stride=stride)
            self.append(nn.Sequential(first, *(SparseResBlock(channels, channels, kernel_size) for _ in range(count - 1))))
            in_channels = channels

    def forward(self, x: SparseTensor) -> list[SparseTensor]:
        outputs = []
        for stage in self:
            x = stage(x)
            outputs.append(x)
        return outputs


class SparseResNet21D(SparseResNet):
    """Four stages of three blocks, and one block along y."""

    def __init__(self, **options: Any) -> None:
        stages: list[tuple[int, int, Size, Size]] = [
            (3, 16, 3, 1),
            (3, 32, 3, 2),
            (3, 64, 3, 2),
            (3, 128, 3, 2),
            (1, 128, (1, 3, 1), (1, 2, 1)),
        ]
        super().__init__(stages, **options)


class SparseResUNet(nn.Module):
    """A stem, four stages down and four up. It returns the results of all of them."""

    def __init__(
        self,
        stem_channels: int,
        encoder_channels: Sequence[int],
        decoder_channels: Sequence[int],
        *,
        in_channels: int = 4,
        width_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        n = [int(width_multiplier * channels) for channels in (stem_channels, *encoder_channels, *decoder_channels)]
        self.stem = nn.Sequential(
            Conv3d(in_channels, n[0], 3), BatchNorm(n[0]), ReLU(True), Conv3d(n[0], n[0], 3), BatchNorm(n[0]), ReLU(True)
        )
        self.encoders = nn.ModuleList(
            nn.Sequential(SparseConvBlock(n[k], n[k], 2, stride=2), *_two_blocks(n[k], n[k + 1])) for k in range(4)
        )
        self.decoders = nn.ModuleList(
            nn.ModuleDict(
                {
                    "upsample": SparseConvTransposeBlock(n[k + 4], n[k + 5], 2, stride=2),
                    "fuse": nn.Sequential(*_two_blocks(n[k + 5] + n[3 - k], n[k + 5])),
                }
            )
            for k in range(4)
        )

    def forward(self, x: SparseTensor) -> list[SparseTensor]:
        outputs = [self.stem(x)]
        for encoder in self.encoders:
            outputs.append(encoder(outputs[-1]))
        for decoder, skip in zip(self.decoders, outputs[-2::-1], strict=True):
            parts: Any = decoder
            outputs.append(parts["fuse"](cat([parts["upsample"](outputs[-1]), skip])))
        return outputs


class SparseResUNet42(SparseResUNet):
    """SparseResUNet with the channels of MinkUNet."""

    def __init__(self, **options: Any) -> None:
        super().__init__(32, [32, 64, 128, 256], [256, 128, 96, 96], **options)


def _two_blocks(in_channels: int, out_channels: int) -> tuple[SparseResBlock, SparseResBlock]:
    return SparseResBlock(in_channels, out_channels, 3), SparseResBlock(out_channels, out_channels, 3)
