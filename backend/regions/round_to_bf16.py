"""Products of f32 whose factors may be rounded to bf16: the user said so by `torch.set_float32_matmul_precision("medium")`.

The weight is stored in bf16; x stays f32 in the graph, and a kernel rounds it where it multiplies pairs of bf16. Sums, the
epilogue and the result stay f32. Only where the device multiplies bf16 faster: elsewhere the permission is of no use.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import torch

from gossamer.backend.devices.device import find_device
from gossamer.backend.regions.contractions import Contraction
from gossamer.backend.report.options import Options


def rounded(weight: torch.dtype, x: torch.dtype) -> bool:
    """Whether a product with these factors is one of f32 whose weight is rounded."""
    return (weight, x) == (torch.bfloat16, torch.float32)


def may_round(options: Options) -> bool:
    """Whether products of f32 are to be computed in bf16 where that is faster; the reference never rounds."""
    return torch.get_float32_matmul_precision() == "medium" and options.schedule != "reference"


def with_rounded_weight(contraction: Contraction) -> Contraction:
    """The contraction with its weight in bf16, if it is one of f32 on a device that gains by it."""
    weight = contraction.weight
    device = find_device(weight.device)
    if (weight.dtype, contraction.given) != (torch.float32, torch.float32) or device is None or not device.rounds_to_bf16:
        return contraction
    in_bf16 = dataclasses.replace(
        weight, evaluate=partial(_rounded, weight.evaluate), key=f"{weight.key} in bf16", dtype=torch.bfloat16
    )
    return dataclasses.replace(contraction, weight=in_bf16)


def _rounded(evaluate: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> torch.Tensor:
    return evaluate(*leaves).to(torch.bfloat16)
