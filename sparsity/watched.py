"""Whether an operation must go through torch's dispatcher, which takes longer than a small product."""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, profiler

PLAIN = (Tensor, nn.Parameter)
"""Types of tensors that nobody has given a meaning of their own."""


def watched() -> bool:
    """Whether something wants to see each operation, or to make something else of it: a dispatch mode (fake tensors, tracing),
    torch.jit.trace, a function transform, the profiler, forward differentiation."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or profiler._is_profiler_enabled
        or forward_ad._current_level >= 0
    )
