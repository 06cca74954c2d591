"""Dense matrices of entries by rows and entries of dense matrices: a masked parameter's gradient, its values, and new ones."""

import torch
from torch import Tensor

from gossamer.dialects.token_tiles import CollectCountedOp, CollectOp, PutOp, SpreadOp
from gossamer.runtime.memory.warm_memory import empty
from gossamer.sparsity.compiler.op_kernels import run


def spread(positions: Tensor, coordinates: Tensor, values: Tensor, columns: int) -> Tensor:
    """dense[r, c] = values[p] for the entries p = (r, c) of a matrix in CSR, 0 elsewhere, on CPUs.

    positions, coordinates  of int32 or int64, checked by the caller
    values                  [entries], f32 or f64, contiguous
    returns                 [rows, columns], in memory that is mapped: fresh pages would take twice as long
    """
    rows = positions.shape[0] - 1
    dense = empty([rows, columns], values.dtype)
    work = empty([torch.get_num_threads(), columns], values.dtype)
    run(SpreadOp, [positions, coordinates, values], [dense, work])
    return dense


def collect(positions: Tensor, coordinates: Tensor, dense: Tensor) -> Tensor:
    """values[p] = dense[r, c] for the entries p = (r, c) of a matrix in CSR, on CPUs.

    positions, coordinates  of int32 or int64, checked by the caller
    dense                   [rows, columns], of floats, contiguous
    """
    values = empty([coordinates.shape[0]], dense.dtype)
    run(CollectOp, [positions, coordinates, dense], [values])
    return values


def collect_counted(positions: Tensor, coordinates: Tensor, dense: Tensor) -> tuple[Tensor, int]:
    """As `collect`, of f32 or f64; and how many elements of the matrix are neither entries nor 0."""
    values, others = empty([coordinates.shape[0]], dense.dtype), torch.zeros(torch.get_num_threads(), dtype=torch.int64)
    run(CollectCountedOp, [positions, coordinates, dense], [values, others])
    return values, int(others.sum())


def put(positions: Tensor, coordinates: Tensor, values: Tensor, dense: Tensor) -> None:
    """dense[r, c] = values[p] for the entries p = (r, c) of a matrix in CSR, on CPUs. The other elements stay.

    positions, coordinates  of int32 or int64, checked by the caller
    values, dense           [entries] and [rows, columns] of f32 or f64, contiguous
    """
    run(PutOp, [positions, coordinates, values], [dense])
    torch.autograd.graph.increment_version(dense)
