"""A training step of transformers' models on padded batches: attention is taken, losses and gradients are those of eager."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.backend.harness import compile_and_run

transformers = pytest.importorskip("transformers")

_SMALL: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_DECODER = {**_SMALL, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48, "pad_token_id": 0}
TOKENS = 40


def model(family: str, dropout: float, attention: str) -> nn.Module:
    """A small one with random weights, in training."""
    torch.manual_seed(0)
    how: dict[str, Any] = {"attn_implementation": attention}
    if family == "T5":
        config = transformers.T5Config(
            vocab_size=96,
            d_model=32,
            d_kv=16,
            d_ff=48,
            num_layers=2,
            num_heads=2,
            dropout_rate=dropout,
            decoder_start_token_id=0,
        )
        made = transformers.T5ForConditionalGeneration(config)
    elif family == "Bert":
        config = transformers.BertConfig(
            **_SMALL, intermediate_size=48, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **how
        )
        made = transformers.BertForMaskedLM(config)
    else:
        window = {"sliding_window": 16} if family != "Llama" else {}
        name = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
        config = getattr(transformers, name)(**_DECODER, **window, attention_dropout=dropout, **how)
        made = getattr(transformers, f"{family}ForCausalLM")(config)
    trained: nn.Module = made.train()
    return trained


def batch(padding: str) -> dict[str, Tensor]:
    """Three texts of different lengths."""
    ids = torch.randint(1, 96, (3, TOKENS), generator=torch.Generator().manual_seed(0))
    seen = torch.arange(TOKENS) < torch.tensor([TOKENS, 23, 9])[:, None]
    seen = seen if padding == "right" else seen.flip(1)
    return {"input_ids": ids, "attention_mask": seen.long(), "labels": ids.masked_fill(~seen, -100)}


class Loss(nn.Module):
    """That of a batch."""

    def __init__(self, trained: nn.Module) -> None:
        super().__init__()
        self.trained = trained

    def forward(self, **given: Tensor) -> Tensor:
        loss: Tensor = self.trained(**given).loss
        return loss


def step(trained: nn.Module, padding: str, regions: int, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of a compiled step."""
    torch._dynamo.reset()
    loss, given = Loss(trained), batch(padding)

    def of(ids: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = loss(input_ids=ids, attention_mask=seen, labels=labels)
        return found

    counters.clear()
    run = compile_and_run(of, *given.values(), grad=True, **options)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
    assert sum(decision.op == "attention" for decision in run.regions) == regions
    run.output.backward()
    return run.output.detach(), {name: p.grad for name, p in trained.named_parameters() if p.grad is not None}


KINDS = [("Bert", "sdpa", 2), ("Bert", "eager", 2), ("Mistral", "sdpa", 2), ("Gemma2", "eager", 2), ("Gemma3", "sdpa", 2)]
KINDS += [("T5", "eager", 6)]


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize(("family", "attention", "regions"), KINDS)
def test_losses_and_gradients_are_those_of_eager(family: str, attention: str, regions: int, padding: str) -> None:
    trained = model(family, 0.0, attention)
    loss, found = step(trained, padding, regions)
    trained.zero_grad()
    expected = Loss(trained)(**batch(padding))
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    theirs = {name: p.grad for name, p in trained.named_parameters() if p.grad is not None}
    assert found.keys() == theirs.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("family", "attention", "regions"), [KINDS[0], KINDS[3], KINDS[5]])
def test_dropout_is_drawn_anew(family: str, attention: str, regions: int) -> None:
    trained = model(family, 0.5, attention)
    loss, found = step(trained, "right", regions)
    other, _ = step(trained, "right", regions)
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in found.values())
    assert loss != other


def test_inductor_compiles_what_is_around() -> None:
    trained = model("Bert", 0.0, "eager")
    loss, found = step(trained, "left", 2, dense="inductor")
    trained.zero_grad()
    expected = Loss(trained)(**batch("left"))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    for name, p in trained.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-5)
