"""Models of transformers under masks or with stored weights: they are saved as plain zeros, and training resumes from there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils import prune

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, Wav2Vec2Config, Wav2Vec2Model

import gossamer
from tests.hub.llama import config, logits


def made(held: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config())
    gossamer.sparsify(model, "magnitude", density=0.1)
    return gossamer.store_sparse(model) if held == "stored" else model


def trainer(model: Any, folder: Path) -> Trainer:
    draw = torch.Generator().manual_seed(0)
    data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(100, (24, 16), generator=draw)]
    arguments = TrainingArguments(
        str(folder), max_steps=6, save_steps=3, use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=1e-2,
        per_device_train_batch_size=4,
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=data)


@pytest.mark.parametrize("held", ["masked", "stored"])
def test_the_trainer_saves_plain_zeros_and_resumes(held: str, tmp_path: Path) -> None:
    model = made(held)
    trainer(model, tmp_path).train()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    assert type(plain.model.layers[0].mlp.up_proj.weight) is torch.nn.Parameter
    assert plain.model.layers[0].mlp.up_proj.weight.eq(0).float().mean() == pytest.approx(0.9, abs=0.01)
    torch.testing.assert_close(logits(plain), logits(model.eval()))
    resumed = made(held)
    trainer(resumed, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    torch.testing.assert_close(logits(resumed.eval()), logits(model), rtol=0, atol=1e-6)


def test_a_recipe_that_stores_weights_is_saved_while_it_trains(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gossamer.train_sparse(model, optimizer, "rigl", sparsity=0.9, steps=8, every=2, store=True, skip="lm_head")
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model.eval()))


def test_whatever_holds_a_tensor_its_present_value_is_saved(tmp_path: Path) -> None:
    """Hooks of torch.nn.utils.prune compute the tensor in the next forward pass only."""
    model = made("masked")
    names = set(AutoModelForCausalLM.from_config(config()).state_dict())
    table, layer, norm = model.model.embed_tokens, model.model.layers[0].mlp.up_proj, model.model.norm
    with torch.no_grad():
        table.weight[torch.rand_like(table.weight) < 0.8] = 0
        expected = table.weight.clone()
    gossamer.store_sparse(model, only="model.embed_tokens")
    layer.bias = torch.nn.Parameter(torch.randn(layer.out_features))
    for module, name in ((norm, "weight"), (layer, "bias")):
        prune.l1_unstructured(module, name, 0.5)
    with torch.no_grad():
        norm.weight_orig.mul_(2)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == names | {"model.layers.0.mlp.up_proj.bias"}
    assert torch.equal(saved["model.embed_tokens.weight"], expected)
    assert torch.equal(saved["model.norm.weight"], norm.weight_orig * norm.weight_mask)
    assert torch.equal(saved["model.layers.0.mlp.up_proj.bias"], layer.bias_orig * layer.bias_mask)


def test_other_masks_are_taken_from_plain_weights() -> None:
    first, second = made("masked"), made("masked")
    plain = made("masked").state_dict()
    state = gossamer.finalize(made("masked")).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].roll(1, 0)
    first.load_state_dict(state)
    assert torch.equal(first.get_submodule("model.layers.0.mlp.up_proj").weight, state[name])
    second.load_state_dict(plain)  # as before, by the names under masks
    assert torch.equal(logits(second), logits(made("masked")))


class Classifier(torch.nn.Module):
    """A model around a model of transformers. It uses one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.first = AutoModelForCausalLM.from_config(config()), torch.nn.Linear(64, 8)
        self.second = self.first


@pytest.mark.parametrize("around", [True, False])
def test_a_model_saves_and_loads_plain_weights_if_a_part_or_a_module_around_it_was_pruned(around: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole, other = Classifier().eval(), Classifier().eval()
    for model in (whole, other):
        gossamer.sparsify(model if around else model.inner.model, "magnitude", density=0.2)
    whole.inner.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert zeros(plain) > 0.5
    torch.testing.assert_close(logits(plain), logits(whole.inner))
    other.inner.load_state_dict(plain.state_dict())
    torch.testing.assert_close(logits(other.inner), logits(whole.inner))
    whole.load_state_dict(gossamer.finalize(other).state_dict())
    torch.testing.assert_close(whole.second.weight, other.first.weight)


def zeros(model: Any) -> float:
    return float(model.model.layers[0].mlp.up_proj.weight.eq(0).float().mean())


def test_a_finalized_model_saves_the_state_that_it_is_given(tmp_path: Path) -> None:
    model = gossamer.finalize(made("masked"))
    averaged = {name: tensor / 2 for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=dict(averaged))  # transformers empties it
    assert model.hf_quantizer is None
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(tensor, averaged[name]), name


def test_norms_of_the_architecture_keep_their_names(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 32}
    convs = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16}
    torch.manual_seed(0)
    model = Wav2Vec2Model(Wav2Vec2Config(**sizes, **convs, num_conv_pos_embedding_groups=2)).eval()
    gossamer.sparsify(model, "magnitude", density=0.3).save_pretrained(tmp_path)
    plain, sound = Wav2Vec2Model.from_pretrained(tmp_path).eval(), torch.randn(1, 400)
    assert plain.encoder.layers[0].attention.k_proj.weight.eq(0).float().mean() == pytest.approx(0.7, abs=0.01)
    with torch.no_grad():
        torch.testing.assert_close(plain(sound).last_hidden_state, model(sound).last_hidden_state)


def test_models_of_others_stay_as_they_are(tmp_path: Path) -> None:
    layer = gossamer.sparsify(torch.nn.Sequential(torch.nn.Linear(8, 8)), "magnitude", density=0.5)
    assert not hasattr(layer, "hf_quantizer")
    dense = AutoModelForCausalLM.from_config(config())
    dense.save_pretrained(tmp_path)
    assert getattr(dense, "hf_quantizer", None) is None and load_file(tmp_path / "model.safetensors")
