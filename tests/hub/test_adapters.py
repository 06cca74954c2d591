"""LoRA of peft on a pruned Llama: one kernel for layers and adapters, training, switching, merging with zeros kept."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("peft")
pytest.importorskip("transformers")
import peft
from transformers import LlamaForCausalLM

import gossamer
from gossamer import OptionError
from gossamer.backend.report.report import collect
from gossamer.runtime.target import host
from tests.hub.llama import config, logits

OPTIONS = {"dense": "eager", "min_gain": 0}
TOKENS = torch.arange(40)[None]
HOLD: dict[str, Any] = {
    "plain": gossamer.finalize,
    "masked": lambda model: model,
    "stored": gossamer.store_sparse,
    "int8": gossamer.quantize,
    "int4": lambda model: gossamer.quantize(model, weights="int4", group=16),
}


def adapted(held: str, **options: Any) -> Any:
    """A Llama with 90 % zeros and an adapter of rank 16 whose factors are not zero."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(config(hidden_size=384, intermediate_size=512)).eval()
    grouped = {"rows": 2, "columns": 16, "density": 0.1}
    gossamer.sparsify(base, "block" if held == "int4" else "magnitude", **(grouped if held == "int4" else {"density": 0.1}))
    lora = peft.LoraConfig(r=16, target_modules=["up_proj", "down_proj", "q_proj"], init_lora_weights=False, **options)
    return peft.get_peft_model(HOLD[held](base), lora).eval()


def compiled(model: Any) -> None:
    torch._dynamo.reset()
    model.get_base_model().compile(backend="sparse", options=OPTIONS)


@torch.no_grad()
def out(model: Any) -> Tensor:
    found: Tensor = model(TOKENS).logits
    return found


@pytest.mark.parametrize("held", ["plain", "masked", "int8", "int4"])
def test_layers_and_their_adapters_are_one_kernel(held: str) -> None:
    model = adapted(held)
    expected = out(model)
    compiled(model)
    with collect() as found:
        torch.testing.assert_close(out(model), expected, rtol=1e-3, atol=1e-3)
    linear = [decision for decision in found.decisions if decision.op == "linear" and "lm_head" not in decision.name]
    assert len(linear) >= 3 and all(decision.sparse for decision in linear)
    chains = {decision.reason for decision in linear}
    if held == "int8" and "bytedots" not in host().instructions:  # chains need dot products of bytes
        return
    assert len(chains) == 1 and "in a chain of" in chains.pop()  # the adapters' own products are parts of it


@pytest.mark.parametrize("held", ["plain", "masked", "stored"])
def test_factors_are_trained_as_by_torch(held: str) -> None:
    model = adapted(held).train()
    twin = copy.deepcopy(model)
    compiled(model)
    with collect() as found:
        for each in (model, twin):
            each(TOKENS, labels=TOKENS).loss.backward()
    assert any(decision.sparse for decision in found.decisions)
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    for name, parameter in twin.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(trained[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_adapters_are_switched_without_compiling_again() -> None:
    model = adapted("plain")
    lora = peft.LoraConfig(r=16, target_modules=["up_proj", "down_proj", "q_proj"], init_lora_weights=False)
    model.add_adapter("other", lora)
    expected = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        expected[name] = out(model)
    compiled(model)
    graphs = []
    for name in ("default", "other", "default", "other", "default"):
        model.set_adapter(name)
        with collect() as found:
            torch.testing.assert_close(out(model), expected[name], rtol=1e-4, atol=1e-4)
        graphs.append(len(found.decisions) > 0)
    assert graphs == [True, True, False, False, False]


@pytest.mark.parametrize("held", [*HOLD])
def test_merging_keeps_the_zeros(held: str) -> None:
    model = adapted(held)
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    weight = layer.get_base_layer().weight.detach()
    weight = weight.to_dense().clone() if held == "stored" else weight.clone()
    change = layer.get_delta_weight("default").detach()
    merged: Any = gossamer.merge(model)
    assert type(merged) is LlamaForCausalLM and type(merged.model.layers[0].mlp.up_proj) is torch.nn.Linear
    found = merged.model.layers[0].mlp.up_proj.weight
    torch.testing.assert_close(found.detach(), torch.where(weight != 0, weight + change, 0), rtol=1e-5, atol=1e-6)
    assert found.eq(0).float().mean() > 0.85 and merged.lm_head.weight.ne(0).all()
    assert logits(merged).isfinite().all()


class Mixed(torch.nn.Module):
    """Layers of several kinds that peft adapts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.conv = torch.nn.Embedding(16, 8), torch.nn.Conv1d(8, 8, 3, padding=1)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.words(tokens).mT).mT
        found: Tensor = self.attention(x, x, x)[0]
        return found


@torch.no_grad()
def test_merging_keeps_the_zeros_of_convolutions_embeddings_and_attention() -> None:
    model = Mixed()
    names = ["words.weight", "conv.weight", "attention.in_proj_weight", "attention.out_proj.weight"]
    before = {}
    for name in names:
        model.get_parameter(name)[torch.rand_like(model.get_parameter(name)) < 0.8] = 0
        before[name] = model.get_parameter(name).clone()
    lora = peft.LoraConfig(r=4, target_modules=["words", "conv", "attention"], init_lora_weights=False)
    merged = gossamer.merge(peft.get_peft_model(model, lora))
    for name in names:
        found = merged.get_parameter(name)
        assert torch.equal(found == 0, before[name] == 0) and not torch.equal(found, before[name])


def test_peft_by_itself_fills_the_zeros() -> None:
    merged = adapted("plain").merge_and_unload()
    assert merged.model.layers[0].mlp.up_proj.weight.eq(0).float().mean() < 0.01


def test_what_cannot_be_merged_is_refused() -> None:
    with pytest.raises(OptionError, match=r"peft\.get_peft_model"):
        gossamer.merge(torch.nn.Linear(4, 4))
    with pytest.raises(OptionError, match="not plain LoRA"):
        gossamer.merge(adapted("plain", use_dora=True))
    model = adapted("plain")
    model.merge_adapter()
    with pytest.raises(OptionError, match="is merged already"):
        gossamer.merge(model)
