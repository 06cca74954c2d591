"""Experts whose weights are parts of one parameter: pruned, masked, trained, saved."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM

import gossamer
from gossamer.sparsity.torch_functions.open_experts import open_experts
from tests.backend.harness import compile_and_run

SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "use_cache": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "mixtral":
        model: Any = MixtralForCausalLM(MixtralConfig(**SIZES))
    else:
        model = GptOssForCausalLM(GptOssConfig(**SIZES, layer_types=["full_attention"]))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)
    return model.eval()


def experts_of(model: Any) -> Any:
    return model.model.layers[0].mlp.experts


def batches(count: int = 4) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, 60, (2, 16), generator=generator)} for _ in range(count)]


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
def test_opened_experts_compute_what_they_did(kind: str) -> None:
    model, batch = model_of(kind), batches(1)[0]
    with torch.no_grad():
        before = model(**batch).logits
        with open_experts(model):
            assert len([name for name, m in model.named_modules() if isinstance(m, nn.Linear) and ".experts." in name]) == 8
            torch.testing.assert_close(model(**batch).logits, before, rtol=1e-4, atol=1e-5)
        assert not [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and ".experts." in name]
        assert "forward" not in vars(experts_of(model))


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
def test_each_expert_is_pruned_for_its_own_tokens(kind: str) -> None:
    model, data = model_of(kind), batches()
    kept = experts_of(model).gate_up_proj
    dense, by_size = copy.deepcopy(model), copy.deepcopy(model)
    report = gossamer.prune(model, data, sparsity=0.5)
    names = [layer.name for layer in report.layers if "experts" in layer.name]
    assert names == [f"model.layers.0.mlp.experts.{e}.{part}" for e in range(4) for part in ("gate_up_proj", "down_proj")]
    assert not any("Experts" in name for name in report.left)
    assert experts_of(model).gate_up_proj is kept
    for weight in (experts_of(model).gate_up_proj, experts_of(model).down_proj):
        assert (weight == 0).float().mean((1, 2)).tolist() == pytest.approx([0.5] * 4, abs=0.01)
    gossamer.prune(by_size, data, sparsity=0.5, method="magnitude")
    with torch.no_grad():
        wanted = dense(**data[0]).logits
        assert (model(**data[0]).logits - wanted).norm() < 0.9 * (by_size(**data[0]).logits - wanted).norm()


def test_experts_that_no_token_reaches_stay_dense() -> None:
    model = model_of("mixtral")
    router = model.model.layers[0].mlp.gate
    with torch.no_grad():
        router.weight.zero_()  # the first two win every tie
    report = gossamer.prune(model, batches(), sparsity=0.5)
    unreached = [layer for layer in report.layers if layer.note and "experts" in layer.name]
    assert len(unreached) == 4
    assert all("the data do not reach it" in layer.note for layer in unreached)


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
def test_masks_of_experts_are_found_and_made_plain(kind: str) -> None:
    model, batch = model_of(kind), batches(1)[0]
    gossamer.sparsify(model, "magnitude", density=0.2)
    assert (experts_of(model).gate_up_proj != 0).float().mean((1, 2)).tolist() == pytest.approx([0.2] * 4, abs=0.01)
    with torch.no_grad():
        wanted = model(**batch).logits
        run = compile_and_run(lambda ids: model(input_ids=ids).logits, batch["input_ids"])
    names = [d.name for d in run.regions if d.op == "experts"]
    assert [name.rpartition(".")[2] for name in names] == ["gate_up_proj", "down_proj"]
    torch.testing.assert_close(run.output, wanted, rtol=1e-4, atol=1e-5)
    gossamer.finalize(model)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, wanted)


def test_two_of_four_lie_along_the_inputs() -> None:
    for kind in ("mixtral", "gpt-oss"):
        model = model_of(kind)
        gossamer.sparsify(model, "nm", n=2, m=4, only="*.experts")
        weight = experts_of(model).gate_up_proj
        rows = weight.mT if kind == "gpt-oss" else weight
        assert ((rows != 0).unflatten(2, (-1, 4)).sum(3) == 2).all()


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
def test_experts_train_sparse_and_are_saved(kind: str, tmp_path: Path) -> None:
    model, batch = model_of(kind).train(), batches(1)[0]["input_ids"]
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    training = gossamer.train_sparse(model, optimizer, "gradual", steps=4, sparsity=0.8)
    for _ in range(5):
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    assert training.densities()["model.layers.0.mlp.experts.gate_up_proj"] == pytest.approx(0.2, abs=0.01)
    training.detach()
    assert float((experts_of(model).down_proj == 0).float().mean()) == pytest.approx(0.8, abs=0.01)
    gossamer.save(model, tmp_path / "model.safetensors")
    loaded = model_of(kind)
    gossamer.load(loaded, tmp_path / "model.safetensors")
    assert torch.equal(experts_of(loaded).down_proj, experts_of(model).down_proj)


QUANTIZED = [("int8", None, 0.02), ("int8", 16, 0.02), ("int4", None, 0.2)]


def quantized_model(kind: str, weights: Any, group: int | None) -> tuple[Any, Any]:
    """A model with experts in integers, and the same with floats of these values."""
    model = model_of(kind)
    plain = copy.deepcopy(model)
    gossamer.quantize(model, only="*.experts", weights=weights, group=group)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            getattr(experts_of(plain), name).copy_(getattr(experts_of(model), name))
    return model, plain


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
@pytest.mark.parametrize(("weights", "group", "error"), QUANTIZED)
def test_quantized_experts_compute_with_the_rounded_weights(kind: str, weights: Any, group: int | None, error: float) -> None:
    before, batch = model_of(kind), batches(1)[0]
    model, plain = quantized_model(kind, weights, group)
    for name in ("gate_up_proj", "down_proj"):
        exact, rounded = getattr(experts_of(before), name), getattr(experts_of(model), name)
        assert rounded.shape == exact.shape
        assert (rounded - exact).norm() < error * exact.norm()
    with torch.no_grad():
        wanted = plain(**batch).logits
        torch.testing.assert_close(model(**batch).logits, wanted, rtol=1e-3, atol=1e-4)
        compiled = torch.compile(model.forward, backend="sparse", fullgraph=True, options={"dense": "eager"})
        torch.testing.assert_close(compiled(**batch).logits, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
@pytest.mark.parametrize(("weights", "group", "error"), QUANTIZED)
def test_quantized_experts_are_copied_saved_and_loaded(
    kind: str, weights: Any, group: int | None, error: float, tmp_path: Path
) -> None:
    model, batch = quantized_model(kind, weights, group)[0], batches(1)[0]
    gossamer.save(model, tmp_path / "model.safetensors")
    again = gossamer.load(model_of(kind), tmp_path / "model.safetensors")
    with torch.no_grad():
        wanted = model(**batch).logits
        assert torch.equal(again(**batch).logits, wanted)
        assert torch.equal(copy.deepcopy(model)(**batch).logits, wanted)
    torch.save(model, tmp_path / "model.pt")
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(**batch).logits, wanted)
    other = quantized_model(kind, weights, group)[0]
    with torch.no_grad():
        experts_of(other).down_proj_scale.zero_()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(other(**batch).logits, wanted)


def test_a_router_trains_before_quantized_experts() -> None:
    model, plain = quantized_model("mixtral", "int8", None)
    batch = batches(1)[0]["input_ids"]
    for each in (model.train(), plain.train()):
        each(input_ids=batch, labels=batch).loss.backward()
    for own, wanted in ((each.model.layers[0].mlp.gate.weight.grad for each in pair) for pair in [(model, plain)]):
        torch.testing.assert_close(own, wanted, rtol=1e-3, atol=1e-5)


def test_experts_are_quantized_where_they_are_named() -> None:
    model = model_of("mixtral")
    gossamer.prune(model, batches(), sparsity=0.5)
    with pytest.warns(UserWarning, match="1 MixtralExperts \\(name experts in `only`\\)"):
        gossamer.quantize(model)
    assert not hasattr(experts_of(model), "down_proj_codes")
    gossamer.quantize(model, only=[type(experts_of(model))])
    assert repr(experts_of(model)) == "QuantizedExperts(\n  4 experts, int8\n  (act_fn): SiLUActivation()\n)"


def test_experts_that_integers_cannot_hold_stay_floats() -> None:
    model = model_of("mixtral")
    experts_of(model).act_fn = nn.ELU()
    with pytest.warns(UserWarning, match="its activation is none that experts have"):
        gossamer.quantize(model, only="*.experts")
    with torch.no_grad():
        experts_of(model).act_fn = nn.SiLU()
        experts_of(model).down_proj[2, 0, 0] = torch.nan
    with pytest.raises(gossamer.GossamerError, match=r"'model\.layers\.0\.mlp\.experts\.down_proj' of shape"):
        gossamer.quantize(model, only="*.experts")
