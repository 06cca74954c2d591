"""The quantizer of `SparseConfig`, and a function that registers both with transformers.

Models of transformers that `sparsify`, `store_sparse` or `train_sparse` changed have it, too, until `finalize`. So
`save_pretrained`, which the Trainer calls, writes plain weights with zeros. It does not matter whether the user gave these
functions the model, a part of it, or a module around it.
"""

from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer

from gossamer.hub.sparse_config import METHOD, SparseConfig
from gossamer.runtime.modules.when_held import WHEN_HELD
from gossamer.runtime.modules.when_loaded import when_loaded


def register() -> None:
    """Registers with transformers. Further calls do nothing."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(SparseConfig)
        register_quantizer(METHOD)(SparseQuantizer)
        WHEN_HELD.append(_load_plain)
        when_loaded("transformers.modeling_utils", _save_as_plain)


class SparseQuantizer(HfQuantizer):
    """The object that transformers calls while it loads and saves a model with a `SparseConfig`."""

    quantization_config: SparseConfig

    def _process_model_before_weight_loading(self, model: nn.Module, checkpoint_files: Any = None, **kwargs: Any) -> None:
        from gossamer.hub.packed_weights import names_in

        self._names = names_in(checkpoint_files or [])

    def get_weight_conversions(self) -> list[Any]:
        """Returns the conversions of packed weights to plain ones, [] if the files have only plain ones."""
        from gossamer.hub.packed_weights import conversions

        return conversions(self, self._names)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        from gossamer.hub.hold_weights import hold_weights
        from gossamer.hub.packed_weights import forget_conversions

        forget_conversions(model)
        hold_weights(model, self.quantization_config, of_checkpoint=self.pre_quantized)
        if self.quantization_config.weights == "plain":
            self.remove_quantization_config(model)
        elif self.quantization_config.weights in ("masked", "stored"):
            del model.hf_quantizer  # that of the class is in its place, until `finalize`
        model.is_quantized = False  # else transformers refuses `half` and `float`, and its Trainer refuses a compiled model

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Returns the tensors that `save_pretrained` writes."""
        from gossamer.hub.plain_state import plain_state_dict

        return plain_state_dict(model), {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _load_plain(model: nn.Module) -> None:
    from gossamer.hub.masked_loading import load_plain

    load_plain(model)


class _WhileHeld:
    """The quantizer of a model that has none of its own: ours while Gossamer holds weights of it, else None."""

    def __get__(self, model: Any, kind: type | None = None) -> SparseQuantizer | None:
        from gossamer.hub.plain_state import is_held

        held = model is not None and is_held(model)
        return SparseQuantizer(SparseConfig(), pre_quantized=False) if held else None


def _save_as_plain() -> None:
    """Makes models of transformers save plain weights. Models without masks and stored weights stay as they are."""
    from transformers import modeling_utils

    models: Any = modeling_utils.PreTrainedModel
    if "hf_quantizer" not in vars(models):
        models.hf_quantizer = _WhileHeld()
