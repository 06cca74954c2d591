"""TorchInductor with PyTorch's own product of dense weights of 4 bits, which torchao's `Int4WeightOnlyConfig` uses on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.models import PrunedModel, with_sparse_linears
from benchmarks.own_code import compiled as compiled_alone
from benchmarks.quantized import check
from benchmarks.registry import Contender, Prepared

_GROUP = 32


class _FourBits(nn.Module):
    """A linear layer with weights of 4 bits, a scale and a zero for each group of 32 along the inputs."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        rows, columns = linear.weight.shape
        groups = linear.weight.detach().reshape(rows, columns // _GROUP, _GROUP)
        scale = (groups.abs().amax(2) / 7).clamp_min(1e-12)
        codes = (groups / scale[:, :, None]).round().clamp(-8, 7) + 8
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.reshape(rows, columns).int(), 1)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", torch.stack([scale.t(), torch.zeros_like(scale.t())], 2).contiguous())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.packed, _GROUP, self.scales)
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if self.bias is None else y + self.bias


def prepare(problem: PrunedModel) -> Prepared:
    check(problem, "int4")
    compiled = compiled_alone(with_sparse_linears(problem, _FourBits))
    return Prepared(lambda: compiled(*problem.inputs))


CONTENDER = Contender("Inductor int4", prepare, precision="int4")
