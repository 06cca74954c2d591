"""What printed programs of models call: a module, pruned, and inputs."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune


class Mask(nn.Module):
    """A mask as a parametrization."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def prune_(model: nn.Module, how: str, density: float, shape: tuple[int, int] | str) -> nn.Module:
    """Zeroes of each matrix what a random mask says; by hooks or parametrizations in linear layers, in place elsewhere."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() != 2:
                continue
            mask = _mask(parameter, density, shape)
            if how == "in place" or not isinstance(module, nn.Linear):
                parameter.data.mul_(mask)
            elif how == "prune":
                prune.custom_from_mask(module, name, mask)
            else:
                parametrize.register_parametrization(module, name, Mask(mask))
    return model


def _mask(weight: Tensor, density: float, shape: tuple[int, int] | str) -> Tensor:
    rows, columns = weight.shape
    if shape == "rows":
        return (torch.rand(rows, 1) < density).expand(rows, columns).to(weight)
    if shape == "2:4":
        ranks = torch.rand(rows, -(-columns // 4), 4).argsort(-1).argsort(-1)
        return (ranks < 2).flatten(1)[:, :columns].to(weight)
    high, wide = (1, 1) if isinstance(shape, str) else shape
    blocks = torch.rand(-(-rows // high), -(-columns // wide)) < density
    return blocks.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns].to(weight)


def inputs(
    seed: int, tokens: int, features: int, batch: int, edges: int, dtype: torch.dtype, graph: bool
) -> tuple[Tensor, ...]:
    """batch x tokens x features; or tokens x features with the ends of edges and their weights."""
    generator = torch.Generator().manual_seed(seed)
    if not graph:
        return (torch.randn(batch, tokens, features, generator=generator).to(dtype),)
    count = edges if tokens else 0
    source, target = torch.randint(0, max(tokens, 1), (2, count), generator=generator)
    x, weights = torch.randn(tokens, features, generator=generator), torch.rand(count, generator=generator)
    return x.to(dtype), source, target, weights.to(dtype)
