"""`gossamer.distributed.data_parallel`: DistributedDataParallel for models whose weights store only their nonzeros.

model = gossamer.distributed.data_parallel(gossamer.store_sparse(model))   before the optimizer is made and before torch.compile
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gossamer.dialects.errors import OptionError
from gossamer.runtime.torch_internals import leave_to_us
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor


class _DataParallel(DistributedDataParallel):
    """DistributedDataParallel that knows whether the last forward pass was within `no_sync()`."""

    averages = True

    @torch.compiler.disable(recursive=False)  # torch.compile does not trace DistributedDataParallel.forward either
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        if torch.is_grad_enabled():
            self.averages = self.require_backward_grad_sync
        return super().forward(*args, **kwargs)


def data_parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """Returns `DistributedDataParallel(model, **options)` that also averages the gradients of stored weights.

    DistributedDataParallel itself needs flat arrays of all elements, and a SparseTensor has none. Here every process gets the
    values of the first process. Hooks average the gradients of stored values (4 bytes for each nonzero in f32) as soon as they
    are computed, except if the last forward pass with gradients was within `no_sync()`. `train_sparse` takes the returned
    model. Processes keep their own sparse buffers.

    OptionError if a process stores other elements than the first one.
    """
    stored = {name: weight for name, weight in model.named_parameters() if isinstance(weight, SparseTensor)}
    leave_to_us(model, [*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *_sparse_names(model)])
    with _some_dense_parameter(model):
        wrapped = _DataParallel(model, **options)
    for name, weight in stored.items():
        average(name, weight, [wrapped.process_group], lambda: wrapped.averages)
    return wrapped


@contextmanager
def _some_dense_parameter(model: nn.Module) -> Iterator[None]:
    """Gives a model another trained parameter if it has only stored ones, because DistributedDataParallel refuses it otherwise.

    DistributedDataParallel waits for gradients once it has got one. It never gets one here, so the parameter is removed again.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained or not all(isinstance(parameter, SparseTensor) for parameter in trained):
        yield
        return
    model.register_parameter("_gossamer_dense", nn.Parameter(torch.zeros(1, device=trained[0].device)))
    try:
        yield
    finally:
        del model._parameters["_gossamer_dense"]


def _sparse_names(model: nn.Module) -> list[str]:
    """Returns all names by which DistributedDataParallel asks for SparseTensors. It asks a bare layer for ".weight"."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = [name for name, tensor in named if isinstance(tensor, SparseTensor)]
    return [*names, *(f".{name}" for name in names if "." not in name)]


class Averaging:
    """A hook of a stored weight that averages the stored values of its gradient over the processes of some groups."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], wanted: Callable[[], bool]) -> None:
        self.groups, self._wanted = groups, wanted
        self._processes = prod(group.size() for group in groups)
        self._scaling: RemovableHandle | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # copies of the model belong to no group

    def __call__(self, weight: Tensor) -> None:
        if self._wanted():
            assert isinstance(weight.grad, SparseTensor)
            values = weight.grad.components[-1]
            self.sum_up(values)
            values.div_(self._processes)

    def divide_by(self, factor: float, weight: Tensor) -> None:
        """Makes later gradients the sums over the processes divided by this factor. Those that are accumulated stay."""
        if self._scaling is not None:
            self._scaling.remove()
        scale = self._processes / factor
        self._scaling = weight.register_hook(lambda gradient: gradient * scale)

    def sum_up(self, tensor: Tensor) -> None:
        """Sums a dense tensor over the processes."""
        for group in self.groups:
            dist.all_reduce(tensor, group=group)


def average(name: str, weight: SparseTensor, groups: Sequence[dist.ProcessGroup], wanted: Callable[[], bool]) -> None:
    """Gives all processes the values of the first, and averages later gradients whenever `wanted()` is true.

    OptionError if a process stores other elements than the first one.
    """
    for group in groups:
        _take_from_the_first(name, weight, group)
    if weight.requires_grad:
        weight.register_post_accumulate_grad_hook(Averaging(groups, wanted))


def averaging_of(weight: Tensor) -> Averaging | None:
    """Returns the hook that averages the gradients of a weight, None if it has none."""
    hooks = (weight._post_accumulate_grad_hooks or {}).values()
    return next((hook for hook in hooks if isinstance(hook, Averaging)), None)


def _nothing() -> Callable[[Tensor], None]:
    return lambda weight: None


@torch.no_grad()
def _take_from_the_first(name: str, weight: SparseTensor, group: dist.ProcessGroup) -> None:
    *structure, values = weight.components
    size = torch.tensor([weight.nnz])
    _broadcast(size, group)
    same = torch.tensor([int(size.item() == weight.nnz)])
    dist.all_reduce(same, dist.ReduceOp.MIN, group=group)
    if same.item():  # else their arrays have different sizes
        for array in structure:
            first = array.clone()
            _broadcast(first, group)
            same &= int(torch.equal(first, array))
        _broadcast(values, group)
        dist.all_reduce(same, dist.ReduceOp.MIN, group=group)
    if not same.item():
        raise OptionError(
            f"processes store other elements of '{name}': prune with the same seed on all, or load the same weights, before "
            "this call"
        )


def _broadcast(tensor: Tensor, group: Any) -> None:
    dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
