"""What printed programs of models call: a module, pruned, and inputs."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from gossamer.backend.smaller import worth


class Mask(nn.Module):
    """A mask as a parametrization."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def prune_(model: nn.Module, how: str, density: float, shape: tuple[int, int] | str) -> nn.Module:
    """Zeroes of each weight what a random mask says; by hooks or parametrizations in layers, in place elsewhere."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() < 2:
                continue
            mask = _mask(parameter.flatten(1), density, shape)
            if parameter.dim() > 2 and shape == "columns":
                mask = _mask(parameter[:, :, 0, 0], density, shape)[:, :, None, None].expand_as(parameter)
            mask = mask.reshape(parameter.shape)
            if shape == "rows and biases" and getattr(module, "bias", None) is not None:
                module.bias.data.mul_(mask.flatten(1).any(1)[: len(module.bias)])
            if how == "in place" or not isinstance(module, (nn.Linear, nn.Conv2d)):
                parameter.data.mul_(mask)
            elif how == "prune":
                prune.custom_from_mask(module, name, mask)
            else:
                parametrize.register_parametrization(module, name, Mask(mask))
    return model


def _mask(weight: Tensor, density: float, shape: tuple[int, int] | str) -> Tensor:
    rows, columns = weight.shape
    if shape in ("rows", "rows and biases"):
        return (torch.rand(rows, 1) < density).expand(rows, columns).to(weight)
    if shape == "columns":
        return (torch.rand(columns) < density).expand(rows, columns).to(weight)
    if shape == "both":
        return _mask(weight, density, "rows") * _mask(weight, density, "columns")
    if shape == "2:4":
        ranks = torch.rand(rows, -(-columns // 4), 4).argsort(-1).argsort(-1)
        return (ranks < 2).flatten(1)[:, :columns].to(weight)
    high, wide = (1, 1) if isinstance(shape, str) else shape
    blocks = torch.rand(-(-rows // high), -(-columns // wide)) < density
    return blocks.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns].to(weight)


def shifted(model: nn.Module) -> nn.Module:
    """A module whose batch norms have seen something."""
    for each in model.modules():
        if isinstance(each, nn.BatchNorm2d):
            nn.init.normal_(each.weight)
            nn.init.normal_(each.bias)
            nn.init.normal_(each.running_mean)
            nn.init.uniform_(each.running_var, 0.5, 2)
    return model


def small_layers_pay() -> Any:
    """Predicts calls and copies of smaller layers as if they took no time, while it lasts: a patch."""
    return patch.multiple(worth, _CALL_US=0.0, _COPY_CALL_US=0.0, _COPIED=1e9, _FREE=1.0)


def inputs(
    seed: int, tokens: int, features: int, batch: int, edges: int, dtype: torch.dtype, kind: str, last: bool = False
) -> tuple[Tensor, ...]:
    """What a model reads, of a kind.

    sequence  batch x tokens x features
    graph     tokens x features, the ends of edges and their weights
    images    batch x features x tokens x (tokens + 3); features lie `last` in memory, or not
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "images":
        images = torch.randn(batch, features, tokens, tokens + 3, generator=generator).to(dtype)
        return (images.contiguous(memory_format=torch.channels_last) if last else images,)
    if kind == "sequence":
        return (torch.randn(batch, tokens, features, generator=generator).to(dtype),)
    count = edges if tokens else 0
    source, target = torch.randint(0, max(tokens, 1), (2, count), generator=generator)
    x, weights = torch.randn(tokens, features, generator=generator), torch.rand(count, generator=generator)
    return x.to(dtype), source, target, weights.to(dtype)


def open_sizes(given: tuple[Tensor, ...], kind: str, how: str) -> None:
    """Marks the number of nodes or tokens, or a height, as one that changes ("dynamic"), or is unknown ("unbacked")."""
    mark = torch._dynamo.mark_dynamic if how == "dynamic" else torch._dynamo.decorators.mark_unbacked
    mark(given[0], {"graph": 0, "sequence": 1, "images": 2}[kind])
