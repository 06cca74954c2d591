"""How a matrix is dealt to processes, of which each has some rows or columns as a SparseTensor of its own.

part._dealt = Dealt(mesh, dim, shape)    of the stored weights of tensor parallelism; None for all other tensors

Copies, gradients and the state of optimizers are dealt like the weight. So the norm of a gradient is that of all parts, and no
checkpoint takes a part for the whole weight.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.dialects.errors import OptionError
from gossamer.sparsity.tensor.extension import implements
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Dealt:
    """What the processes of a mesh have of a matrix.

    dim       0 if each process has some rows, 1 for columns
    shape     of the whole matrix
    gradient  whether it is a gradient, whose norm is that of all parts
    """

    mesh: "DeviceMesh"
    dim: int
    shape: tuple[int, ...]
    gradient: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Dealt":
        return self

    def whole_norm(self, own: Tensor, p: Any) -> Tensor:
        """Returns the norm of all parts, from the norm of each."""
        norms = [torch.empty_like(own) for _ in range(self.mesh.size())]
        dist.all_gather(norms, own, group=self.mesh.get_group())
        return torch.linalg.vector_norm(torch.stack(norms), p)

    def largest(self, number: Tensor) -> None:
        """Gives all processes the largest of a number that each has."""
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self.mesh.get_group())

    def as_dtensor(self, part: Tensor) -> "DTensor":
        """Returns the dense matrix of which this process has a dense part."""
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(
            part, self.mesh, [Shard(self.dim)], run_check=False, shape=torch.Size(self.shape), stride=(self.shape[1], 1)
        )


def share_of(size: int, mesh: "DeviceMesh") -> int:
    """Returns how many of `size` rows or columns DTensor deals to each process but the last ones, at least 1."""
    return max(1, -(-size // mesh.size()))


def own_range(size: int, mesh: "DeviceMesh") -> range:
    """Returns the rows or columns that DTensor deals to this process."""
    share, rank = share_of(size, mesh), mesh.get_local_rank()
    return range(min(size, rank * share), min(size, (rank + 1) * share))


@implements(torch.Tensor.grad.__get__)  # type: ignore[union-attr]
def grad(input: SparseTensor) -> Tensor | None:
    """Implements `parameter.grad`. The gradient of a part is dealt like the part."""
    with torch.DisableTorchFunctionSubclass():
        found: Tensor | None = torch.Tensor.grad.__get__(input)  # type: ignore[union-attr]
    if not torch.compiler.is_compiling() and isinstance(found, SparseTensor) and input._dealt is not None:
        found._dealt = replace(input._dealt, gradient=True)
    return found


class _WriteItems:
    """`part.__create_write_items__`, by which torch.distributed.checkpoint asks how to save a tensor. Whole ones have none.

    Torch would save the part of one process as the weight of all.
    """

    def __get__(self, tensor: SparseTensor | None, kind: Any = None) -> Any:
        if tensor is None or tensor._dealt is None:
            raise AttributeError("__create_write_items__")
        return _refuse


def _refuse(name: str, part: SparseTensor) -> NoReturn:
    raise OptionError(
        f"'{name}' is a part {tuple(part.shape)} of a stored weight, and torch.distributed.checkpoint cannot join such parts. "
        "To resume with as many processes, let each write its state dicts to a file of its own by torch.save. To save the "
        "whole weights, save the state dict of gossamer.finalize(copy.deepcopy(model))"
    )


SparseTensor.__create_write_items__ = _WriteItems()  # type: ignore[attr-defined]
