"""Finds out whether an operation must go through torch's dispatcher, which takes longer than a small product."""

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
"""Types of tensors without behaviour of their own, unlike other subclasses."""


def is_plain(tensor: Tensor) -> bool:
    """Whether kernels can take a tensor: numbers in memory of the CPU. Tensors that torch.func wraps have no memory."""
    return (
        type(tensor) in PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not is_marked(tensor)
        and has_storage(tensor)
    )


def is_marked(tensor: Tensor) -> bool:
    """Whether a tensor's numbers differ from its memory, which torch's dispatcher handles.

    It may be marked as negated, or be zeros without memory, such as the gradient of torch.sgn. Conjugated tensors are not
    included, because kernels of complex numbers get copies.
    """
    return tensor.is_neg() or is_zerotensor(tensor)


def in_memory(tensor: Tensor) -> Tensor:
    """Returns the tensor with its numbers in memory, for code that does not go through the dispatcher."""
    if torch.compiler.is_compiling() or not (tensor.is_conj() or is_marked(tensor)):
        return tensor
    return torch.zeros_like(tensor) if is_zerotensor(tensor) else tensor.resolve_conj().resolve_neg()


def in_transform() -> bool:
    """Whether a transform of torch.func is running, in eager code or in code that Dynamo traces."""
    return bool(layers_of_transforms())


def transformed(tensor: Tensor) -> bool:
    """Whether a tensor may have other derivatives than autograd's: inside torch.func, or with a tangent."""
    if in_transform() or torch.compiler.is_dynamo_compiling():
        return in_transform()
    if is_functorch_wrapped_tensor(tensor):
        return True
    return forward_level._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def watched() -> bool:
    """Whether something observes or replaces operations, so that they must go through the dispatcher.

    These are: a dispatch mode (fake tensors, tracing), a function mode, torch.jit.trace, a function transform, the profiler,
    and forward differentiation.
    """
    return bool(
        len_torch_dispatch_stack()
        or is_torch_function_mode_enabled()
        or get_tracing_state() is not None
        or peek_interpreter_stack() is not None
        or profiler._is_profiler_enabled
        or forward_level._current_level >= 0
    )
