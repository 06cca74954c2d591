"""TorchSparse's functions that make voxels of points, and a batch of several SparseTensors."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from gossamer.dialects.errors import GossamerError, OptionError
from gossamer.sparsity.torchsparse.tensors import SparseTensor

_LARGEST = 1 << 31


def sparse_quantize(
    coords: ArrayLike,
    voxel_size: float | Sequence[float] = 1,
    *,
    return_index: bool = False,
    return_inverse: bool = False,
) -> Any:
    """Returns the voxels of points [N, D], each once and in order: int32 [M, D].

    voxel_size      a size, or one for each dimension
    return_index    whether to also return the first point of each voxel, [M]
    return_inverse  whether to also return the voxel of each point, [N]

    The result is a list if it has more than the voxels.
    """
    points, size = np.asarray(coords), np.asarray(voxel_size, dtype=np.float64)
    if points.ndim != 2:
        raise OptionError(f"sparse_quantize: coords have {points.ndim} dimensions, must be [points, coordinates]")
    if size.ndim > 1 or size.size not in (1, points.shape[1]) or not (size > 0).all():
        raise OptionError(f"sparse_quantize: voxel_size is {voxel_size!r}, must be {points.shape[1]} positive numbers or one")
    cells = np.floor(points / size)
    if not (np.abs(cells) < _LARGEST).all():
        wrong = int(np.nonzero(~(np.abs(cells) < _LARGEST).all(1))[0][0])
        raise OptionError(
            f"sparse_quantize: point {wrong} is {points[wrong].tolist()}, in no voxel that int32 can number: leave out NaN and "
            "infinity, or make voxel_size larger"
        )
    cells = cells.astype(np.int32)
    index, inverse = _first_of_each(cells)
    found = [cells[index], *([index] if return_index else []), *([inverse] if return_inverse else [])]
    return found[0] if len(found) == 1 else found


def _first_of_each(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first row of each distinct content, in the order of the contents, and the number of each row's content."""
    if not len(cells):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    shifted = cells.astype(np.int64) - cells.min(0)
    extents = [int(extent) + 1 for extent in shifted.max(0)]
    keys = np.ravel_multi_index(tuple(shifted.T), extents) if prod(extents) < 1 << 62 else shifted
    _, index, inverse = np.unique(keys, axis=None if keys.ndim == 1 else 0, return_index=True, return_inverse=True)
    return index, inverse.reshape(-1)


def sparse_collate(inputs: Sequence[SparseTensor]) -> SparseTensor:
    """Makes a batch of tensors of one grid each: coords [N, 3] become int32 [all N, 4], with the number in the batch first."""
    for x in inputs:
        if x.coords.dim() != 2 or x.coords.shape[1] != 3:
            raise GossamerError(f"sparse_collate: coords are {list(x.coords.shape)}, must be [N, 3], those of a single grid")
        if x.stride != inputs[0].stride:
            raise GossamerError(f"sparse_collate: strides are {inputs[0].stride} and {x.stride}, must be the same")
    coords = [torch.nn.functional.pad(x.coords.int(), (1, 0), value=number) for number, x in enumerate(inputs)]
    return SparseTensor(torch.cat([x.feats for x in inputs]), torch.cat(coords), inputs[0].stride)


def sparse_collate_fn(inputs: Sequence[Any]) -> Any:
    """The `collate_fn` of a DataLoader whose samples are dictionaries.

    SparseTensors become a batch by `sparse_collate`, arrays and tensors are stacked, nested dictionaries are handled in the
    same way, and all other values become a list.
    """
    if not isinstance(inputs[0], dict):
        return inputs
    return {name: _collated([sample[name] for sample in inputs]) for name in inputs[0]}


def _collated(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return sparse_collate_fn(values)
    if isinstance(first, SparseTensor):
        return sparse_collate(values)
    if isinstance(first, np.ndarray | torch.Tensor):
        return torch.stack([torch.as_tensor(value) for value in values])
    return values
