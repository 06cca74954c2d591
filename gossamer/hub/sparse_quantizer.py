"""The quantizer of `SparseConfig`, and a function that registers both with transformers.

Models of transformers that `sparsify`, `store_sparse` or `train_sparse` changed get it, too. So `save_pretrained`, which the
Trainer calls, writes plain weights with zeros.
"""

from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer

from gossamer.hub.sparse_config import METHOD, SparseConfig
from gossamer.runtime.modules.when_held import WHEN_HELD


def register() -> None:
    """Registers with transformers. Further calls do nothing."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(SparseConfig)
        register_quantizer(METHOD)(SparseQuantizer)
        WHEN_HELD.append(save_as_plain)


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
        hold_weights(model, self.quantization_config)
        if self.quantization_config.weights == "plain":
            self.remove_quantization_config(model)
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


def save_as_plain(model: nn.Module) -> None:
    """Makes a model of transformers save plain weights, and load them again. Other models stay as they are."""
    from transformers.modeling_utils import PreTrainedModel

    from gossamer.hub.masked_loading import load_plain
    from gossamer.sparsity.torch_functions.plain_model import plain_model

    inner: Any = plain_model(model)
    if isinstance(inner, PreTrainedModel) and getattr(inner, "hf_quantizer", None) is None:
        inner.hf_quantizer = SparseQuantizer(SparseConfig(), pre_quantized=False)
        load_plain(inner)
