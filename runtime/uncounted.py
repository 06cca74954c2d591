"""Tensors to which torch counts no writes, so that `_version` does not tell whether they have changed.

made in inference mode      they have no count
in shared memory            another process counts its writes for itself
gathered by FSDP2           it fills the same memory before every forward pass, and puts the count back for autograd's sake
"""

import sys

from torch import Tensor

from gossamer.runtime import torch_internals


def counts_writes(tensor: Tensor) -> bool:
    """Whether `_version` moves on with every write. While FSDP2 shards a module of this process, no tensor is relied on."""
    shared = tensor.is_cpu and tensor.untyped_storage().is_shared()  # any memory of a GPU is said to be
    return not (shared or tensor.is_inference() or _is_sharding())


def _is_sharding() -> bool:
    return "torch.distributed.fsdp" in sys.modules and bool(torch_internals.module_states)
