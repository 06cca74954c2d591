"""Inductor's code calls a region as a Python function: the dispatcher, which it would go through, costs 3 µs a call.

    buf0 = torch.ops.gossamer.region.default([arg0, arg1], '3f2a…')      →      buf0 = call_region([arg0, arg1], '3f2a…')

While a profiler runs, the call goes through the dispatcher all the same, so that regions are seen in its trace.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.autograd import profiler

from gossamer.backend.region_op import on_cpu, region


def call_region(operands: list[torch.Tensor], key: str) -> torch.Tensor:
    """What `gossamer::region` does for CPU tensors."""
    return region(operands, key) if profiler._is_profiler_enabled else on_cpu(operands, key)


@cache
def enable() -> None:
    """Has Inductor's Python wrapper write such calls, if this torch lets it be told to, as 2.13 does."""
    try:
        from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
    except ImportError:
        return
    CUSTOM_EXTERN_KERNEL_CODEGEN[_NAME] = CustomCodegen(python=_write)


_NAME = "torch.ops.gossamer.region.default"


def _write(node: Any, writeline: Callable[[str], None]) -> None:
    from torch._inductor.codegen.wrapper import SubgraphPythonWrapperCodegen
    from torch._inductor.virtualized import V

    function, wrapper = _NAME, V.graph.wrapper_code
    devices = {operand.get_device().type for operand in node.inputs}
    if devices == {"cpu"} and not isinstance(wrapper, SubgraphPythonWrapperCodegen):  # such a one writes no imports
        wrapper.add_import_once(f"from {__name__} import call_region")
        function = call_region.__name__
    writeline(f"{node.get_name()} = {function}({', '.join([*node.codegen_args(), *node.codegen_kwargs()])})")
