"""Records calls that make SparseTensors as nodes of the graph of torch.export."""

from collections.abc import Callable
from typing import Any

from gossamer.runtime.torch_internals import compiler_flags, emit_call_in_export, get_proxy_mode


def in_export() -> bool:
    """Whether torch.export is tracing. For Dynamo torch.compiler.is_exporting() is always true (torch 2.11)."""
    return bool(compiler_flags._is_exporting_flag)


def exported(make: Callable[..., Any], *arguments: Any) -> Any:
    """Returns make(*arguments), and records the call in the program that torch.export is writing.

    Torch's tracer records operators, but not Python code that makes a SparseTensor of tensors. The arguments are tensors,
    numbers and strings, maybe in tuples. Outside an export it only calls.
    """
    made = make(*arguments)
    mode = get_proxy_mode() if in_export() else None
    if mode is not None and mode.pre_dispatch:
        name = f"{make.__module__}.{make.__qualname__}".replace(".", "_")
        emit_call_in_export(
            tracer=mode.tracer,
            spec_name=name,
            const_target_for_apply=make,
            graphable_args=(arguments, {}),
            track_value=made,
            call_spec_cache_key=name,
        )
    return made
