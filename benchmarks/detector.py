"""A small detector in the manner of YOLOv5: blocks named as there, with batch norms, SiLU, concatenations and an upsampling."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Conv(nn.Module):
    """A convolution, its batch norm, SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, bias=False)
        self.norm, self.act = nn.BatchNorm2d(outputs), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.norm(self.conv(x)))
        return y


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = Conv(width, width), Conv(width, width, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.two(self.one(x))
        return y


class C3(nn.Module):
    """Half of the channels through a bottleneck, beside the other half."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        half = outputs // 2
        self.one, self.two, self.three = Conv(inputs, half), Conv(inputs, half), Conv(outputs, outputs)
        self.inner = Bottleneck(half)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.three(torch.cat((self.inner(self.one(x)), self.two(x)), 1))
        return y


class SPPF(nn.Module):
    """Maxima of growing windows side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two, self.pool = Conv(width, width // 2), Conv(2 * width, width), nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.one(x)]
        for _ in range(3):
            found.append(self.pool(found[-1]))
        y: Tensor = self.two(torch.cat(found, 1))
        return y


class Detector(nn.Module):
    """Images [batch, 3, 16 h, 16 w] → 85 numbers for each place [batch, 85, 2 h, 2 w]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(Conv(3, 32, 6, 2), Conv(32, 64, 3, 2), C3(64, 64), Conv(64, 128, 3, 2), C3(128, 128))
        self.deep = nn.Sequential(Conv(128, 256, 3, 2), C3(256, 256), SPPF(256), Conv(256, 128))
        self.up, self.neck, self.head = nn.Upsample(scale_factor=2.0), C3(256, 128), nn.Conv2d(128, 85, 1)

    def forward(self, images: Tensor) -> Tensor:
        skipped = self.stem(images)
        scores: Tensor = self.head(self.neck(torch.cat((self.up(self.deep(skipped)), skipped), 1)))
        return scores
