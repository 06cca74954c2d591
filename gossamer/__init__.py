"""Gossamer makes sparse PyTorch models fast: `torch.compile(model, backend="sparse")`.

    compiled = torch.compile(model, backend="sparse")
    print(gossamer.explain(model, *inputs))

This file lists the public names, and docs/api.md explains each of them. The module of a name is imported at its first use.
"""

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.checkout import ROOMS as _ROOMS
from gossamer.checkout import Beside as _Beside
from gossamer.checkout import beside as _beside
from gossamer.registration import register as _register

if TYPE_CHECKING:
    from gossamer import distributed as distributed
    from gossamer import nn as nn
    from gossamer import recipes as recipes
    from gossamer import torchsparse as torchsparse
    from gossamer.backend.bisect import bisect
    from gossamer.backend.build import build
    from gossamer.backend.explain import explain
    from gossamer.backend.export import export
    from gossamer.backend.measuring.calibrate import calibrate
    from gossamer.backend.profile import profile
    from gossamer.backend.profiling.measured import Profile
    from gossamer.backend.report.options import Options
    from gossamer.backend.report.report import Decision
    from gossamer.backend.report.table import Report
    from gossamer.dialects.errors import ArgumentError, CompileError, FormatError, GossamerError, OptionError
    from gossamer.dialects.format import Format
    from gossamer.hub.merge import merge
    from gossamer.hub.sparse_config import SparseConfig
    from gossamer.packages import load_package
    from gossamer.sparsity.bags.row_wise_adagrad import RowWiseAdagrad
    from gossamer.sparsity.checkpoints.save_load import load, save
    from gossamer.sparsity.experts.routed_linear import routed_linear
    from gossamer.sparsity.experts.routed_mlp import routed_mlp
    from gossamer.sparsity.finalize import finalize
    from gossamer.sparsity.prepare import prepare
    from gossamer.sparsity.pruning.decompose import decompose
    from gossamer.sparsity.pruning.prune import prune
    from gossamer.sparsity.quantization.quantize import quantize
    from gossamer.sparsity.reorder import reorder
    from gossamer.sparsity.sparsifiers import register_sparsifier, sparsify
    from gossamer.sparsity.store_sparse import store_sparse
    from gossamer.sparsity.tensor.densify import strict
    from gossamer.sparsity.tensor.einsum import EinsumError, einsum
    from gossamer.sparsity.tensor.extension import implements, register_format
    from gossamer.sparsity.tensor.graph_attention import graph_attention
    from gossamer.sparsity.tensor.sparse_tensor import SparseTensor
    from gossamer.sparsity.training.cuttlefish import Cuttlefish
    from gossamer.sparsity.training.distill import DistillationLoss, distill
    from gossamer.sparsity.training.train_sparse import SparseTraining, train_sparse

try:
    __version__ = version("gossamer")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"

sys.meta_path[:0] = map(_Beside, _beside(Path(__file__).parent))

if "torch" in sys.modules:
    _register()

_HOMES = {
    "bisect": "gossamer.backend.bisect",
    "build": "gossamer.backend.build",
    "calibrate": "gossamer.backend.measuring.calibrate",
    "explain": "gossamer.backend.explain",
    "export": "gossamer.backend.export",
    "profile": "gossamer.backend.profile",
    "Profile": "gossamer.backend.profiling.measured",
    "Options": "gossamer.backend.report.options",
    "Decision": "gossamer.backend.report.report",
    "Report": "gossamer.backend.report.table",
    "Format": "gossamer.dialects.format",
    "GossamerError": "gossamer.dialects.errors",
    "ArgumentError": "gossamer.dialects.errors",
    "CompileError": "gossamer.dialects.errors",
    "FormatError": "gossamer.dialects.errors",
    "OptionError": "gossamer.dialects.errors",
    "EinsumError": "gossamer.sparsity.tensor.einsum",
    "einsum": "gossamer.sparsity.tensor.einsum",
    "finalize": "gossamer.sparsity.finalize",
    "graph_attention": "gossamer.sparsity.tensor.graph_attention",
    "implements": "gossamer.sparsity.tensor.extension",
    "load": "gossamer.sparsity.checkpoints.save_load",
    "load_package": "gossamer.packages",
    "distill": "gossamer.sparsity.training.distill",
    "DistillationLoss": "gossamer.sparsity.training.distill",
    "merge": "gossamer.hub.merge",
    "prepare": "gossamer.sparsity.prepare",
    "Cuttlefish": "gossamer.sparsity.training.cuttlefish",
    "decompose": "gossamer.sparsity.pruning.decompose",
    "prune": "gossamer.sparsity.pruning.prune",
    "quantize": "gossamer.sparsity.quantization.quantize",
    "register_format": "gossamer.sparsity.tensor.extension",
    "register_sparsifier": "gossamer.sparsity.sparsifiers",
    "reorder": "gossamer.sparsity.reorder",
    "routed_linear": "gossamer.sparsity.experts.routed_linear",
    "routed_mlp": "gossamer.sparsity.experts.routed_mlp",
    "save": "gossamer.sparsity.checkpoints.save_load",
    "RowWiseAdagrad": "gossamer.sparsity.bags.row_wise_adagrad",
    "sparsify": "gossamer.sparsity.sparsifiers",
    "strict": "gossamer.sparsity.tensor.densify",
    "store_sparse": "gossamer.sparsity.store_sparse",
    "SparseConfig": "gossamer.hub.sparse_config",
    "SparseTensor": "gossamer.sparsity.tensor.sparse_tensor",
    "SparseTraining": "gossamer.sparsity.training.train_sparse",
    "train_sparse": "gossamer.sparsity.training.train_sparse",
}

_PACKAGES = {*_ROOMS, "distributed", "nn", "recipes", "torchsparse"}

__all__ = [
    "ArgumentError",
    "CompileError",
    "Cuttlefish",
    "Decision",
    "DistillationLoss",
    "EinsumError",
    "Format",
    "FormatError",
    "GossamerError",
    "OptionError",
    "Options",
    "Profile",
    "Report",
    "RowWiseAdagrad",
    "SparseConfig",
    "SparseTensor",
    "SparseTraining",
    "__version__",
    "bisect",
    "build",
    "calibrate",
    "decompose",
    "distill",
    "einsum",
    "explain",
    "export",
    "finalize",
    "graph_attention",
    "implements",
    "load",
    "load_package",
    "merge",
    "prepare",
    "profile",
    "prune",
    "quantize",
    "register_format",
    "register_sparsifier",
    "reorder",
    "routed_linear",
    "routed_mlp",
    "save",
    "sparsify",
    "store_sparse",
    "strict",
    "train_sparse",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"gossamer.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'gossamer' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
