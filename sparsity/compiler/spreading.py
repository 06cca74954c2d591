"""Moves values between entries in CSR and dense matrices, for masked parameters: gradients, values, and steps of Adam."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gossamer.dialects.kept_steps import StepKeptOp, StepMappedOp
from gossamer.dialects.row_maps import CollectMappedOp, PutMappedOp, SpreadMappedOp
from gossamer.dialects.token_tiles import CollectCountedOp, CollectOp, PutOp, SpreadOp
from gossamer.runtime.memory.warm_memory import empty
from gossamer.runtime.target import host
from gossamer.sparsity.compiler.op_kernels import run

_WORDS = {torch.float32: torch.int16, torch.float64: torch.int8}  # words of a map: a bit for each lane of 512 bits
_SPARSEST = 0.02  # share of entries; with fewer, many vectors have none


def map_of(kept: Tensor) -> Tensor | None:
    """Returns a bit for each element of a matrix of bools on the CPU: [rows, columns / 8] of uint8, the lowest bit first.

    The functions below take it in addition to the coordinates. Returns None if they are as fast without it.
    """
    if host().vector_bits < 512 or kept.shape[1] % 16 or int(kept.sum()) < _SPARSEST * kept.numel():
        return None
    return torch.from_numpy(np.packbits(kept.numpy(), axis=1, bitorder="little"))


def spread(positions: Tensor, coordinates: Tensor, values: Tensor, columns: int, map: Tensor | None = None) -> Tensor:
    """Returns dense[r, c] = values[p] for the entries p = (r, c) of a matrix in CSR, 0 elsewhere, on CPUs.

    positions, coordinates  of int32 or int64, checked by the caller
    values                  [entries], f32 or f64, contiguous
    map                     see `map_of`
    returns                 [rows, columns], in memory that is already mapped, because fresh pages would take twice as long
    """
    rows = positions.shape[0] - 1
    dense = empty([rows, columns], values.dtype)
    if map is not None:
        run(SpreadMappedOp, [positions, map.view(_WORDS[values.dtype]), values], [dense])
        return dense
    work = empty([torch.get_num_threads(), columns], values.dtype)
    run(SpreadOp, [positions, coordinates, values], [dense, work])
    return dense


def collect(positions: Tensor, coordinates: Tensor, dense: Tensor, map: Tensor | None = None) -> Tensor:
    """Returns values[p] = dense[r, c] for the entries p = (r, c) of a matrix in CSR, on CPUs.

    positions, coordinates  of int32 or int64, checked by the caller
    dense                   [rows, columns], of floats, contiguous
    map                     see `map_of`
    """
    if map is not None and dense.dtype in _WORDS:
        return collect_counted(positions, coordinates, dense, map)[0]
    values = empty([coordinates.shape[0]], dense.dtype)
    run(CollectOp, [positions, coordinates, dense], [values])
    return values


def collect_counted(positions: Tensor, coordinates: Tensor, dense: Tensor, map: Tensor | None = None) -> tuple[Tensor, int]:
    """Returns `collect` of f32 or f64, and how many elements of the matrix are neither entries nor 0."""
    values, others = empty([coordinates.shape[0]], dense.dtype), positions.new_zeros(torch.get_num_threads(), dtype=torch.int64)
    if map is not None:
        run(CollectMappedOp, [positions, map.view(_WORDS[dense.dtype]), dense], [values, others])
    else:
        run(CollectCountedOp, [positions, coordinates, dense], [values, others])
    return values, int(others.sum())


def put(positions: Tensor, coordinates: Tensor, values: Tensor, dense: Tensor, map: Tensor | None = None) -> None:
    """Writes dense[r, c] = values[p] for the entries p = (r, c) of a matrix in CSR, on CPUs. Other elements stay.

    positions, coordinates  of int32 or int64, checked by the caller
    values, dense           [entries] and [rows, columns] of f32 or f64, contiguous
    map                     see `map_of`
    """
    if map is not None:
        run(PutMappedOp, [positions, map.view(_WORDS[dense.dtype]), values], [dense])
    else:
        run(PutOp, [positions, coordinates, values], [dense])
    torch.autograd.graph.increment_version(dense)


def step(
    positions: Tensor,
    coordinates: Tensor,
    gradient: Tensor,
    rates: Sequence[float],
    stepped: tuple[Tensor, Tensor, Tensor],
    map: Tensor | None = None,
) -> None:
    """Does a step of Adam for the entries of a matrix in CSR, on CPUs; see `kernel.step_kept`.

    positions, coordinates  of int32 or int64, checked by the caller
    gradient                [entries]
    stepped                 the parameter [rows, columns], and the means of its gradients and of their squares, [entries] each
    map                     see `map_of`

    All tensors are of f32 or f64, and contiguous.
    """
    dtype, columns = gradient.dtype, stepped[0].shape[1]
    given = [gradient, gradient.new_tensor(rates, dtype=torch.float64)]
    made = [*stepped, empty([torch.get_num_threads(), columns], dtype)]
    if map is not None:
        run(StepMappedOp, [positions, map.view(_WORDS[dtype]), *given], made)
    else:
        run(StepKeptOp, [positions, coordinates, *given], made)
