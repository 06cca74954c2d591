"""Devices whose kernels have never run on one: graphs that use them stay dense unless the user asks for the kernels."""

from collections.abc import Iterable
from typing import Any

import torch

from gossamer.backend.report.options import Options

_PLACES = ("cuda",)


def stays_dense(values: Iterable[Any], options: Options) -> str | None:
    """Why a graph with these inputs stays dense as a whole, in words for the report; None if it may become sparse."""
    if options.gpu == "untested" or not any(isinstance(x, torch.Tensor) and x.device.type in _PLACES for x in values):
        return None
    return 'kernels for GPUs have not run on a GPU yet; options={"gpu": "untested"} takes them'
