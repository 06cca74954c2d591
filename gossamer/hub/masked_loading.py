"""Lets layers under masks load plain weights, such as `save_pretrained` writes."""

from typing import Any

from torch import nn

from gossamer.sparsity.pruning.mask import kept_by_masks, masked_tensors


def load_plain(model: nn.Module) -> None:
    """Makes layers under masks load plain weights, too."""
    model.register_load_state_dict_pre_hook(_as_masked)


def _as_masked(model: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Renames plain weights in the state dict to the names that they have under masks, and adds the masks.

    A layer keeps its mask if the mask covers all nonzeros of the weight. Otherwise the nonzeros become the new mask.
    """
    for name, layer in model.named_modules():
        for part in masked_tensors(layer):
            holder = f"{prefix}{name}.".lstrip(".")
            if f"{holder}{part}" not in state_dict:
                continue
            weight = state_dict.pop(f"{holder}{part}")
            own = f"{holder}parametrizations.{part}"
            kept = kept_by_masks(layer, part)
            more = weight.ne(0).logical_and_(~kept.to(weight.device)).any()
            for key, tensor in layer.state_dict().items():
                if key.startswith(f"parametrizations.{part}.") and key.endswith(".mask"):
                    state_dict[f"{holder}{key}"] = weight.ne(0).to(tensor.dtype) if more else tensor
            state_dict[f"{own}.original"] = weight
