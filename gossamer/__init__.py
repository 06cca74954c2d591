"""Gossamer makes sparse PyTorch models fast: `torch.compile(model, backend="sparse")`.

    compiled = torch.compile(model, backend="sparse")
    print(gossamer.explain(model, *inputs))

The names here are the public ones; they are imported when they are first used.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.backend.calibrate import calibrate
    from gossamer.backend.explain import explain
    from gossamer.backend.options import Options
    from gossamer.backend.report import Decision, Report
    from gossamer.dialects.errors import CompileError, FormatError, GossamerError, OptionError
    from gossamer.dialects.format import Format
    from gossamer.sparsity.densify import strict
    from gossamer.sparsity.einsum import EinsumError, einsum
    from gossamer.sparsity.extension import implements, register_format
    from gossamer.sparsity.graph_attention import graph_attention
    from gossamer.sparsity.prepare import prepare
    from gossamer.sparsity.reorder import reorder
    from gossamer.sparsity.sparsifiers import register_sparsifier, sparsify
    from gossamer.sparsity.tensor import SparseTensor

try:
    __version__ = version("gossamer")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"

_HOMES = {
    "calibrate": "gossamer.backend.calibrate",
    "explain": "gossamer.backend.explain",
    "Options": "gossamer.backend.options",
    "Decision": "gossamer.backend.report",
    "Report": "gossamer.backend.report",
    "Format": "gossamer.dialects.format",
    "GossamerError": "gossamer.dialects.errors",
    "CompileError": "gossamer.dialects.errors",
    "FormatError": "gossamer.dialects.errors",
    "OptionError": "gossamer.dialects.errors",
    "EinsumError": "gossamer.sparsity.einsum",
    "einsum": "gossamer.sparsity.einsum",
    "graph_attention": "gossamer.sparsity.graph_attention",
    "implements": "gossamer.sparsity.extension",
    "prepare": "gossamer.sparsity.prepare",
    "register_format": "gossamer.sparsity.extension",
    "register_sparsifier": "gossamer.sparsity.sparsifiers",
    "reorder": "gossamer.sparsity.reorder",
    "sparsify": "gossamer.sparsity.sparsifiers",
    "strict": "gossamer.sparsity.densify",
    "SparseTensor": "gossamer.sparsity.tensor",
}

__all__ = [
    "CompileError",
    "Decision",
    "EinsumError",
    "Format",
    "FormatError",
    "GossamerError",
    "OptionError",
    "Options",
    "Report",
    "SparseTensor",
    "__version__",
    "calibrate",
    "einsum",
    "explain",
    "graph_attention",
    "implements",
    "prepare",
    "register_format",
    "register_sparsifier",
    "reorder",
    "sparsify",
    "strict",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gossamer' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
