"""Lets Dynamo trace FlexAttention with gradients on CPUs, if Gossamer compiles the graph.

torch.nn.attention.flex_attention raises NotImplementedError on CPUs if queries, keys or values require gradients, because no
backend of torch computes these. Gossamer does. Eager code and other backends still raise the error.
"""

from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gossamer.backend.report.compilation import is_traced_for
from gossamer.runtime.torch_internals import off, validate_flex_device
from gossamer.runtime.torch_names import ATTENTION


def trace_flex_gradients(backend: object) -> None:
    """Replaces torch's check in graphs that Dynamo traces for `backend`."""

    if off(ATTENTION) or hasattr(validate_flex_device, _MARK):
        return
    original: Any = FunctionType(validate_flex_device.__code__, validate_flex_device.__globals__, "_validate_device")
    setattr(validate_flex_device, _MARK, True)

    @torch.compiler.assume_constant_result
    def is_traced_by_us() -> bool:
        return is_traced_for(backend)

    @torch.compiler.substitute_in_graph(validate_flex_device)
    def _validate_device(query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.device.type != "cpu" or not is_traced_by_us():
            original(query, key, value)


_MARK = "_gossamer_traces_gradients"
