"""Inductor's code calls our operations as Python functions: the dispatcher costs 3 µs a call and, where an operation has
gradients or takes a spec, 15 µs.

    buf0 = torch.ops.gossamer.einsum.default([arg0, arg1], …)      →      buf0 = call_einsum([arg0, arg1], …)

Nothing is left for the dispatcher to do there: the graph is traced, and what is differentiable has been differentiated.
While a profiler runs, the call goes through it all the same, so that operations are seen in its trace.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from gossamer.runtime.operations import KERNELS, LIBRARY
from gossamer.runtime.torch_internals import DIRECT_CALLS, off, profiler


@cache
def direct(name: str) -> Callable[..., Any]:
    """What gossamer::name does for CPU tensors, without the dispatcher unless somebody profiles."""
    kernel, operation = KERNELS[name], getattr(torch.ops.gossamer, name).default

    def call(*given: Any) -> Any:
        return operation(*given) if profiler._is_profiler_enabled else kernel(*given)

    return call


def enable() -> None:
    """Has Inductor's Python wrapper write such calls, if this torch lets it be told to."""
    if not off(DIRECT_CALLS):
        from gossamer.runtime.torch_internals import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen

        for name in KERNELS:
            CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.{LIBRARY.ns}.{name}.default"] = CustomCodegen(python=_write)


def _write(node: Any, writeline: Callable[[str], None]) -> None:
    function = node.python_kernel_name
    if (wrapper := _importing()) is not None:
        name = node.op_overload._schema.name.partition("::")[2]
        wrapper.add_import_once(f"import {KERNELS[name].__module__}")  # where it is defined, for a process that finds this code
        if {operand.get_device().type for operand in node.inputs} == {"cpu"}:
            function = f"call_{name}"
            wrapper.add_import_once(f"from {__name__} import {direct.__name__}")
            wrapper.add_import_once(f'{function} = {direct.__name__}("{name}")')
    writeline(f"{node.get_name()} = {function}({', '.join([*node.codegen_args(), *node.codegen_kwargs()])})")


def _importing() -> Any:
    """What Inductor writes code into now, None if that cannot be told to import what the code calls."""
    from gossamer.runtime.torch_internals import SubgraphPythonWrapperCodegen, V

    return None if isinstance(V.graph.wrapper_code, SubgraphPythonWrapperCodegen) else V.graph.wrapper_code
