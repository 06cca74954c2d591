"""torch.export of what makes a SparseTensor: the call that makes it, as a node of the graph."""

from collections.abc import Callable
from typing import Any

from gossamer.runtime.torch_internals import compiler_flags, emit_call_in_export, get_proxy_mode


def in_export() -> bool:
    """Whether torch.export traces. Dynamo takes torch.compiler.is_exporting() for true everywhere (torch 2.11)."""
    return bool(compiler_flags._is_exporting_flag)


def exported(make: Callable[..., Any], *arguments: Any) -> Any:
    """make(*arguments), which the program that torch.export is writing does, too.

    Torch's tracer knows operators and the tensors they give, not Python that puts tensors together. The arguments are tensors,
    numbers and strings, maybe in tuples. Elsewhere than in an export it is a call and nothing else.
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
