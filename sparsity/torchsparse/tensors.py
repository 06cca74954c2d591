"""TorchSparse's SparseTensor: features at int32 coordinates, whose first column is the number in the batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.errors import GossamerError
from gossamer.sparsity.nn.layers import Size
from gossamer.sparsity.nn.sparse_conv_tensor import SparseConvTensor
from gossamer.sparsity.nn.windows import Sizes

GRIDS = 1 << 12
"""The assumed number of grids in a batch, because TorchSparse's users do not give it."""
_GRID = 1 << 16  # the assumed size of a grid in each dimension


class SparseTensor:
    """Features at places of a batch of grids, with TorchSparse's names.

    feats          [N, C], float32, float64, bfloat16 or float16; a tensor or an array of NumPy
    coords         int32 [N, 4], the number in the batch first; no row twice, none negative or above 65535
    stride         the distance of places in units of the first tensor's grid
    spatial_range  (batch, x, y, z), which `dense` needs

    It can also have labels and points of one grid (integers as features, coordinates [N, 3]), for `sparse_collate`. The first
    convolution checks types and shapes.
    """

    def __init__(self, feats: Any, coords: Any, stride: Size = 1, spatial_range: Sequence[int] | None = None) -> None:
        self._feats, self._coords = torch.as_tensor(feats), torch.as_tensor(coords)
        self._sites: SparseConvTensor | None = None
        self.stride = three("stride", stride)
        self.ranges: dict[Sizes, Sizes] = {} if spatial_range is None else {self.stride: tuple(spatial_range)}

    @property
    def sites(self) -> SparseConvTensor:
        """The tensor for layers of `gossamer.nn`. GossamerError if types or shapes do not fit."""
        if self._sites is None:
            if self._coords.dim() == 2 and self._coords.shape[1] == 3:
                raise GossamerError(
                    "SparseTensor: coords are [N, 3], without the number in the batch. utils.collate.sparse_collate([x, ...]) "
                    "adds it as the first column"
                )
            self._sites = SparseConvTensor(self._feats, self._coords, [_GRID] * 3, GRIDS)
        return self._sites

    @property
    def feats(self) -> Tensor:
        """The features, [N, C]."""
        return self._feats

    @feats.setter
    def feats(self, feats: Any) -> None:
        self._feats = torch.as_tensor(feats)
        self._sites = None if self._sites is None else self._sites.replace_feature(self._feats)

    @property
    def coords(self) -> Tensor:
        """The coordinates, int32 [N, 4]."""
        return self._coords

    @coords.setter
    def coords(self, coords: Any) -> None:
        self._coords, self._sites = torch.as_tensor(coords), None

    F, C = feats, coords

    @property
    def s(self) -> Sizes:
        """The stride, three numbers."""
        return self.stride

    @s.setter
    def s(self, stride: Size) -> None:
        self.stride = three("stride", stride)

    @property
    def spatial_range(self) -> Sizes | None:
        """(batch, x, y, z) at its stride, None if it was not given."""
        return self.ranges.get(self.stride)

    def at(self, sites: SparseConvTensor, stride: Sizes) -> "SparseTensor":
        """Returns a tensor at other sites of the same network, with another stride. Layers call it."""
        made = object.__new__(SparseTensor)
        made._feats, made._coords, made._sites = sites.features, sites.indices, sites
        made.stride, made.ranges = stride, self.ranges
        return made

    def with_feats(self, feats: Tensor) -> "SparseTensor":
        """Returns other features at the same places."""
        made = object.__new__(SparseTensor)
        made._feats, made._coords, made.stride, made.ranges = feats, self._coords, self.stride, self.ranges
        made._sites = None if self._sites is None else self._sites.replace_feature(feats)
        return made

    def __add__(self, other: "SparseTensor") -> "SparseTensor":
        return self.with_feats(self.feats + other.feats)

    def to(self, *arguments: Any, **named: Any) -> "SparseTensor":
        """Converts the features by `torch.Tensor.to`. To another device it also moves the coordinates, but no earlier sites."""
        feats = self.feats.to(*arguments, **named)
        if feats.device == self.coords.device:
            return self.with_feats(feats)
        moved = SparseTensor(feats, self.coords.to(feats.device), self.stride)
        moved.ranges = self.ranges
        return moved

    def half(self) -> "SparseTensor":
        """Returns the tensor in float16."""
        return self.to(torch.float16)

    def cpu(self) -> "SparseTensor":
        """Returns the tensor on the CPU."""
        return self.to("cpu")

    def cuda(self, device: Any = "cuda") -> "SparseTensor":
        """Returns the tensor on a GPU."""
        return self.to(device)

    def detach(self) -> "SparseTensor":
        """Returns the tensor without the autograd graph of the features."""
        return self.with_feats(self.feats.detach())

    def dense(self) -> Tensor:
        """Returns a dense tensor [batch, C, x, y, z], zeros elsewhere. GossamerError without a spatial_range."""
        if self.spatial_range is None:
            raise GossamerError("SparseTensor.dense: spatial_range is None, give it (batch, x, y, z) when it is made")
        batch, *sizes = self.spatial_range
        return SparseConvTensor(self.feats, self.coords, sizes, batch).dense()


def cat(inputs: Sequence[SparseTensor]) -> SparseTensor:
    """Concatenates the features of tensors at the same places."""
    return inputs[0].with_feats(torch.cat([each.feats for each in inputs], 1))


def three(name: str, value: Any) -> Sizes:
    """Returns a number, or three numbers, as three. GossamerError for other values."""
    sizes = (value,) * 3 if isinstance(value, int) else tuple(value)
    if len(sizes) != 3:
        raise GossamerError(f"{name} is {value}, must be a number or three")
    return sizes
