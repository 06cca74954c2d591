"""A warning where AOTInductor makes a package of a pruned model: kernels of ours are not part of such packages.

    torch._inductor.aoti_compile_and_package(torch.export.export(model, inputs))

A package runs without Python, and is compiled by Inductor alone: it never asks a backend.
"""

import functools
import warnings
from typing import Any

from gossamer.backend.graph.inputs import zero_heavy
from gossamer.runtime.torch_internals import ahead_of_time

_MOST_NAMES = 3


def watch_packages() -> None:
    """Has torch._inductor.aot_compile, which makes them, warn of pruned weights."""
    original = getattr(ahead_of_time, "aot_compile", None)
    if original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def aot_compile(gm: Any, *arguments: Any, **named: Any) -> Any:
        _warn_of(gm)
        return original(gm, *arguments, **named)

    setattr(aot_compile, _MARK, True)
    ahead_of_time.aot_compile = aot_compile


def _warn_of(module: Any) -> None:
    pruned = [name for name, parameter in module.named_parameters() if zero_heavy(parameter)]
    if pruned:
        names = ", ".join(repr(name) for name in pruned[:_MOST_NAMES]) + (", ..." if len(pruned) > _MOST_NAMES else "")
        warnings.warn(
            f"AOTInductor compiles {len(pruned)} pruned weights ({names}) densely: Gossamer's kernels are not part of its "
            'packages. They run in Python, by torch.compile(model, backend="sparse").',
            stacklevel=3,
        )


_MARK = "_gossamer_warns_of_packages"
