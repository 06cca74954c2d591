"""Tensor parallelism of linear layers with stored weights: each process has some rows or columns of the weight.

from gossamer.distributed import ColwiseParallel, RowwiseParallel
parallelize_module(store_sparse(block), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

The styles are subclasses of those of torch.distributed.tensor.parallel, and treat dense weights in the same way. A process
keeps its part of a stored weight as a SparseTensor; torch's own styles would make it dense. It keeps the whole bias. The
processes send no weights for that: all of them start with the same weights, from a checkpoint or a seed.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed.tensor.parallel as torch_parallel
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from gossamer.dialects.errors import OptionError
from gossamer.sparsity.dealt import Dealt, own_range
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor
from gossamer.sparsity.training.stored_weight import TakesBeside


class ColwiseParallel(torch_parallel.ColwiseParallel):
    """torch's ColwiseParallel, for stored weights, too: each process computes some of the outputs.

    It has the same arguments. Biases beside stored weights stay whole.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _deal(module, device_mesh, _Colwise, self) if _is_stored(module) else super()._apply(module, device_mesh)


class RowwiseParallel(torch_parallel.RowwiseParallel):
    """torch's RowwiseParallel, for stored weights, too: each process has some of the inputs, and results are summed.

    It has the same arguments.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _deal(module, device_mesh, _Rowwise, self) if _is_stored(module) else super()._apply(module, device_mesh)


Style = ColwiseParallel | RowwiseParallel
Beside = Callable[[Tensor, Tensor], Tensor]


class ParallelForward(TakesBeside):
    """The forward of a linear layer whose stored weight is dealt to processes.

    dim  of the weight that is dealt: 0 for rows, 1 for columns
    """

    dim: int

    def __init__(self, module: nn.Module, style: Style, mesh: DeviceMesh) -> None:
        self.module, self.style, self.mesh = module, style, mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelForward":
        return type(self)(copy.deepcopy(self.module, memo), self.style, self.mesh)

    def __reduce__(self) -> NoReturn:
        raise OptionError(
            "a model under tensor parallelism cannot be pickled, because it belongs to the processes of a mesh: save its "
            "state_dict(), which has the part of this process"
        )

    def _given(self, x: Tensor, wanted: Placement) -> DTensor:
        dealt = x if isinstance(x, DTensor) else _join(x, self.mesh, self.style.input_layouts, self.module.in_features)
        return dealt.redistribute(placements=[wanted])

    def _product(self, x: Tensor, bias: Tensor | None, beside: Beside | None) -> Tensor:
        """Returns the product with the part of this process. A weight that `finalize` has made dense is a DTensor."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        y = F.linear(x, weight.to_local() if isinstance(weight, DTensor) else weight, bias)
        return y if beside is None else beside(y, x)

    def _handed_on(self, y: Tensor, made: Placement, bias: Tensor | None = None) -> Tensor:
        """Returns the result in the layout that the style asks for, after adding a bias."""
        joined = _join(y, self.mesh, [made], self.module.out_features)
        result: Tensor = joined.redistribute(placements=self.style.output_layouts)
        if bias is not None:
            result = result + DTensor.from_local(bias, self.mesh, [Replicate()], run_check=False)
        to_local: Callable[[], Tensor] = result.to_local  # type: ignore[attr-defined]
        return to_local() if self.style.use_local_output else result


class _Colwise(ParallelForward):
    dim = 0

    def __call__(self, x: Tensor, beside: Beside | None = None) -> Tensor:
        x = self._given(x, Replicate()).to_local(grad_placements=[Partial()])
        bias: Tensor | None = self.module.bias  # type: ignore[assignment]
        if bias is not None:  # its gradient is gathered, so that all processes have the whole one
            whole = DTensor.from_local(bias, self.mesh, [Replicate()], run_check=False)
            bias = whole.redistribute(placements=[Shard(0)]).to_local()
        return self._handed_on(self._product(x, bias, beside), Shard(-1))


class _Rowwise(ParallelForward):
    dim = 1

    def __call__(self, x: Tensor, beside: Beside | None = None) -> Tensor:
        y = self._product(self._given(x, Shard(-1)).to_local(), None, beside)
        return self._handed_on(y, Partial(), self.module.bias)  # type: ignore[arg-type]


def _is_stored(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and isinstance(module._parameters["weight"], SparseTensor)


def _deal(module: nn.Module, mesh: DeviceMesh, forward: type[ParallelForward], style: Style) -> nn.Module:
    """Reduces a module's stored weight to the rows (dim 0) or columns (1) of this process, and sets its forward."""
    whole: SparseTensor = module._parameters["weight"]  # type: ignore[assignment]
    dim = forward.dim
    if whole.shape[dim] < mesh.size():
        raise OptionError(
            f"a stored weight {tuple(whole.shape)} cannot be dealt to {mesh.size()} processes by dimension {dim}, "
            "which is smaller: use fewer processes"
        )
    own = own_range(whole.shape[dim], mesh)
    at = slice(own.start, own.stop)
    part = whole.detach()[at] if dim == 0 else whole.detach()[:, at]
    module._parameters["weight"] = parameter = nn.Parameter(part.clone(), whole.requires_grad)
    parameter._dealt = Dealt(mesh, dim, tuple(whole.shape))  # type: ignore[attr-defined]
    module.forward = forward(module, style, mesh)
    return module


def _join(own: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], features: Any) -> DTensor:
    """Returns the tensor of which each process has a part, with so many features in the last dimension of all of it."""
    if features % mesh.size() and placements[0] in (Shard(-1), Shard(own.dim() - 1)):  # else DTensor finds the shape itself
        shape = torch.Size((*own.shape[:-1], features))
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        return DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=tuple(strides))
    return DTensor.from_local(own, mesh, placements, run_check=False)
