"""What torch.nn runs as one operation in inference has its pruned weights found, and gives the same."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backend.harness import assert_same, compile_and_run, prune_

PADDED = torch.arange(9) > torch.tensor([[5], [8]])
CAUSAL = torch.ones(9, 9, dtype=torch.bool).triu(1)


class Attention(nn.Module):
    """Attention of x to itself: what comes out, and the weights if asked for."""

    def __init__(self, need_weights: bool, **masks: Tensor) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.arguments: dict[str, Any] = {"need_weights": need_weights, **masks}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        found: tuple[Tensor, Tensor | None] = self.attention(x, x, x, **self.arguments)
        return found


@pytest.mark.parametrize("masks", [{}, {"src_key_padding_mask": PADDED}, {"src_mask": CAUSAL}], ids=["none", "keys", "pairs"])
@pytest.mark.parametrize("written", [{}, {"norm_first": True, "activation": "gelu"}], ids=["post-norm", "pre-norm"])
def test_encoder_layers(written: dict[str, Any], masks: dict[str, Tensor]) -> None:
    layer = prune_(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **written)).eval()
    x = torch.randn(2, 9, 32)
    run = compile_and_run(lambda x: layer(x, **masks), x)
    assert sum(region.op == "linear" for region in run.regions) == 4
    with torch.no_grad():
        assert_same(run.output, layer(x, **masks))


@pytest.mark.parametrize("masks", [{}, {"key_padding_mask": PADDED}, {"attn_mask": CAUSAL}], ids=["none", "keys", "pairs"])
def test_multi_head_attention(masks: dict[str, Tensor]) -> None:
    layer, x = prune_(Attention(False, **masks)).eval(), torch.randn(2, 9, 32)
    run = compile_and_run(layer, x)
    assert len(run.regions) >= 2
    with torch.no_grad():
        assert_same(run.output[0], layer(x)[0])
    assert run.output[1] is None


def test_weights_of_attention_that_are_asked_for() -> None:
    layer, x = prune_(Attention(True)).eval(), torch.randn(2, 9, 32)
    run = compile_and_run(layer, x)
    with torch.no_grad():
        for found, expected in zip(run.output, layer(x), strict=True):
            assert_same(found, expected)
