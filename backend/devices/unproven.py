"""Keeps graphs dense on devices whose kernels have never run on real hardware, unless the user asks for these kernels."""

from collections.abc import Iterable
from typing import Any

import torch

from gossamer.backend.report.options import Options

_PLACES = ("cuda",)


def stays_dense(values: Iterable[Any], options: Options) -> str | None:
    """Returns why a graph with these inputs stays dense, as a text for the report; None if it may become sparse."""
    if options.gpu == "untested" or not any(isinstance(x, torch.Tensor) and x.device.type in _PLACES for x in values):
        return None
    return 'kernels for GPUs have not run on a GPU yet; options={"gpu": "untested"} takes them'
