"""The backend by name in Accelerate, the Trainer and `generate`, whichever package is imported first."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend
from transformers import AutoModelForCausalLM, CompileConfig, Trainer, TrainingArguments

import gossamer
from gossamer.backend.report.report import collect
from gossamer.hub.lists import compile_on_cpus, list_in_accelerate
from tests.hub.llama import TOKENS, config, logits

FIRST = [
    "import transformers",
    "from transformers import AutoModel",
    "import transformers.quantizers.auto",
    "from transformers.generation.configuration_utils import CompileConfig",
    "from accelerate.utils import DynamoBackend",
    "import torch",
    "import gossamer",
]
TOLD = """
import sys
from accelerate.utils import DynamoBackend
from transformers import CompileConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
assert "gossamer" in AUTO_QUANTIZER_MAPPING and DynamoBackend("SPARSE") is DynamoBackend.SPARSE
assert CompileConfig(backend="sparse")._compile_all_devices
assert not {"gossamer.sparsity", "gossamer.backend"} & sys.modules.keys()
"""


@pytest.fixture(autouse=True)
def only_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense code needs no compiler here, and small layers are sparse, too."""
    monkeypatch.setattr("gossamer.backend.compile_module.has_cpp_compiler", lambda: False)
    torch._dynamo.reset()
    AcceleratorState._reset_state(True)


def small(sparsity: float = 0.9) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
    return gossamer.sparsify(torch.nn.Sequential(*layers), "magnitude", density=1 - sparsity)


@pytest.mark.parametrize("first", FIRST)
def test_libraries_are_told_at_any_first_import(first: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"{first}\n{TOLD}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_other_backends_stay_as_they_are() -> None:
    list_in_accelerate()
    compile_on_cpus()
    names = [backend.value for backend in DynamoBackend]
    assert len(names) == len({*names}) and names[-1] == "SPARSE" and DynamoBackend("INDUCTOR") is DynamoBackend.INDUCTOR
    with pytest.raises(ValueError, match="is not a valid"):
        DynamoBackend("SPARS")
    assert (
        CompileConfig()._compile_all_devices is None and "_compile_all_devices" not in CompileConfig(backend="sparse").to_dict()
    )
    told = CompileConfig(backend="sparse")
    told._compile_all_devices = False
    assert told._compile_all_devices is False


def test_the_command_line_of_accelerate_offers_it() -> None:
    from accelerate.commands.launch import launch_command_parser

    assert launch_command_parser().parse_args(["--dynamo_backend", "sparse", "train.py"]).dynamo_backend == "sparse"


def test_accelerate_compiles_a_training_step() -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="sparse")
    try:
        model = small()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.randn(512, 512)
        with collect() as found:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
        assert {decision.op for decision in found.decisions if decision.sparse} >= {"linear", "linear backward"}
        torch.testing.assert_close(model(x), accelerator.unwrap_model(model, keep_torch_compile=False)(x), rtol=1e-4, atol=1e-4)
    finally:
        accelerator.free_memory()
        AcceleratorState._reset_state(True)


def test_a_recipe_takes_the_optimizer_of_accelerate() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    try:
        model = torch.nn.Linear(32, 64)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
        training = gossamer.train_sparse(model, optimizer, "rigl", steps=10, sparsity=0.8, every=2)
        for _ in range(20):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.randn(16, 32)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        assert training.step == 10
        training.detach()
        assert accelerator.unwrap_model(model).weight.eq(0).float().mean() == pytest.approx(0.8, abs=0.01)
    finally:
        accelerator.free_memory()
        AcceleratorState._reset_state(True)


def test_the_trainer_compiles_a_training_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(config())
    data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(100, (16, 256))]
    losses = []
    for backend in (None, "sparse"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config())
        model.load_state_dict(dense.state_dict())
        gossamer.store_sparse(gossamer.sparsify(model, "magnitude", density=0.05))
        arguments = TrainingArguments(
            str(tmp_path), max_steps=3, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
            per_device_train_batch_size=4, torch_compile_backend=backend,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        with collect() as found:
            trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert {decision.op for decision in found.decisions if decision.sparse} >= {"linear"}
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize(("mode", "options"), [("reduce-overhead", None), (None, {"min_gain": 0})])
def test_generate_compiles_on_cpus(mode: str | None, options: dict[str, Any] | None) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config()).eval()
    gossamer.finalize(gossamer.sparsify(model, "magnitude", density=0.05, skip="lm_head"))
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    expected = model.generate(TOKENS, **how)
    with collect() as found:
        config_of_ours = CompileConfig(backend="sparse", mode=mode, options=options)
        text = model.generate(TOKENS, **how, compile_config=config_of_ours)
    assert torch.equal(text, expected)
    assert found.decisions and (options is None or any(decision.sparse for decision in found.decisions))
    assert logits(model).isfinite().all()
