"""What is no model is refused by everything that takes one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import gossamer

CALLS: dict[str, Callable[[Any, Path], object]] = {
    "distill": lambda model, _: gossamer.distill(model, nn.Linear(2, 2), [], gossamer.DistillationLoss(logits=1), steps=1),
    "finalize": lambda model, _: gossamer.finalize(model),
    "load": lambda model, file: gossamer.load(model, file),
    "prepare": lambda model, _: gossamer.prepare(model),
    "prune": lambda model, _: gossamer.prune(model, [], sparsity=0.5),
    "quantize": lambda model, _: gossamer.quantize(model),
    "save": lambda model, file: gossamer.save(model, file),
    "sparsify": lambda model, _: gossamer.sparsify(model, "magnitude", density=0.5),
    "store_sparse": lambda model, _: gossamer.store_sparse(model),
    "train_sparse": lambda model, _: gossamer.train_sparse(model, None, "rigl", steps=4, sparsity=0.5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_said_what_was_given(name: str, tmp_path: Path) -> None:
    with pytest.raises(gossamer.OptionError, match=r"the model is str, must be a torch\.nn\.Module"):
        CALLS[name]("bert-base-uncased", tmp_path / "model.safetensors")
