"""Finds the model inside wrappers (torch.compile's module, DataParallel, DistributedDataParallel), and sets its modes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from gossamer.sparsity.torch_functions.open_attention import open_attention
from gossamer.sparsity.torch_functions.open_experts import open_experts

_COMPILED = "_orig_mod"


def plain_model(model: nn.Module) -> nn.Module:
    """Returns the model inside wrappers."""
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif _COMPILED in model._modules:
            model = model._modules[_COMPILED]  # type: ignore[assignment]
        else:
            return model


def plain_name(name: str) -> str:
    """Returns the name of a module or tensor in the model without torch.compile."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Sets all modules to evaluation mode within the context."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def called_openly(model: nn.Module) -> Iterator[None]:
    """Makes all modules of a model callable with hooks within the context.

    - Nothing runs compiled, because compiled code may skip hooks.
    - TransformerEncoder makes no nested tensors of padded batches, which only its own kernels take.
    - Attention of torch.nn calls its projections (open_attention.py).
    - Experts of transformers call their products (open_experts.py).
    """
    changed: list[tuple[dict[str, Any], str, Any]] = []

    def change(module: nn.Module, name: str, value: Any) -> None:
        changed.append((vars(module), name, vars(module)[name]))
        vars(module)[name] = value

    try:
        for module in model.modules():
            own = vars(module)
            if own.get("_compiled_call_impl") is not None:
                change(module, "_compiled_call_impl", None)
            if (eager := getattr(own.get("forward"), "_torchdynamo_orig_callable", None)) is not None:
                change(module, "forward", eager)
            if isinstance(module, nn.TransformerEncoder) and own.get("use_nested_tensor"):
                change(module, "use_nested_tensor", False)
        with open_attention(model), open_experts(model):
            yield
    finally:
        for own, name, value in reversed(changed):
            own[name] = value
