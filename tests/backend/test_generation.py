"""Generation by transformers' `generate`, token by token with a cache: the same tokens as eager, chains in prefill and decode,
and no graph more with more tokens."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from gossamer.backend.report.report import Decision, collect
from tests.backend.harness import prune_

transformers = pytest.importorskip("transformers")

_SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip


def language_model(family: str, layers: int, **options: Any) -> nn.Module:
    """A small causal model with random weights, its linear layers pruned."""
    config = getattr(transformers, f"{family}Config" if family != "Gemma3" else "Gemma3TextConfig")
    torch.manual_seed(0)
    made: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config(num_hidden_layers=layers, **_SMALL, **options))
    model = made.eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            prune_(module)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
    return model


def generated(model: nn.Module, **options: Any) -> torch.Tensor:
    prompt = torch.arange(20)[None] * 7 % 90 + 2
    with torch.no_grad():
        found: torch.Tensor = model.generate(prompt, do_sample=False, **options)  # type: ignore[operator]
    return found


def compiled(model: nn.Module, **options: Any) -> list[list[Decision]]:
    """Checks the tokens; returns the decisions about the linear layers of each graph that torch made."""
    expected = generated(model, **options)
    model.compile(backend="sparse", options={"dense": "eager", "min_gain": 0, "strict": True})
    with collect() as collected:
        found = generated(model, **options)
    assert torch.equal(found, expected)
    assert not counters["graph_break"]
    assert all(decision.sparse for decision in collected.decisions)
    graphs = counters["gossamer"]["graphs"]
    assert graphs == counters["stats"]["unique_graphs"]
    made = [decision for decision in collected.decisions if decision.op == "linear"]
    each = len(made) // graphs
    return [made[n : n + each] for n in range(0, len(made), each)]


def reasons(decisions: list[Decision]) -> list[str]:
    return [decision.reason.removeprefix("in a chain of ") for decision in decisions[:-1]]


def test_a_cache_that_grows() -> None:
    """Norms of heads, and a window."""
    model = language_model("Gemma3", 1, head_dim=16, sliding_window=8, layer_types=["sliding_attention"])
    prefill, *decode = compiled(model, max_new_tokens=5)
    assert reasons(prefill) == ["7"] * 7
    assert len(decode) == 2  # the second for any length
    assert all(reasons(step) == ["3"] * 3 + ["4"] * 4 for step in decode)


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}])
def test_a_soft_cap_and_heads_that_share_keys(cache: dict[str, str]) -> None:
    """Each key of the cache is read once, however attention is written; in a static cache those alone that are there."""
    model = language_model("Gemma2", 1, head_dim=16, sliding_window=12, query_pre_attn_scalar=16)
    with collect() as collected:
        compiled(model, max_new_tokens=5, **cache)
    steps = [d for d in collected.decisions if d.schedule == "cache"]
    assert len(steps) == (1 if cache else 2)
    assert all(d.reason.startswith("2 heads at a time") for d in steps)


def test_a_static_cache() -> None:
    """Its memory, which begins as zeros, is no weight: nothing is said of it, and its sizes may change."""
    model = language_model("Qwen3", 2, head_dim=16)
    prefill, decode = compiled(model, max_new_tokens=5, cache_implementation="static")
    # queries, keys and values together; from attention to those of the next layer; the last layer
    assert reasons(prefill) == reasons(decode) == ["3"] * 3 + ["7"] * 7 + ["4"] * 4
