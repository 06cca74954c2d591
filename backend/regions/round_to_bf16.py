"""Rounds the factors of f32 products to bf16 if the user allows it by `torch.set_float32_matmul_precision("medium")`.

The weight is stored in bf16. x stays f32 in the graph, and the kernel rounds it. Sums, the epilogue and the result stay f32.
This happens only on devices that multiply bf16 faster than f32.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import torch

from gossamer.backend.devices.device import find_device
from gossamer.backend.regions.contractions import Contraction
from gossamer.backend.report.options import Options


def rounded(weight: torch.dtype, x: torch.dtype) -> bool:
    """Whether a product with factors of these types is a product of f32 whose weight is rounded."""
    return (weight, x) == (torch.bfloat16, torch.float32)


def may_round(options: Options) -> bool:
    """Whether the user allows products of f32 in bf16. The reference schedule never rounds."""
    return torch.get_float32_matmul_precision() == "medium" and options.schedule != "reference"


def with_rounded_weight(contraction: Contraction) -> Contraction:
    """Returns an f32 contraction with its weight in bf16 if the device is faster with it. Returns others unchanged."""
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
