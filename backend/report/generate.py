"""Warns if `generate` of a compiled model runs uncompiled.

    torch.compile(model, backend="sparse").generate(tokens)

The object that torch.compile returns compiles only its own calls. Its methods are those of the original model. They call the
original model, so the backend is never called.
"""

import warnings
from typing import Any

from gossamer.runtime.torch_internals import OptimizedModule

_ADVICE = (
    "generate() of a compiled model runs the original model, uncompiled. Compile the model in place, by "
    'model.compile(backend="sparse") or model.forward = torch.compile(model.forward, backend="sparse"), and call '
    "model.generate()."
)

_warned = False


def watch_for_generate(backend: object) -> None:
    """Warns once when somebody reads `generate` of a model that was compiled for `backend`."""

    def generate(compiled: Any) -> Any:
        global _warned
        model = compiled._orig_mod
        method = model.generate  # AttributeError if there is none
        in_place = model._compiled_call_impl is not None or "forward" in vars(model)
        if not _warned and not in_place and _backend_of(compiled) is backend:
            _warned = True
            warnings.warn(_ADVICE, stacklevel=2)
        return method

    if "generate" not in vars(OptimizedModule):
        OptimizedModule.generate = property(generate)


def _backend_of(compiled: Any) -> object:
    """Returns the backend that torch.compile was called with."""
    backend = getattr(compiled.dynamo_ctx, "callback", None)
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return getattr(backend, "compiler_fn", backend)
