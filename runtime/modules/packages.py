"""Warns when AOTInductor makes a package of a pruned model that `gossamer.export` did not export.

    torch._inductor.aoti_compile_and_package(torch.export.export(model, inputs))

Inductor compiles such a package alone, without Gossamer, because AOTInductor never calls a backend.
"""

import functools
import warnings
from typing import Any

import torch

from gossamer.runtime.packers.nonzeros import count_nonzeros

_MOST_NAMES, _LEAST_ELEMENTS, _ZEROS = 3, 256, 0.1


def watch_packages(inductor: Any) -> None:
    """Makes `aot_compile` of torch._inductor, which makes packages, warn of pruned weights."""
    original = getattr(inductor, "aot_compile", None)
    if original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def aot_compile(gm: Any, *arguments: Any, **named: Any) -> Any:
        _warn_of(gm)
        return original(gm, *arguments, **named)

    setattr(aot_compile, _MARK, True)
    inductor.aot_compile = aot_compile


def _warn_of(module: Any) -> None:
    pruned = [name for name, parameter in module.named_parameters() if _is_pruned(parameter)]
    if pruned:
        names = ", ".join(repr(name) for name in pruned[:_MOST_NAMES]) + (", ..." if len(pruned) > _MOST_NAMES else "")
        count = f"{len(pruned)} pruned weight{'s' * (len(pruned) > 1)} ({names})"
        warnings.warn(
            f"AOTInductor compiles {count} densely. To have Gossamer's kernels in the package, export the model with "
            "gossamer.export instead of torch.export.export.",
            stacklevel=3,
        )


def _is_pruned(parameter: torch.Tensor) -> bool:
    if parameter.is_meta or parameter.dim() < 2 or parameter.numel() < _LEAST_ELEMENTS or not parameter.is_floating_point():
        return False
    return parameter.layout is torch.strided and count_nonzeros(parameter) <= (1 - _ZEROS) * parameter.numel()


_MARK = "_gossamer_warns_of_packages"
