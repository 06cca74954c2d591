"""Distributes models with stored weights over processes in torch's ways, and the rows of large sparse matrices."""

from gossamer.sparsity.sharded_rows import ShardedRows
from gossamer.sparsity.tensor_parallel import ColwiseParallel, RowwiseParallel
from gossamer.sparsity.training.data_parallel import data_parallel
from gossamer.sparsity.training.fully_shard import fully_shard

__all__ = ["ColwiseParallel", "RowwiseParallel", "ShardedRows", "data_parallel", "fully_shard"]
