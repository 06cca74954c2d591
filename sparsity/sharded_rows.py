"""`gossamer.distributed.ShardedRows` is a sparse matrix whose rows are dealt to processes, for graphs too large for one.

a = gossamer.distributed.ShardedRows(rows, mesh)    rows: SparseTensor [own rows, all columns]
y = a @ x                               x: own rows of x; one all_to_all fetches the rows of others that `rows` needs
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from gossamer.dialects.errors import FormatError, OptionError
from gossamer.dialects.format import Format
from gossamer.runtime.torch_internals import all_to_all
from gossamer.sparsity.dealt import own_range, share_of
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, from_entries


class ShardedRows:
    """This process's rows of a sparse matrix. Products exchange rows of x with the other processes.

    rows  SparseTensor [own rows, columns] in any format; columns are those of the whole matrix. Gradients flow to its values
    mesh  a mesh of one dimension. Rows of the matrix and of x are dealt as by DTensor's Shard(0): ceil(n / processes) each

    - A product sends only the rows of x that others need, in one all_to_all forward and one backward.
    - `local` is the matrix [own rows, own columns + fetched columns] in CSR. `fetch(x)` returns the rows of x in that order.
      Use these with `gossamer.graph_attention(a.local, ...)`, or with layers of PyG: `(a.fetch(x), x)` and `a.edge_index`.
    - In compiled code write `a.matmul(x)`, because Dynamo breaks the graph at the `@` of an object that is no tensor.
    - Few rows are fetched if neighbours have near numbers. Call `gossamer.reorder` first, or sort the nodes by the parts of a
      partitioner (METIS).

    OptionError on all processes if one of them does not have the rows that Shard(0) deals to it.
    """

    def __init__(self, rows: SparseTensor, mesh: DeviceMesh) -> None:
        if not isinstance(rows, SparseTensor) or rows.dim() != 2:
            raise FormatError(f"ShardedRows takes a SparseTensor [own rows, columns], got {type(rows).__name__}")
        self.mesh, self._group = mesh, mesh.get_group()
        self._own = own_range(rows.shape[1], mesh)
        self.shape = (_total(rows, mesh), rows.shape[1])
        entries = rows.to_format(Format.COO)
        at = entries.to_torch().indices()
        outside = (at[1] < self._own.start) | (at[1] >= self._own.stop)
        wanted = at[1][outside].unique()
        self._received, self._sent, self._rows_to_send = self._plan(wanted, rows.shape[1])
        columns = torch.where(outside, torch.searchsorted(wanted, at[1]) + len(self._own), at[1] - self._own.start)
        self.local = from_entries(Format.CSR, (rows.shape[0], len(self._own) + len(wanted)), (at[0], columns), entries.values())
        self.fetched = len(wanted)
        """How many rows of x a product fetches from other processes; `sent` is how many it sends."""
        self.sent = len(self._rows_to_send)

    @classmethod
    def of(cls, matrix: SparseTensor, mesh: DeviceMesh) -> "ShardedRows":
        """Returns the rows of this process, from a matrix that all processes have."""
        own = own_range(matrix.shape[0], mesh)
        rows = matrix[own.start : own.stop]
        assert isinstance(rows, SparseTensor)
        return cls(rows, mesh)

    @property
    def edge_index(self) -> Tensor:
        """[2, entries] int64: column and row of `local` of each entry, sources first, as in PyTorch Geometric."""
        return self.local.to_format(Format.COO).to_torch().indices().flip(0)

    def fetch(self, x: Tensor) -> Tensor:
        """Returns x with the fetched rows behind: [own columns + fetched, ...].

        x is [own columns, ...], the own rows, or a DTensor sharded by rows.
        """
        x = _own_part(x)
        if x.shape[0] != len(self._own):
            raise FormatError(f"this process must give its {len(self._own)} of the rows of x, got {x.shape[0]}")
        fetched = all_to_all(x.index_select(0, self._rows_to_send), self._received, self._sent, self._group)
        return torch.cat([x, fetched])

    def __matmul__(self, x: Tensor) -> Tensor:
        return self.matmul(x)

    def matmul(self, x: Tensor) -> Tensor:
        """Returns a @ x [own rows, ...]; a DTensor, sharded by rows, if x is one."""
        product = self.local @ self.fetch(x)
        if not isinstance(x, DTensor):
            return product
        shape = torch.Size((self.shape[0], *product.shape[1:]))
        return DTensor.from_local(product, self.mesh, [Shard(0)], shape=shape, stride=product.stride())

    def __repr__(self) -> str:
        return f"ShardedRows(shape={self.shape}, {self.mesh.size()} processes, own={self.local!r}, fetched={self.fetched})"

    def _plan(self, wanted: Tensor, columns: int) -> tuple[list[int], list[int], Tensor]:
        """Returns how many rows each process sends to this one and gets from it, and the numbers of the own rows to send."""
        owner = torch.div(wanted, share_of(columns, self.mesh), rounding_mode="floor")
        received = torch.bincount(owner, minlength=self.mesh.size())
        sent = torch.empty_like(received)
        dist.all_to_all_single(sent, received, group=self._group)
        asked = wanted.new_empty(int(sent.sum()))
        dist.all_to_all_single(asked, wanted, sent.tolist(), received.tolist(), group=self._group)
        return received.tolist(), sent.tolist(), asked - self._own.start


def _own_part(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return x
    if tuple(x.placements) != (Shard(0),):
        raise FormatError(f"x is a DTensor with placements {x.placements}: redistribute it to [Shard(0)]")
    return x.to_local()


def _total(rows: SparseTensor, mesh: DeviceMesh) -> int:
    """Returns the number of rows of all processes together. OptionError if they are not dealt as Shard(0) does."""
    found: list[Any] = [None] * mesh.size()
    dist.all_gather_object(found, tuple(rows.shape), group=mesh.get_group())
    total: int = sum(shape[0] for shape in found)
    share = share_of(total, mesh)
    for rank, (own, columns) in enumerate(found):
        dealt = max(0, min(total - rank * share, share))
        if own != dealt or columns != found[0][1]:
            raise OptionError(
                f"process {rank} has {own} of {total} rows and {columns} columns, should have {dealt} and {found[0][1]}: deal "
                "them as DTensor's Shard(0) does, ceil(rows / processes) each, and let columns be those of the whole matrix"
            )
    return total
