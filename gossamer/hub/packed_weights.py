"""Unpacks the packed weights of a checkpoint while `from_pretrained` loads it: the encodings that gossamer.load reads.

    up_proj.bitmask, up_proj.compressed, up_proj.shape        →    up_proj.weight
    up_proj.weight.gaps, up_proj.weight.values, …             →    up_proj.weight
    up_proj.weight_packed, up_proj.weight_scale, …            →    up_proj.weight

transformers collects the tensors of a layer whose names fit a pattern, and calls an operation with them.
"""

import re
from collections.abc import Iterable
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from gossamer.sparsity.checkpoints.encodings import BITMASK, DEFLATED, GAPS, decoded
from gossamer.sparsity.checkpoints.scaled_integers import BESIDE, PACKED, SCALE, floats_of

_OWN = tuple(dict.fromkeys((*BITMASK, *GAPS, *DEFLATED)))
PARTS = {
    **{rf"\.weight\.{part}$": part for part in _OWN},
    **{rf"\.{part}$": part for part in BITMASK},
    **{rf"\.{part}$": part for part in (PACKED, *BESIDE, "weight")},
}
"""The array that each pattern of names stands for: one of an encoding, or of scaled integers."""

_TELLING = re.compile("|".join(rf"\.{part}$" for part in ("bitmask", "gaps", "deflated_gaps", PACKED, SCALE)))


def names_in(files: Iterable[str]) -> list[str]:
    """Returns the names of the tensors in safetensors files."""
    found: list[str] = []
    for path in files:
        if str(path).endswith(".safetensors"):
            with safe_open(path, "pt") as file:
                found += file.keys()
    return found


def conversions(quantizer: Any, names: Iterable[str]) -> list[WeightConverter]:
    """Returns the conversions for a checkpoint with tensors of these names, [] if none of them is packed."""
    return [WeightConverter([*PARTS], ".weight", [_Unpack(quantizer)])] if any(map(_TELLING.search, names)) else []


def forget_conversions(model: Any) -> None:
    """Makes `save_pretrained` write plain weights under their own names."""
    used = getattr(model, "_weight_conversions", None) or []
    model._weight_conversions = [
        each for each in used if not any(isinstance(operation, _Unpack) for operation in getattr(each, "operations", ()))
    ]


class _Unpack(ConversionOps):
    """Computes the weight of one layer from its packed arrays.

    hf_quantizer  transformers asks whether a conversion has one, and keeps the types of its arrays then
    """

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self, input_dict: dict[str, Any], *args: Any, full_layer_name: str, model: nn.Module, **kwargs: Any
    ) -> dict[str, Tensor]:
        arrays = {PARTS[pattern]: found[0] if isinstance(found, list) else found for pattern, found in input_dict.items()}
        if not arrays.keys().isdisjoint(("bitmask", "gaps", "deflated_gaps")):
            arrays["weight"] = decoded(full_layer_name, arrays)
        weight = floats_of(full_layer_name, arrays) if SCALE in arrays else arrays["weight"]
        return {full_layer_name: weight.to(model.get_parameter(full_layer_name).dtype)}
