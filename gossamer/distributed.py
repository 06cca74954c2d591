"""Several processes: torch's ways to distribute models, for models with stored weights, and matrices whose rows are dealt."""

from gossamer.sparsity.sharded_rows import ShardedRows
from gossamer.sparsity.tensor_parallel import ColwiseParallel, RowwiseParallel
from gossamer.sparsity.training.data_parallel import data_parallel
from gossamer.sparsity.training.fully_shard import fully_shard

__all__ = ["ColwiseParallel", "RowwiseParallel", "ShardedRows", "data_parallel", "fully_shard"]
