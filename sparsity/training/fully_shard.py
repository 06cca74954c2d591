"""`gossamer.distributed.fully_shard`: FSDP2 for models in which some weights store only their nonzeros.

for block in model.blocks:
    gossamer.distributed.fully_shard(block, mesh=mesh)
gossamer.distributed.fully_shard(model, mesh=mesh)                     before the optimizer is made and before torch.compile
"""

from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from gossamer.dialects.errors import OptionError
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor
from gossamer.sparsity.training.data_parallel import average, averaging_of

Modules = TypeVar("Modules", bound=nn.Module | list[nn.Module])


def fully_shard(module: Modules, *, mesh: DeviceMesh | None = None, **options: Any) -> Modules:
    """Runs torch's `fully_shard(module, mesh=mesh, **options)`, and keeps stored weights whole on every process.

    FSDP2 itself needs flat arrays of all elements, and a stored weight has none. Here every process holds all nonzeros. It
    starts with the values of the first process, and gets the mean of the gradients (4 bytes for each nonzero in f32) after each
    backward pass, also after `set_requires_gradient_sync(False)`. `set_gradient_divide_factor` of a module also applies to its
    stored weights. All other parameters are sharded. For an optimizer with `fused=True` or `foreach=True`, put stored weights
    in a separate parameter group, because torch has no operation on both kinds.

    OptionError if a process stores other elements than the first one, or if a policy computes in another type than that of the
    stored weights.
    """
    modules: list[nn.Module] = [module] if isinstance(module, nn.Module) else list(module)
    parameters = [named for each in modules for named in each.named_parameters()]
    weights = [(name, p) for name, p in parameters if isinstance(p, SparseTensor)]
    stored = {weight: name for name, weight in weights if averaging_of(weight) is None}
    computes_in = options.get("mp_policy", MixedPrecisionPolicy()).param_dtype
    for weight, name in stored.items():
        if computes_in not in (None, weight.dtype):
            raise OptionError(
                f"mp_policy computes in {computes_in}, and '{name}' stores {weight.dtype}, which is not converted: convert the "
                "model before it is sharded, or leave out param_dtype"
            )
    ignored = {*(options.pop("ignored_params", None) or ()), *(weight for _, weight in weights)}
    if mesh is None:
        mesh = init_device_mesh(parameters[0][1].device.type, (dist.get_world_size(),))
    torch_fully_shard(module, mesh=mesh, ignored_params=ignored, **options)  # type: ignore[arg-type]  # in place
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    for weight, name in stored.items():
        average(name, weight, groups, lambda: True)
    for each in modules:
        each.set_gradient_divide_factor = partial(_set_divide_factor, each, list(stored))  # type: ignore[assignment]
    return module


def _set_divide_factor(module: Any, stored: list[SparseTensor], factor: float) -> None:
    """What a sharded module's `set_gradient_divide_factor` does, which knows only the sharded parameters."""
    FSDPModule.set_gradient_divide_factor(module, factor)
    for weight in stored:
        averaging = averaging_of(weight)
        if averaging is not None:
            averaging.divide_by(factor, weight)
