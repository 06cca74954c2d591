"""Small networks of `transformers` with random weights, one of each architecture: texts, images and sounds."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pruning import prune

TEXTS = (
    "albert", "bart", "bert", "distilbert", "gemma2", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi", "qwen2", "t5",
    "xlm-roberta",
)  # fmt: skip
IMAGES = ("convnext", "deit", "dinov2", "mobilenet_v2", "mobilevit", "regnet", "resnet", "segformer", "vit")
SOUNDS = ("wav2vec2",)

BATCH, TOKENS, PIXELS, SAMPLES = 2, 64, 160, 16_000

# Sizes that replace those of a configuration, for each name that it has: four layers of 384 features.
_SIZES: dict[str, Any] = {
    "vocab_size": 1000, "max_position_embeddings": 256, "n_positions": 256, "image_size": PIXELS, "pad_token_id": 0,
    "num_hidden_layers": 4, "num_layers": 4, "n_layer": 4, "n_layers": 4, "encoder_layers": 4, "decoder_layers": 4,
    "hidden_size": 384, "d_model": 384, "n_embd": 384, "dim": 384, "word_embed_proj_dim": 384, "d_kv": 64, "head_dim": 64,
    "num_attention_heads": 6, "num_heads": 6, "n_head": 6, "n_heads": 6, "encoder_attention_heads": 6,
    "decoder_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 1536, "d_ff": 1536, "ffn_dim": 1536,
    "hidden_dim": 1536, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536,
}  # fmt: skip
# Architectures with stages of several widths. They keep the sizes of their configuration.
_STAGED = {"convnext", "mobilenet_v2", "mobilevit", "regnet", "resnet", "segformer"}


class Network(nn.Module):
    """A network that returns one tensor, the result of its last layer. Dropout is off, so each call gives the same."""

    def __init__(self, name: str) -> None:
        super().__init__()
        from transformers import AutoModel
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        default = CONFIG_MAPPING[name]()
        sizes = {} if name in _STAGED else {key: value for key, value in _SIZES.items() if hasattr(default, key)}
        self.model: Any = AutoModel.from_config(CONFIG_MAPPING[name](**sizes))
        self.decodes = bool(getattr(default, "is_encoder_decoder", False))
        self.takes_cache = "use_cache" in inspect.signature(self.model.forward).parameters
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def forward(self, given: Tensor) -> Tensor:
        further: dict[str, Any] = {"use_cache": False} if self.takes_cache else {}
        if self.decodes:
            further["decoder_input_ids"] = given
        result: Tensor = self.model(given, **further)[0]
        return result


def network(name: str) -> tuple[Network, Tensor]:
    """A network and what it is called with: tokens [2, 64], images [2, 3, 160, 160] or samples [2, 16000]."""
    torch.manual_seed(0)
    made = Network(name)
    for module in made.modules():  # small weights let activations vanish
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    if name in TEXTS:
        return made, torch.randint(3, _SIZES["vocab_size"], (BATCH, TOKENS))
    return made, torch.randn(BATCH, SAMPLES) if name in SOUNDS else torch.randn(BATCH, 3, PIXELS, PIXELS)


@torch.no_grad()
def pruned(model: nn.Module, sparsity: float) -> list[str]:
    """Prunes linear layers and convolutions one by one, by magnitude, and gives their names.

    Convolutions of the input and depthwise ones stay as they are.
    """
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.dim() < 2 or isinstance(module, nn.Embedding):
            continue
        if weight.dim() > 2 and (getattr(module, "groups", 1) > 1 or getattr(module, "in_channels", 0) <= 3):
            continue
        prune(weight.flatten(1), "unstructured", sparsity)
        found.append(name)
    return found
