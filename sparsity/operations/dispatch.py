"""Whether an operation must go through torch's dispatcher, which takes longer than a small product."""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from gossamer.runtime.torch_internals import (
    forward_level,
    get_tracing_state,
    has_storage,
    is_functorch_wrapped_tensor,
    is_torch_function_mode_enabled,
    is_zerotensor,
    layers_of_transforms,
    len_torch_dispatch_stack,
    peek_interpreter_stack,
    profiler,
)

PLAIN = (Tensor, nn.Parameter)
"""Types of tensors that nobody has given a meaning of their own."""


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is what kernels take, numbers in memory of the CPU; what torch.func wraps (or has wrapped) has none."""
    return (
        type(tensor) in PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not is_marked(tensor)
        and has_storage(tensor)
    )


def is_marked(tensor: Tensor) -> bool:
    """Whether torch's dispatcher alone knows its numbers: the negative of what lies in memory, or zeros that lie nowhere, as
    gradients of steps (torch.sgn) are. Kernels of complex numbers are given copies."""
    return tensor.is_neg() or is_zerotensor(tensor)


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor, for who will not ask the dispatcher: with its numbers in memory."""
    if torch.compiler.is_compiling() or not (tensor.is_conj() or is_marked(tensor)):
        return tensor
    return torch.zeros_like(tensor) if is_zerotensor(tensor) else tensor.resolve_conj().resolve_neg()


def in_transform() -> bool:
    """Whether a transform of torch.func is running, in eager code or in what Dynamo traces."""
    return bool(layers_of_transforms())


def transformed(tensor: Tensor) -> bool:
    """Whether a tensor may have derivatives other than those of autograd: inside torch.func, or with a tangent."""
    if in_transform() or torch.compiler.is_dynamo_compiling():
        return in_transform()
    if is_functorch_wrapped_tensor(tensor):
        return True
    return forward_level._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def watched() -> bool:
    """Whether something wants to see each operation, or to make something else of it: a dispatch mode (fake tensors, tracing),
    a function mode, torch.jit.trace, a function transform, the profiler, forward differentiation."""
    return bool(
        len_torch_dispatch_stack()
        or is_torch_function_mode_enabled()
        or get_tracing_state() is not None
        or peek_interpreter_stack() is not None
        or profiler._is_profiler_enabled
        or forward_level._current_level >= 0
    )
