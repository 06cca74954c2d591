"""Experts of transformers whose weights store their nonzeros alone: trained, copied, saved, converted, made plain again."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import gossamer
from gossamer import SparseTensor
from gossamer.dialects.errors import OptionError
from tests.sparsity.test_experts_of_transformers import batches, experts_of, model_of

KINDS = ["mixtral", "gpt-oss"]


def pair_of(kind: str) -> tuple[Any, Any]:
    """A model with stored weights, and one with the same in plain weights with zeros."""
    model = gossamer.finalize(gossamer.sparsify(model_of(kind), "magnitude", density=0.2, only="*.experts"))
    return gossamer.store_sparse(copy.deepcopy(model), only="*.experts"), model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**batches(1)[0]).logits
    return found


@pytest.mark.parametrize("how", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", KINDS)
def test_stored_experts_compute_as_plain_ones(kind: str, how: str, recwarn: pytest.WarningsRecorder) -> None:
    stored, plain = pair_of(kind)
    stored.config._experts_implementation = how
    assert not [each for each in recwarn if "store_sparse" in str(each.message)]
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts_of(stored), name)
        assert isinstance(weight, SparseTensor) and weight.shape == getattr(experts_of(plain), name).shape
        assert weight.nnz < 0.21 * weight.numel()
    assert "4 experts, 20.0% of their weights stored" in repr(experts_of(stored))
    torch.testing.assert_close(logits(stored), logits(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_say_what_is_stored(kind: str) -> None:
    model = gossamer.sparsify(model_of(kind), "magnitude", density=0.2, only="*.experts")
    with torch.no_grad():
        experts_of(model).parametrizations.down_proj.original.zero_()
        wanted = logits(model)
        gossamer.store_sparse(model, only="*.experts")
    assert experts_of(model).down_proj.nnz > 0.19 * experts_of(model).down_proj.numel()
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_stored_experts_train_as_plain_ones_under_masks(kind: str) -> None:
    stored, plain = pair_of(kind)
    masks = {name: getattr(experts_of(plain), name).detach() != 0 for name in ("gate_up_proj", "down_proj")}
    ids = batches(1)[0]["input_ids"]
    losses = list[list[float]]()
    for model in (stored.train(), plain.train()):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        losses.append([])
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            if model is plain:
                for name, mask in masks.items():
                    getattr(experts_of(plain), name).grad.mul_(mask)
            optimizer.step()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
    assert losses[0][-1] < losses[0][0]
    assert isinstance(experts_of(stored).down_proj.grad, SparseTensor)
    for name in masks:
        torch.testing.assert_close(
            getattr(experts_of(stored), name).to_dense(), getattr(experts_of(plain), name).detach(), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("kind", KINDS)
def test_stored_experts_are_copied_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    stored, _ = pair_of(kind)
    wanted = logits(stored)
    assert torch.equal(logits(copy.deepcopy(stored)), wanted)
    torch.save(stored, tmp_path / "model.pt")
    assert torch.equal(logits(torch.load(tmp_path / "model.pt", weights_only=False)), wanted)
    torch.save(stored.state_dict(), tmp_path / "state.pt")
    gossamer.save(stored, tmp_path / "model.safetensors")
    for load in (
        lambda model: gossamer.load(model, tmp_path / "model.safetensors"),
        lambda model: model.load_state_dict(torch.load(tmp_path / "state.pt")),
    ):
        other = copy.deepcopy(stored)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0)
        load(other)
        assert torch.equal(logits(other), wanted)
    plain = gossamer.load(model_of(kind), tmp_path / "model.safetensors")
    torch.testing.assert_close(logits(plain), wanted, rtol=1e-4, atol=1e-5)


def test_transformers_saves_and_loads_plain_experts(tmp_path: Path) -> None:
    stored, plain = pair_of("mixtral")
    stored.save_pretrained(tmp_path)
    loaded = type(stored).from_pretrained(tmp_path).eval()
    assert torch.equal(experts_of(loaded).down_proj, experts_of(plain).down_proj)
    torch.testing.assert_close(logits(loaded), logits(stored), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_other_types_and_the_way_back(kind: str) -> None:
    stored, plain = pair_of(kind)
    wanted = logits(stored)
    torch.testing.assert_close(logits(copy.deepcopy(stored).double()).float(), wanted, rtol=1e-4, atol=1e-5)
    assert (logits(copy.deepcopy(stored).bfloat16()).float() - wanted).abs().max() < 0.03 * wanted.abs().max()
    stored.requires_grad_(False)
    gossamer.finalize(stored)
    assert type(experts_of(stored)) is type(experts_of(plain))
    for name, weight in experts_of(plain).named_parameters():
        own = experts_of(stored).get_parameter(name)
        assert type(own) is nn.Parameter and not own.requires_grad and torch.equal(own, weight)
    torch.testing.assert_close(logits(stored), wanted, rtol=1e-4, atol=1e-5)


def test_what_wants_plain_experts_says_so() -> None:
    stored, _ = pair_of("mixtral")
    again = [experts_of(stored).gate_up_proj, experts_of(stored).down_proj]
    assert gossamer.store_sparse(stored, only="*.experts") is stored
    assert [experts_of(stored).gate_up_proj, experts_of(stored).down_proj] == again
    optimizer = torch.optim.SGD(stored.parameters(), 0.1)
    for change in (
        lambda: gossamer.prune(stored, batches(), sparsity=0.9, only="*.experts"),
        lambda: gossamer.sparsify(stored, "magnitude", density=0.1, only="*.experts"),
        lambda: gossamer.train_sparse(stored, optimizer, "rigl", steps=4, sparsity=0.8, only="*.experts"),
    ):
        with pytest.raises(OptionError, match=r"stores only its nonzeros.*call gossamer\.finalize\(model\)"):
            change()
    with pytest.warns(UserWarning, match="StoredExperts .*stored as nonzeros"):
        gossamer.quantize(stored, only="*.experts")


def test_dense_experts_and_shared_ones() -> None:
    model = model_of("mixtral")
    with pytest.raises(OptionError, match="nothing is stored sparse"):
        gossamer.store_sparse(model, only="*.experts")
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    made = Qwen3MoeConfig(
        vocab_size=60, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32, **sizes
    )
    shared = gossamer.finalize(gossamer.sparsify(Qwen3MoeForCausalLM(made).eval(), "magnitude", density=0.2, only="*.experts"))
    first, second = (layer.mlp.experts for layer in shared.model.layers)
    second.down_proj = first.down_proj
    gossamer.store_sparse(shared, only="*.experts")
    assert first.down_proj is second.down_proj and isinstance(first.down_proj, SparseTensor)
    gossamer.finalize(shared)
    assert first.down_proj is second.down_proj and type(first.down_proj) is nn.Parameter


def test_experts_in_a_list_of_modules_are_stored_as_linear_layers() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.ModuleList([nn.Linear(32, 48), nn.Linear(48, 32)]) for _ in range(3))
    gossamer.finalize(gossamer.sparsify(model, "magnitude", density=0.2))
    gossamer.store_sparse(model)
    assert all(isinstance(layer.weight, SparseTensor) for expert in model for layer in expert)  # type: ignore[attr-defined]
