"""Finds tensors whose `_version`, torch's count of writes, does not show whether they have changed.

made in inference mode      have no count
in shared memory            each process counts only its own writes
gathered by FSDP2           FSDP2 fills the same memory before every forward pass, and resets the count for autograd
"""

import sys

from torch import Tensor

from gossamer.runtime import torch_internals


def counts_writes(tensor: Tensor) -> bool:
    """Whether `_version` shows every write. False for all tensors while FSDP2 shards a module of this process."""
    shared = tensor.is_cpu and tensor.untyped_storage().is_shared()  # torch says that all memory of GPUs is shared
    return not (shared or tensor.is_inference() or _is_sharding())


def _is_sharding() -> bool:
    return "torch.distributed.fsdp" in sys.modules and bool(torch_internals.module_states)
