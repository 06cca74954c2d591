"""`gossamer.SparseConfig` in `from_pretrained` and `save_pretrained` of transformers."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, BertForSequenceClassification

import gossamer
from gossamer import OptionError, SparseConfig
from gossamer.backend.report.report import collect
from gossamer.sparsity.pruning.mask import is_masked
from gossamer.sparsity.pruning.stored_layers import is_stored
from gossamer.sparsity.quantization.grouped_linear import GroupedLinear
from gossamer.sparsity.quantization.quantized_linear import QuantizedLinear
from tests.hub.llama import TOKENS, config_of, logits, saved

HELD = {
    "plain": lambda layer: type(layer) is torch.nn.Linear,
    "masked": is_masked,
    "stored": is_stored,
    "int8": lambda layer: isinstance(layer, QuantizedLinear),
    "int4": lambda layer: isinstance(layer, GroupedLinear),
}


def zeros(weight: torch.Tensor) -> float:
    return float(weight.eq(0).float().mean())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved(tmp_path / "dense")
    return tmp_path / "dense"


def pruned(folder: Path, weights: str, **options: Any) -> Any:
    config = SparseConfig(0.8, weights=weights, pattern="1x16" if weights == "int4" else "unstructured")  # type: ignore[arg-type]
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [*HELD])
def test_a_model_is_loaded_saved_and_loaded_again(weights: str, dtype: torch.dtype, folder: Path, tmp_path: Path) -> None:
    first = pruned(folder, weights, dtype=dtype)
    assert HELD[weights](first.model.layers[0].mlp.up_proj)  # type: ignore[no-untyped-call]
    first.save_pretrained(tmp_path / "sparse")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse", dtype=dtype)
    assert HELD[weights](again.model.layers[0].mlp.up_proj)  # type: ignore[no-untyped-call]
    assert again.dtype == dtype and torch.equal(logits(again), logits(first))
    assert again.lm_head.weight is again.model.embed_tokens.weight and zeros(again.lm_head.weight) == 0
    says = config_of(tmp_path / "sparse").get("quantization_config")
    assert says is None if weights == "plain" else says["weights"] == weights


@pytest.mark.parametrize("weights", [*HELD])
def test_a_folder_has_plain_weights_with_zeros(weights: str, folder: Path, tmp_path: Path) -> None:
    pruned(folder, weights).save_pretrained(tmp_path / "sparse")
    dense, sparse = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "sparse"))
    assert {name: tensor.shape for name, tensor in sparse.items()} == {name: tensor.shape for name, tensor in dense.items()}
    for name, tensor in sparse.items():
        assert zeros(tensor) == pytest.approx(0.8 if name.endswith("proj.weight") else 0, abs=0.03)


def test_without_gossamer_a_folder_loads_as_plain_zeros(folder: Path, tmp_path: Path) -> None:
    """In a process in which nothing of Gossamer is imported and torch loads no plug-ins."""
    model = pruned(folder, "stored")
    model.save_pretrained(tmp_path / "sparse")
    program = f"""
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "sparse")!r})
torch.save(model(torch.arange(12)[None]).logits.detach(), {str(tmp_path / "logits")!r})
assert type(model.model.layers[0].mlp.up_proj.weight) is torch.nn.Parameter
assert not any(name.startswith("gossamer.") and "registration" not in name and "checkout" not in name for name in sys.modules)
"""
    alone = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=alone, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "logits"), logits(model))


def test_a_folder_is_known_before_gossamer_is_imported(folder: Path, tmp_path: Path) -> None:
    pruned(folder, "stored").save_pretrained(tmp_path / "sparse")
    program = f"""
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "sparse")!r})
assert type(model.model.layers[0].mlp.up_proj.weight).__name__ == "SparseTensor"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_zeros_of_a_checkpoint_are_kept(folder: Path, tmp_path: Path) -> None:
    plain = pruned(folder, "plain")
    plain.save_pretrained(tmp_path / "plain")
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=SparseConfig(weights="stored"))
    masked = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=SparseConfig(weights="masked"))
    up = plain.model.layers[0].mlp.up_proj.weight
    assert torch.equal(stored.model.layers[0].mlp.up_proj.weight.to_dense(), up)
    assert torch.equal(masked.model.layers[0].mlp.up_proj.weight, up) and not is_masked(masked.lm_head)


def test_layers_are_chosen(folder: Path) -> None:
    config = SparseConfig(pattern="2:4", only="*.mlp.*", skip=["*.down_proj"])
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    layer = model.model.layers[0]
    assert [zeros(each.weight) for each in (layer.mlp.up_proj, layer.mlp.down_proj, layer.self_attn.q_proj)] == [0.5, 0, 0]
    assert layer.mlp.up_proj.weight.view(-1, 4).ne(0).sum(1).max() == 2


def test_another_head_and_missing_weights(folder: Path, tmp_path: Path) -> None:
    """A base model's checkpoint in a model with a new head, which is not pruned by magnitude but as it starts."""
    torch.manual_seed(0)
    options = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50}
    AutoModel.from_config(BertConfig(**options)).save_pretrained(tmp_path / "bert")
    config = SparseConfig(0.5, skip="classifier")
    model = BertForSequenceClassification.from_pretrained(tmp_path / "bert", quantization_config=config)
    assert zeros(model.bert.encoder.layer[0].output.dense.weight) == 0.5 and zeros(model.classifier.weight) == 0


@pytest.mark.parametrize(
    ("first", "then", "choice"),
    [
        (AutoModelForCausalLM, AutoModel, {"skip": "lm_head"}),
        (AutoModelForCausalLM, AutoModel, {"only": "model.layers.*"}),
        (AutoModel, AutoModelForCausalLM, {"only": "layers.*"}),
    ],
)
def test_a_folder_loads_as_a_model_with_another_head(
    first: Any, then: Any, choice: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """Only one of the two classes has the names in the config, which begin with the prefix of the base model there."""
    written = first.from_pretrained(folder, quantization_config=SparseConfig(0.8, weights="stored", **choice))
    written.save_pretrained(tmp_path / "sparse")
    opened = then.from_pretrained(tmp_path / "sparse")
    found, expected = (each.base_model.layers[0].mlp.up_proj.weight for each in (opened, written))
    assert isinstance(found, gossamer.SparseTensor) and torch.equal(found.to_dense(), expected.to_dense())


@pytest.mark.parametrize("weights", ["masked", "stored", "int8"])
def test_a_loaded_model_is_copied_converted_and_compiled(weights: str, folder: Path) -> None:
    model = pruned(folder, weights)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), logits(model))
    assert logits(copy.deepcopy(model).half().float()).isfinite().all()
    torch._dynamo.reset()
    twin.compile(backend="sparse", options={"dense": "eager", "min_gain": 0})
    with collect() as found, torch.no_grad():
        torch.testing.assert_close(twin(TOKENS).logits, logits(model), rtol=1e-3, atol=1e-3)
    assert {decision.op for decision in found.decisions if decision.sparse} >= {"linear"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sparsity": 1.5}, "sparsity is 1.5"),
        ({"weights": "stord"}, "did you mean 'stored'"),
        ({"pattern": "2-4"}, "pattern '2-4' is not known"),
        ({"density": 0.1}, "SparseConfig takes sparsity"),
    ],
)
def test_bad_values_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        SparseConfig(**options)


def test_the_name_is_public() -> None:
    assert gossamer.SparseConfig is SparseConfig
