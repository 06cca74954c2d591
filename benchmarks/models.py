"""Pruned models as problems: an nn.Module of which weights are mostly zeros."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.registry import Unsupported, Work, WrongResult

_LEAST_ZEROS = 0.1


@dataclass(frozen=True, eq=False)
class PrunedModel:
    """A model in eval mode (its zeros are the sparsity), in one floating-point type, and the tensors that it is called with."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    tolerance: Mapping[str, float]

    @property
    def precision(self) -> str:
        return "bf16" if next(self.model.parameters()).dtype == torch.bfloat16 else "f32"

    def reference(self) -> tuple[Tensor, Work]:
        """The dense model's result in float64, and the work that its Linears do for it."""
        itemsize = next(self.model.parameters()).element_size()
        total: dict[str, float] = dict.fromkeys(("flops", "nonzero_flops", "weights", "activations"), 0)
        model = copy.deepcopy(self.model).double()

        def count(linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            assert isinstance(linear, nn.Linear)
            rows = output.numel() // linear.out_features
            total["flops"] += 2 * rows * linear.weight.numel()
            total["nonzero_flops"] += 2 * rows * int(torch.count_nonzero(linear.weight))
            total["weights"] += itemsize * sum(parameter.numel() for parameter in linear.parameters())
            total["activations"] += itemsize * (inputs[0].numel() + output.numel())

        for linear in [module for module in model.modules() if isinstance(module, nn.Linear)]:
            linear.register_forward_hook(count)
        result: Tensor = model(*(x.double() if x.is_floating_point() else x for x in self.inputs))
        return result, Work(total["flops"], total["nonzero_flops"], int(total["weights"]), int(total["activations"]))

    def error(self, result: Tensor, expected: Tensor) -> float:
        return largest_error(result, expected)


def largest_error(result: Tensor, expected: Tensor) -> float:
    """The largest error over the largest magnitude expected; WrongResult if the shapes differ."""
    if result.shape != expected.shape:
        raise WrongResult(f"wrong result: shape {tuple(result.shape)}, not {tuple(expected.shape)}")
    scale = expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return ((result.double() - expected).abs().max() / scale).item()


def check_images(problem: PrunedModel) -> None:
    """Unsupported if the model has no convolutions."""
    if not any(isinstance(module, nn.Conv2d) for module in problem.model.modules()):
        raise Unsupported("the model has no images")


def with_sparse_linears(problem: PrunedModel, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """A copy of the model in which `make` has replaced every Linear with at least a tenth of zeros."""
    if problem.precision != "f32":
        raise Unsupported("float32 only")
    model = copy.deepcopy(problem.model)
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and (child.weight == 0).float().mean() >= _LEAST_ZEROS:
                setattr(parent, name, make(child))
                replaced += 1
    if not replaced:
        raise Unsupported("no Linear of the model has a tenth of zeros")
    return model
