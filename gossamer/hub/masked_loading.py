"""Lets layers under masks load plain weights, such as `save_pretrained` writes."""

from typing import Any

from torch import nn

from gossamer.sparsity.pruning.mask import kept_by_masks, masked_tensors


def load_plain(model: nn.Module) -> None:
    """Makes layers under masks load plain weights, too. Each layer has a hook, so any model around it loads them."""
    for layer in model.modules():
        hooks = layer._load_state_dict_pre_hooks.values()
        if masked_tensors(layer) and not any(getattr(each, "hook", None) is _as_masked for each in hooks):
            layer.register_load_state_dict_pre_hook(_as_masked)


def _as_masked(layer: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Renames plain weights in the state dict to the names that they have under masks, and adds the masks.

    A layer keeps its mask if the mask covers all nonzeros of the weight. Otherwise the nonzeros become the new mask.
    """
    for part in masked_tensors(layer):
        if f"{prefix}{part}" not in state_dict:
            continue
        weight = state_dict.pop(f"{prefix}{part}")
        kept = kept_by_masks(layer, part)
        more = weight.ne(0).logical_and_(~kept.to(weight.device)).any()
        for key, tensor in layer.state_dict().items():
            if key.startswith(f"parametrizations.{part}.") and key.endswith(".mask"):
                state_dict[f"{prefix}{key}"] = weight.ne(0).to(tensor.dtype) if more else tensor
        state_dict[f"{prefix}parametrizations.{part}.original"] = weight
