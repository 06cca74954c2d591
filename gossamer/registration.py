"""Registers Gossamer with torch, so that torch can read files of an earlier process before anybody imports Gossamer.

    torch.load(checkpoint, weights_only=True)            a checkpoint with SparseTensors
    torch.compiler.load_cache_artifacts(artifacts)       results of `torch.compile(model, backend="sparse")`

    Accelerator(dynamo_backend="sparse")                 and the same in the Trainer of transformers (hub/lists.py)
    from_pretrained(folder)                              a folder that was saved with a `SparseConfig`

torch calls `register` at its own import, as the entry point of a plug-in (the group torch.backends). `import gossamer` calls it
if torch was imported before. This file imports little, because each process that uses torch imports it.
"""

import logging
from functools import partial
from importlib import import_module
from typing import Any

_LIBRARIES = {
    "accelerate.utils.dataclasses": ("gossamer.hub.lists", "list_in_accelerate"),
    "transformers.generation.configuration_utils": ("gossamer.hub.lists", "compile_on_cpus"),
    "transformers.quantizers.auto": ("gossamer.hub.sparse_quantizer", "register"),
}
"""For each module of another library: the module and the name of our function that is called once it is loaded."""

_SPARSE_TENSOR = "gossamer.sparsity.tensor.sparse_tensor"


def register() -> None:
    """Registers with torch; it may be called again. It never raises, because an error would make `import torch` fail."""
    try:
        from torch.serialization import add_safe_globals

        add_safe_globals([(_rebuild, f"{_SPARSE_TENSOR}._rebuild")])
        for artifacts in ("disk_cache", "records"):
            import_module(f"gossamer.runtime.{artifacts}")
        when_loaded = import_module("gossamer.runtime.modules.when_loaded").when_loaded
        for name, (module, function) in _LIBRARIES.items():
            when_loaded(name, partial(_tell, module, function))
    except Exception as problem:
        logging.getLogger("gossamer").warning(
            "gossamer could not register with torch, so torch may not read its checkpoints and cache artifacts: %s", problem
        )


def _tell(module: str, function: str) -> None:
    """Calls a function that registers with a library. It never raises, because an error would make its import fail."""
    try:
        getattr(import_module(module), function)()
    except Exception as problem:
        logging.getLogger("gossamer").warning("gossamer could not register with a library (%s): %s", function, problem)


def _rebuild(*parts: Any) -> Any:
    """Returns a SparseTensor from its saved parts. It imports the class only now."""
    return import_module(_SPARSE_TENSOR)._rebuild(*parts)
