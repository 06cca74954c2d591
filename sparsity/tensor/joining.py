"""Concatenates and stacks SparseTensors, and makes Kronecker products and diagonals of blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError
from gossamer.sparsity.operations.open_sizes import agree
from gossamer.sparsity.operations.sparse_results import sizes_stay_inside
from gossamer.sparsity.tensor.coordinate_list import CoordinateList, of_rank
from gossamer.sparsity.tensor.densify import densified
from gossamer.sparsity.tensor.extension import implements
from gossamer.sparsity.tensor.shapes import unsqueeze, within
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor


@implements(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenates tensors along a dimension. The result has the format of the first, or is dense if one of them is."""
    sparse = [tensor for tensor in tensors if isinstance(tensor, SparseTensor)]
    if len(sparse) < len(tensors):
        joined: Tensor = densified(torch.cat, (list(tensors), dim), {})
        return joined
    first = sparse[0]
    dim = within(dim, first.dim())
    shape, lists = list(first.shape), []
    shape[dim] = 0
    for tensor in sparse:
        _check_others(first, tensor, dim)
        listed = CoordinateList.of(tensor)
        at = [crd + shape[dim] if n == dim else crd for n, crd in enumerate(listed.at)]
        lists.append(CoordinateList(tuple(at), listed.values))
        shape[dim] += tensor.shape[dim]
    together = tuple(torch.cat(crds) for crds in zip(*(each.at for each in lists), strict=True))
    return CoordinateList(together, torch.cat([each.values for each in lists])).assembled(first.format, shape)


def _check_others(first: SparseTensor, tensor: SparseTensor, dim: int) -> None:
    """ArgumentError unless all other dimensions agree. A compiled graph checks open sizes when it runs."""
    pairs = [pair for n, pair in enumerate(zip(first.shape, tensor.shape, strict=False)) if n != dim]
    if first.dim() != tensor.dim() or not all(agree(*pair) for pair in pairs):
        raise ArgumentError(
            f"cat along dimension {dim} of {list(first.shape)} and {list(tensor.shape)}: other dimensions must be equal"
        )


@implements(torch.stack)
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Stacks tensors along a new dimension.

    COO stays COO, vectors become COO, and others CSF. The result is dense if one of them is.
    """
    sparse = [tensor for tensor in tensors if isinstance(tensor, SparseTensor)]
    if len(sparse) < len(tensors):
        stacked: Tensor = densified(torch.stack, (list(tensors), dim), {})
        return stacked
    dim = within(dim, tensors[0].dim() + 1)
    with sizes_stay_inside():
        thin = [unsqueeze(tensor, dim) for tensor in sparse]
    return cat(thin, dim)


@implements(torch.vstack)
def vstack(tensors: Sequence[Tensor]) -> Tensor:
    """Does `cat` along dimension 0, with vectors as rows."""
    return cat([each.reshape(1, -1) if each.dim() < 2 else each for each in tensors], 0)


@implements(torch.hstack)
def hstack(tensors: Sequence[Tensor]) -> Tensor:
    """Does `cat` along dimension 1, or along dimension 0 for vectors."""
    return cat(tensors, min(1, tensors[0].dim() - 1))


@implements(torch.kron, torch.Tensor.kron)
def kron(input: Tensor, other: Tensor) -> Tensor:
    """Returns the Kronecker product in the format of the first sparse operand. Of a dense operand, it stores all elements."""
    if input.dim() != other.dim():
        dense: Tensor = densified(torch.kron, (input, other), {})
        return dense
    one, two = (CoordinateList.of(each) if isinstance(each, SparseTensor) else _all_of(each) for each in (input, other))
    sizes = [n * m for n, m in zip(input.shape, other.shape, strict=True)]
    at = [(p[:, None] * m + q).flatten() for p, q, m in zip(one.at, two.at, other.shape, strict=True)]
    sparse = next(each for each in (input, other) if isinstance(each, SparseTensor))
    products = CoordinateList(tuple(at), (one.values[:, None] * two.values).flatten())
    return products.assembled(of_rank(sparse.format, len(sizes)), sizes)


def _all_of(dense: Tensor) -> CoordinateList:
    """Returns all elements of a dense tensor."""
    at = torch.meshgrid(*(torch.arange(size, device=dense.device) for size in dense.shape), indexing="ij")
    return CoordinateList(tuple(each.flatten() for each in at), dense.flatten())


@implements(torch.block_diag)
def block_diag(*tensors: Tensor) -> Tensor:
    """Returns a matrix with these matrices along its diagonal, in the format of the first. It is dense if one of them is."""
    sparse = [tensor for tensor in tensors if isinstance(tensor, SparseTensor) and tensor.dim() == 2]
    if len(sparse) < len(tensors):
        dense: Tensor = densified(torch.block_diag, tensors, {})
        return dense
    rows = columns = 0
    lists = list[CoordinateList]()
    for tensor in sparse:
        listed = CoordinateList.of(tensor)
        lists.append(CoordinateList((listed.at[0] + rows, listed.at[1] + columns), listed.values))
        rows, columns = rows + tensor.shape[0], columns + tensor.shape[1]
    at = tuple(torch.cat(crds) for crds in zip(*(each.at for each in lists), strict=True))
    return CoordinateList(at, torch.cat([each.values for each in lists])).assembled(sparse[0].format, [rows, columns])
