"""Makes Dynamo trace experts of transformers as grouped products. Their eager code loops over the chosen experts, which Dynamo
cannot trace.

    for expert in (one_hot(chosen).sum(...) > 0).nonzero(): ...     →     sort, grouped products, and the sum over experts

transformers also has the layer with grouped products. It chooses by the name experts_implementation; "eager" is the loop. While
Dynamo traces for our backend, "eager" means the products. Eager code and other backends run the loop as before.
"""

import functools
from typing import Any

import torch

from gossamer.backend.report.compilation import is_traced_for
from gossamer.runtime.modules.when_loaded import when_loaded

_MODULE = "transformers.integrations.moe"
_TRACED = "grouped_mm"


def trace_experts(backend: object) -> None:
    """Makes Dynamo trace the products when it compiles for `backend`, as soon as transformers is loaded."""
    when_loaded(_MODULE, lambda: _trace(backend))


def _trace(backend: object) -> None:
    import sys

    interface: Any = getattr(sys.modules[_MODULE], "ExpertsInterface", None)
    original = getattr(interface, "get_interface", None)
    if original is None or hasattr(original, _MARK):
        return

    @torch.compiler.assume_constant_result
    def is_traced_by_us() -> bool:
        return is_traced_for(backend)

    @functools.wraps(original)
    def get_interface(self: Any, experts_implementation: str, default: Any) -> Any:
        if experts_implementation == "eager" and torch.compiler.is_compiling() and is_traced_by_us():
            experts_implementation = _TRACED
        return original(self, experts_implementation, default)

    setattr(get_interface, _MARK, True)
    interface.get_interface = get_interface


_MARK = "_gossamer_traces_experts"
