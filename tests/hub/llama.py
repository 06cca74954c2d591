"""A small Llama with tied embeddings, in a folder that `save_pretrained` has written."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = torch.arange(12)[None]


def config(**options: Any) -> LlamaConfig:
    """Its configuration."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    others = {"num_hidden_layers": 1, "vocab_size": 100, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1}
    return LlamaConfig(**{**sizes, **others, **options})


def saved(folder: Path) -> LlamaForCausalLM:
    """A model with random weights, after it was saved."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config()).eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """What it computes."""
    found: Tensor = model(TOKENS).logits
    return found


def config_of(folder: Path) -> dict[str, Any]:
    """What config.json in a folder says."""
    return dict(json.loads((folder / "config.json").read_text()))
