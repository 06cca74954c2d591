"""Functions of torch that use the memory of a tensor, for SparseTensors, whose arrays alone have memory.

For torch a SparseTensor has no memory. `SparseTensor.__new__` makes a request for its address an error, also in C++, instead of
a null pointer. The functions here work on its arrays, or say what to use instead.
"""

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from gossamer.dialects.errors import ArgumentError, GossamerError
from gossamer.sparsity.tensor.extension import implements, unsupported
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor


class NoMemoryError(GossamerError, BufferError):
    """Some code asked for the memory of a SparseTensor, as if it were dense."""


@implements(torch.Tensor.share_memory_)
def share_memory_(input: SparseTensor) -> SparseTensor:
    """Moves all arrays to shared memory."""
    for array in input.components:
        array.share_memory_()
    return input


@implements(torch.Tensor.is_shared)
def is_shared(input: SparseTensor) -> bool:
    """Whether all arrays are in shared memory."""
    return all(array.is_shared() for array in input.components)


@implements(torch.Tensor.pin_memory)
def pin_memory(input: SparseTensor, device: Any = None) -> SparseTensor:
    """Returns a copy with all arrays in pinned memory, which needs a GPU."""
    return SparseTensor(input.format, input.shape, [array.detach().pin_memory() for array in input.components])


@implements(torch.Tensor.is_pinned)
def is_pinned(input: SparseTensor, device: Any = None) -> bool:
    """Whether all arrays are in pinned memory."""
    return all(array.is_pinned() for array in input.components)


@implements(torch.Tensor.record_stream)
def record_stream(input: SparseTensor, stream: Any) -> None:
    """Keeps the memory of all arrays until a stream has finished with it."""
    for array in input.components:
        array.record_stream(stream)


@implements(torch.Tensor.apply_)
def apply_(input: SparseTensor, function: Callable[[Any], Any]) -> SparseTensor:
    """Applies a Python function, which must leave 0 as it is, to the stored values."""
    if function(torch.zeros((), dtype=input.dtype).item()) != 0:
        raise unsupported("apply_ of a function that makes zeros nonzero", "use to_dense().apply_()")
    input.values().detach().apply_(function)
    return input


@implements(torch.Tensor.__deepcopy__)
def deepcopy(input: SparseTensor, memo: dict[int, Any]) -> SparseTensor:
    """Returns a tensor with copies of all arrays, of its gradient and of attributes that users have set.

    Arrays that several tensors share are copied once for one `copy.deepcopy`, as torch does.
    """
    if id(input) in memo:
        found: SparseTensor = memo[id(input)]
        return found
    if not input.is_leaf:
        raise ArgumentError(
            "SparseTensor: deepcopy of a tensor that was computed with gradients is not supported; copy what detach() gives"
        )
    arrays = [copy.deepcopy(array, memo) for array in input.components]
    copied = SparseTensor(input.format, input.shape, arrays, input.requires_grad)
    memo[id(input)] = copied
    own = {*copied.__dict__, "_repeated", "_origin", "_detached"}
    copied.__dict__.update(copy.deepcopy({name: value for name, value in input.__dict__.items() if name not in own}, memo))
    if input.grad is not None:
        copied.grad = copy.deepcopy(input.grad, memo)
    return copied


@implements(
    torch.Tensor.__dlpack__, torch.Tensor.__dlpack_device__, torch.Tensor.data_ptr, torch.Tensor.numpy, torch.Tensor.__array__,
    torch.Tensor.map_, torch.Tensor.map2_, torch.Tensor.__cuda_array_interface__.__get__,
)  # fmt: skip
def address(*_: Any, **__: Any) -> NoReturn:
    """Raises NoMemoryError, because DLPack, NumPy and addresses need a dense tensor."""
    raise NoMemoryError(
        "a SparseTensor has no memory of its own, only its arrays have: pass to_dense(), or values(), positions(level) and "
        "coordinates(level) one by one, or to_scipy()"
    )


@implements(torch.Tensor.storage)
def storage(input: SparseTensor) -> NoReturn:
    """Raises NoMemoryError. safetensors asks for the storage."""
    raise NoMemoryError(
        "a SparseTensor has no storage, which safetensors, save_pretrained and transformers.Trainer need to write files: "
        "gossamer.finalize(copy.deepcopy(model)).save_pretrained(folder) writes plain weights, gossamer.save(model, file) the "
        "nonzeros, torch.save(model.state_dict(), file) what training goes on with; Trainer needs save_strategy='no', and a "
        "callback that saves"
    )
