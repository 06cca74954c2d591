"""transformers' Trainer trains a model that is compiled in place by a recipe as it trains the eager one."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import gossamer
from gossamer.backend.report.report import collect

STEPS = 12


def losses(recipe: str, store: bool, compiled: bool, folder: Path) -> Tensor:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    training = gossamer.train_sparse(
        model, optimizer, recipe, sparsity=0.8, distribution="uniform", steps=STEPS, every=3, store=store
    )
    if compiled:
        model.compile(backend="sparse", options={"dense": "eager", "min_gain": 0})
    draw = torch.Generator().manual_seed(1)
    data = [
        {"input_ids": torch.randint(50, (9,), generator=draw), "labels": torch.randint(2, (), generator=draw)}
        for _ in range(64)
    ]
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=8, max_steps=STEPS, logging_steps=1, max_grad_norm=0.0, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None))
    trainer.train()
    assert sum(training.densities().values()) / len(training.densities()) == pytest.approx(0.2, abs=0.03)
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


@pytest.mark.parametrize(("recipe", "store"), [("rigl", False), ("rigl", True), ("gradual", True)])
def test_a_recipe_under_the_trainer(recipe: str, store: bool, tmp_path: Path) -> None:
    expected = losses(recipe, store, False, tmp_path)
    torch._dynamo.reset()
    with collect() as collected:
        found = losses(recipe, store, True, tmp_path)
    sparse = {decision.op for decision in collected.decisions if decision.sparse}
    assert {"linear", "linear backward"} <= sparse
    assert len(found) == STEPS
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
