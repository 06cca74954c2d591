"""`SparseConvTensor`: coordinates with features, the inputs and outputs of convolutions of points."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import index
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.errors import GossamerError
from gossamer.runtime.elements import FLOATS
from gossamer.sparsity.nn.convolve import coarse_sites
from gossamer.sparsity.nn.windows import Sizes, Window


@dataclass(frozen=True)
class Level:
    """Sites, and the windows that lead to them from the sites of the network's input.

    indices  int32 [N, 1 + D]
    root     the indices of the network's input, whose grid has `root_shape`
    path     the numbers of the windows, one after the other (`Window.numbers`)
    """

    indices: Tensor
    shape: Sizes
    batch: int
    root: Tensor
    root_shape: Sizes
    path: Sizes

    @property
    def where(self) -> tuple[Tensor, Sizes, int, Sizes]:
        """The arguments of operations that identify the level."""
        return self.root, self.root_shape, self.batch, self.path


class SparseConvTensor:
    """Features at the sites of a batch of grids, with spconv's names.

    features       [N, C], float32, float64, bfloat16 or float16
    indices        int32 [N, 1 + D]: the number in the batch, then the coordinates; no row may occur twice
    spatial_shape  the D sizes of a grid, D from 1 to 4
    batch_size     the number of grids

    GossamerError if types or shapes do not fit. The first convolution raises it for rows outside of the grids, and for rows
    that occur twice. Other indices may be assigned, as with spconv: their sites are like those of a new tensor.
    """

    def __init__(self, features: Tensor, indices: Tensor, spatial_shape: Sequence[int], batch_size: int) -> None:
        shape = tuple(_count("spatial_shape", size) for size in spatial_shape)
        _check(features, indices, shape)
        batch = _count("batch_size", batch_size)
        self.features = features
        self.level = Level(indices, shape, batch, indices, shape, ())
        self.passed: dict[str, Level] = {}
        """The input levels of convolutions with an indice_key, by the key."""
        self.coarse: dict[Sizes, Tensor] = {}
        """Indices of coarser levels by path, shared by all convolutions that lead there."""

    @classmethod
    def from_dense(cls, x: Tensor) -> "SparseConvTensor":
        """Returns the sites of a dense tensor [batch, *spatial_shape, C] at which a feature is not 0. Gradients flow to x."""
        if not isinstance(x, Tensor) or x.dim() < 3:
            given = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise GossamerError(f"x is {given}, must be a tensor [batch, *spatial_shape, C]")
        indices = (x != 0).any(-1).nonzero()
        return cls(x[indices.unbind(1)], indices.int(), x.shape[1:-1], x.shape[0])

    @property
    def indices(self) -> Tensor:
        """The indices of the sites, int32 [N, 1 + D]."""
        return self.level.indices

    @indices.setter
    def indices(self, indices: Tensor) -> None:
        other = SparseConvTensor(self.features, indices, self.level.shape, self.level.batch)
        self.level, self.passed, self.coarse = other.level, other.passed, other.coarse

    @property
    def spatial_shape(self) -> list[int]:
        """The sizes of a grid."""
        return list(self.level.shape)

    @property
    def batch_size(self) -> int:
        """The number of grids."""
        return self.level.batch

    def replace_feature(self, feature: Tensor) -> "SparseConvTensor":
        """Returns other features [N, any C] at the same sites."""
        return self.at(feature, self.level)

    def at(self, features: Tensor, level: Level) -> "SparseConvTensor":
        """Returns features at another level of the same network."""
        made = object.__new__(SparseConvTensor)
        made.features, made.level, made.passed, made.coarse = features, level, self.passed, self.coarse
        return made

    def led(self, window: Window) -> Level:
        """Returns the level to which a window leads from this one."""
        level = self.level
        shape = window.shape_of(level.shape)
        if min(shape) < 1:
            raise GossamerError(
                f"a window of {list(window.kernel)} does not fit in a grid of {list(level.shape)}: use padding, "
                "a smaller kernel_size, or fewer strided layers"
            )
        if max(shape) > 2**31:
            raise GossamerError(
                f"a convolution leads to a grid of {list(shape)}, which is too large for int32 coordinates: "
                "use a smaller stride or grid"
            )
        path = (*level.path, *window.numbers)
        if path not in self.coarse:
            self.coarse[path] = coarse_sites(level.root, level.root_shape, level.batch, path)
        return replace(level, indices=self.coarse[path], shape=shape, path=path)

    def dense(self, channels_first: bool = True) -> Tensor:
        """Returns the features as a dense tensor [batch, C, *spatial_shape], or with C last; zeros elsewhere."""
        sizes = self.batch_size, *self.level.shape
        place = torch.zeros_like(self.indices[:, 0], dtype=torch.int64)
        for column, size in enumerate(sizes):
            place = place * size + self.indices[:, column]
        channels = self.features.shape[1]
        flat = self.features.new_zeros(prod(sizes), channels).index_copy(0, place, self.features)
        made = flat.view(*sizes, channels)
        return made.movedim(-1, 1).contiguous() if channels_first else made


def _count(name: str, value: Any) -> int:
    """Returns a whole number as an int, also one of NumPy or a tensor. GossamerError for other values."""
    try:
        counted: Any = value if isinstance(value, (int, torch.SymInt)) else index(value)
    except TypeError as error:
        raise GossamerError(f"{name}: {value!r} is not a whole number") from error
    if isinstance(counted, int) and counted < 0:
        raise GossamerError(f"{name}: {counted} is negative")
    found: int = counted
    return found


def _check(features: Tensor, indices: Tensor, shape: Sizes) -> None:
    for name, given in (("features", features), ("indices", indices)):
        if not isinstance(given, Tensor):
            raise GossamerError(f"{name} are {type(given).__name__}, must be a tensor")
    if indices.dim() != 2 or indices.dtype != torch.int32:
        raise GossamerError(f"indices are {indices.dtype} {list(indices.shape)}, must be torch.int32 [N, 1 + dimensions]")
    if not 1 <= len(shape) <= 4 or indices.shape[1] != 1 + len(shape):
        raise GossamerError(
            f"spatial_shape {list(shape)} has {len(shape)} dimensions, must have 1 to 4, and indices a column more for the "
            f"number in the batch: they have {indices.shape[1]}"
        )
    if features.dim() != 2 or features.dtype not in FLOATS:
        raise GossamerError(f"features are {features.dtype} {list(features.shape)}, must be floats [N, channels]")
    if features.shape[0] != indices.shape[0]:
        raise GossamerError(f"there are {features.shape[0]} rows of features and {indices.shape[0]} of indices")
    if features.device != indices.device or features.device.type not in ("cpu", "cuda"):
        raise GossamerError(
            f"features are on {features.device}, indices on {indices.device}: convolutions of points run on one CPU or GPU"
        )
