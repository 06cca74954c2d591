"""OpenVINO in int8: layers with FakeQuantize, the range of their inputs that of the benchmark's (static), weights by channel.

What NNCF would insert; ranges from the very data that are timed are the best that calibration could find.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from benchmarks.contenders import openvino
from benchmarks.models import PrunedModel
from benchmarks.quantized import check
from benchmarks.registry import Contender, Prepared


class _Fake(nn.Module):
    """A linear layer that rounds its weight and its input as int8 would."""

    def __init__(self, linear: nn.Linear, most: float) -> None:
        super().__init__()
        self.linear, self.step = linear, most / 127
        self.steps = (linear.weight.detach().abs().amax(1) / 127).clamp_min(1e-12)
        self.zeros = torch.zeros_like(self.steps, dtype=torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, self.step, 0, -128, 127)
        weight = torch.fake_quantize_per_channel_affine(self.linear.weight, self.steps, self.zeros, 0, -127, 127)
        return torch.nn.functional.linear(x, weight, self.linear.bias)


def prepare(problem: PrunedModel) -> Prepared:
    check(problem)
    model = copy.deepcopy(problem.model)
    ranges: dict[nn.Module, float] = {}

    def note(linear: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        ranges[linear] = max(ranges.get(linear, 0.0), float(inputs[0].abs().max()))

    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_hook(note) for _, module in linears]
    model(*problem.inputs)
    for hook in hooks:
        hook.remove()
    for name, module in linears:
        if module in ranges:
            model.set_submodule(name, _Fake(module, ranges[module]))
    return openvino.prepared(PrunedModel(model, problem.inputs, problem.tolerance), "f32")


CONTENDER = Contender("OpenVINO int8", prepare, precision="int8", own_threads=True, missing=openvino.missing)
