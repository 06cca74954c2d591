"""Models of transformers with experts: one graph, compiled once, the tokens of eager code, any implementation."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)  # fmt: skip
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from gossamer.backend import sparse
from gossamer.backend.report.report import collect

SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 32, "num_experts_per_tok": 2, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0, "max_position_embeddings": 128,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 0,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
    "qwen3": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, moe_intermediate_size=32, num_experts=4)),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=4)),
    "deepseek": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(**SIZES, **LATENT, moe_intermediate_size=32, n_routed_experts=4, n_shared_experts=1)
    ),
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4, layer_types=["full_attention"])),
}
OPTIONS = {"dense": "eager", "strict": True}


def model_of(name: str, implementation: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)
    model.set_experts_implementation(implementation)
    return model


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, "grouped_mm") for name in MODELS), ("mixtral", "eager"), ("gpt-oss", "eager"), ("mixtral", "batched_mm"),
        ("gpt-oss", "batched_mm"),
    ],
)  # fmt: skip
def test_a_model_is_one_graph_with_one_operation_for_its_experts(name: str, implementation: str) -> None:
    model = model_of(name, implementation)
    ids = torch.randint(0, 60, (2, 9))
    with torch.no_grad(), collect() as collected:
        compiled = torch.compile(model.forward, backend=sparse, fullgraph=True, options=OPTIONS)
        found = compiled(input_ids=ids, use_cache=False).logits
        wanted = model.double()(input_ids=ids, use_cache=False).logits if implementation == "eager" else None
    taken = [d for d in collected.decisions if d.op == "experts"]
    assert len(taken) == 2
    assert all(d.sparse and "4 experts, 2 for each token" in d.reason and "one operation" in d.reason for d in taken)
    if wanted is None:
        other = model_of(name, "eager").double()
        with torch.no_grad():
            wanted = other(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-4)


def test_eager_code_runs_the_loop_as_ever() -> None:
    model = model_of("mixtral", "eager")
    experts = model.model.layers[0].mlp.experts
    called = []
    experts.act_fn.register_forward_hook(lambda *_: called.append(1))
    with torch.no_grad():
        model(input_ids=torch.randint(0, 60, (2, 9)))
    assert len(called) > 1


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (None, 2)])
def test_batches_of_all_lengths_and_routings_are_compiled_once(dynamic: bool | None, graphs: int) -> None:
    """Without `dynamic`, Dynamo makes a first graph of fixed sizes, for any backend."""
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=4)
    config._experts_implementation = "grouped_mm"
    block: Any = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, 0, 0.3)

    eager = copy.deepcopy(block)
    eager.experts.config._experts_implementation = "eager"
    before = counters["stats"]["unique_graphs"]  # Dynamo may call a backend twice for one graph
    compiled = torch.compile(block, backend=sparse, options=OPTIONS, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for call in range(200):
            # sizes that are equal at first are taken for the same one
            x = torch.randn(2 + call % 3, 5 + call % 37, 32) + (call % 5) * torch.randn(32)
            found = compiled(x)
            if call % 20 == 0:
                torch.testing.assert_close(found, eager(x), rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] - before == graphs


@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_a_model_compiles_once_for_batches_of_all_lengths(name: str) -> None:
    model, eager = model_of(name, "grouped_mm"), model_of(name, "eager")
    before = counters["stats"]["unique_graphs"]
    compiled = torch.compile(model.forward, backend=sparse, fullgraph=True, dynamic=True, options=OPTIONS)
    with torch.no_grad():
        for call in range(40):
            ids = torch.randint(0, 60, (2 + call % 4, 7 + 5 * call % 31))
            found = compiled(input_ids=ids, use_cache=False).logits
            wanted = eager(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
            assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    assert counters["stats"]["unique_graphs"] - before == 1


def test_generate_writes_the_tokens_of_eager_code() -> None:
    model = model_of("qwen3", "grouped_mm")
    ids = torch.randint(3, 60, (2, 7))
    with torch.no_grad():
        wanted = model.generate(ids, max_new_tokens=8, do_sample=False)
        model.forward = torch.compile(model.forward, backend=sparse, dynamic=True, options=OPTIONS)
        with collect() as collected:
            found = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, wanted)
    assert any(d.op == "experts" and d.sparse for d in collected.decisions)
