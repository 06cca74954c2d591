"""Tensor parallelism of linear layers with stored weights: each process has some rows or columns of the weight.

from gossamer.distributed import ColwiseParallel, RowwiseParallel
parallelize_module(store_sparse(block), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

The styles are subclasses of those of torch.distributed.tensor.parallel, and treat dense weights in the same way. A process
keeps its part of a stored weight as a SparseTensor; torch's own styles would make it dense. The processes send no weights for
that: all of them start with the same weights, from a checkpoint or a seed.
"""

from collections.abc import Callable, Sequence

import torch.distributed.tensor.parallel as torch_parallel
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from gossamer.dialects.errors import OptionError
from gossamer.sparsity.pruning.stored_layers import is_stored
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor


class ColwiseParallel(torch_parallel.ColwiseParallel):
    """torch's ColwiseParallel, for stored weights, too: each process computes some of the outputs.

    It has the same arguments.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not is_stored(module):
            return super()._apply(module, device_mesh)
        bias = _deal(module, 0, device_mesh)

        def forward(x: Tensor) -> Tensor:
            x = _dealt_as(x, self.input_layouts, [Replicate()], device_mesh).to_local(grad_placements=[Partial()])
            y = F.linear(x, module.weight, module.bias)  # type: ignore[arg-type]
            return _handed_on(y, [Shard(-1)], self, device_mesh)

        if bias is not None:
            module.bias = nn.Parameter(bias[_own(len(bias), device_mesh)].clone(), bias.requires_grad)
        module.forward = forward
        return module


class RowwiseParallel(torch_parallel.RowwiseParallel):
    """torch's RowwiseParallel, for stored weights, too: each process has some of the inputs, and results are summed.

    It has the same arguments.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not is_stored(module):
            return super()._apply(module, device_mesh)
        _deal(module, 1, device_mesh)

        def forward(x: Tensor) -> Tensor:
            x = _dealt_as(x, self.input_layouts, [Shard(-1)], device_mesh).to_local()
            y = F.linear(x, module.weight)  # type: ignore[arg-type]
            return _handed_on(y, [Partial()], self, device_mesh, module.bias)  # type: ignore[arg-type]

        module.forward = forward
        return module


Style = ColwiseParallel | RowwiseParallel


def _deal(module: nn.Module, dim: int, mesh: DeviceMesh) -> nn.Parameter | None:
    """Reduces a module's stored weight to the rows (dim 0) or columns (1) of this process. Returns the module's bias."""
    whole: SparseTensor = module._parameters["weight"]  # type: ignore[assignment]
    if whole.shape[dim] < mesh.size():
        raise OptionError(
            f"a stored weight {tuple(whole.shape)} cannot be dealt to {mesh.size()} processes by dimension {dim}, "
            "which is smaller: use fewer processes"
        )
    own = _own(whole.shape[dim], mesh)
    part = whole.detach()[own] if dim == 0 else whole.detach()[:, own]
    module._parameters["weight"] = nn.Parameter(part.clone(), whole.requires_grad)
    return module._parameters["bias"]


def _own(size: int, mesh: DeviceMesh) -> slice:
    """Returns the part of `size` rows or columns that DTensor deals to this process."""
    share = -(-size // mesh.size())
    rank = mesh.get_local_rank()
    return slice(min(size, rank * share), min(size, (rank + 1) * share))


def _dealt_as(x: Tensor, given: Sequence[Placement], wanted: Sequence[Placement], mesh: DeviceMesh) -> DTensor:
    dealt = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, given, run_check=False)
    return dealt.redistribute(placements=wanted)


def _handed_on(y: Tensor, made: Sequence[Placement], style: Style, mesh: DeviceMesh, bias: Tensor | None = None) -> Tensor:
    """Returns the result in the layout that the style asks for, after adding a bias that all processes have."""
    result: Tensor = DTensor.from_local(y, mesh, made, run_check=False).redistribute(placements=style.output_layouts)
    if bias is not None:
        result = result + DTensor.from_local(bias, mesh, [Replicate()], run_check=False)
    to_local: Callable[[], Tensor] = result.to_local  # type: ignore[attr-defined]
    return to_local() if style.use_local_output else result
