"""Where the zeros of a weight are: the patterns that the workloads prune to, each by magnitude.

unstructured    the smallest entries
skewed          the same, with rows of very different size, so that a few rows keep most of the entries
16x1, 4x4, …    the blocks (outputs x inputs) of the smallest norm
2:4, 1:4, …     all but the n largest of every m neighbours along the inputs; the share of zeros is 1 - n/m
"""

from __future__ import annotations

import argparse
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BLOCK = re.compile(r"(\d+)x(\d+)")
_N_OF_M = re.compile(r"(\d+):(\d+)")


def pattern(value: str) -> str:
    """For argparse: the name of a pattern."""
    if value in ("unstructured", "skewed") or _BLOCK.fullmatch(value) or _N_OF_M.fullmatch(value):
        return value
    raise argparse.ArgumentTypeError(f"'{value}' is no pattern: unstructured, skewed, blocks such as 16x1, n:m such as 2:4")


def patterns(value: str) -> list[str]:
    return [pattern(part) for part in value.split(",")]


def density(name: str, sparsity: float) -> float:
    """The share of entries that a pattern keeps."""
    if found := _N_OF_M.fullmatch(name):
        return int(found[1]) / int(found[2])
    return 1 - sparsity


@torch.no_grad()
def prune(weight: Tensor, name: str, sparsity: float) -> None:
    """Zeroes a share of a weight [outputs, inputs] in place, in the named pattern."""
    if name == "skewed":
        spread = torch.randn(len(weight), 1, generator=torch.Generator().manual_seed(1))
        weight *= spread.exp()
    if block := _BLOCK.fullmatch(name):
        kept = _largest_blocks(weight, int(block[1]), int(block[2]), sparsity)
    elif groups := _N_OF_M.fullmatch(name):
        kept = _largest_of_groups(weight, int(groups[1]), int(groups[2]))
    else:
        kept = _largest(weight.abs(), sparsity)
    weight *= kept


def prune_linears(model: nn.Module, name: str, sparsity: float) -> None:
    """Prunes every Linear of a model by itself."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            prune(module.weight, name, sparsity)


def _largest(size: Tensor, sparsity: float) -> Tensor:
    kept = torch.ones(size.numel(), dtype=torch.bool)
    kept[size.flatten().argsort()[: round(sparsity * size.numel())]] = False
    return kept.view(size.shape)


def _largest_blocks(weight: Tensor, rows: int, columns: int, sparsity: float) -> Tensor:
    m, k = weight.shape
    filled = F.pad(weight.float(), (0, -k % columns, 0, -m % rows))
    blocks = filled.view(filled.shape[0] // rows, rows, filled.shape[1] // columns, columns)
    kept = _largest(blocks.square().sum((1, 3)), sparsity)
    return kept.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:m, :k]


def _largest_of_groups(weight: Tensor, n: int, m: int) -> Tensor:
    groups = F.pad(weight.abs().float(), (0, -weight.shape[1] % m), value=-1).view(len(weight), -1, m)
    kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(2, groups.topk(n, 2).indices, True)
    return kept.view(len(weight), -1)[:, : weight.shape[1]]
