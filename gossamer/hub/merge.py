"""`gossamer.merge` merges LoRA adapters of peft into a pruned base model, whose zeros stay.

W' = W + M ⊙ (B A s)      M: where W is not zero, or its mask

peft's own `merge_and_unload` adds B A s to all elements. That fills the zeros, and the model is dense again.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gossamer.dialects.errors import OptionError
from gossamer.sparsity.finalize import finalize
from gossamer.sparsity.quantization.grouped_linear import GroupedLinear
from gossamer.sparsity.quantization.quantized_linear import QuantizedLinear

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def merge(model: Any) -> nn.Module:
    """Merges the active adapters of a peft model into the nonzeros of its base model, and returns the base model.

    model  the result of `peft.get_peft_model` or `PeftModel.from_pretrained`, not merged. Plain, masked and stored weights of
           its base become plain ones with zeros. Integers of `gossamer.quantize` become floats. Do not use `model` afterwards;
           the same holds for peft's `merge_and_unload`

    Layers without zeros are merged as peft does it. The result differs from that of the unmerged model, because changes of
    pruned weights are lost. `gossamer.distill(merged, unmerged, …)` trains the merged model toward it.

    OptionError for a model without adapters of peft, and for adapters that are not plain LoRA (DoRA and others).
    """
    from peft.tuners.lora import LoraLayer

    layers = {name: layer for name, layer in getattr(model, "named_modules", dict)() if isinstance(layer, LoraLayer)}
    if not layers:
        raise OptionError("gossamer.merge takes a model of peft with LoRA layers: peft.get_peft_model(base, LoraConfig(…))")
    for name, layer in layers.items():
        if any(each in layer.lora_variant for each in layer.active_adapters):
            raise OptionError(f"'{name}' has an adapter that is not plain LoRA: merge it by peft's merge_and_unload")
        if layer.merged:
            raise OptionError(f"'{name}' is merged already, and its zeros are lost: call unmerge_adapter() first")
    finalize(model)
    kept: list[tuple[nn.Module, str, Tensor]] = []
    for layer in layers.values():
        base = layer.get_base_layer()
        _make_floats(base)
        kept += [(base, name, weight != 0) for name, weight in base.named_parameters(recurse=False) if weight.dim() > 1]
    merged: nn.Module = model.merge_and_unload()
    for base, name, mask in kept:
        base.get_parameter(name).mul_(mask)
    return merged


def _make_floats(layer: nn.Module) -> None:
    """Turns a layer with integer weights into an nn.Linear, in place."""
    if isinstance(layer, QuantizedLinear | GroupedLinear):
        weight = nn.Parameter(layer.weight.clone(), requires_grad=False)
        layer.__class__ = nn.Linear  # type: ignore[assignment]
        layer._buffers.clear()
        layer._parameters = {"weight": weight, **layer._parameters}
