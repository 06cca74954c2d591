"""finalize: however a model was made sparse, it becomes the plain model with zeros in its weights."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import gossamer


class Encoder(nn.Module):
    """Two layers, one of them tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(64, 32)
        self.layer = nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Words to words."""
        return self.head(torch.relu(self.layer(self.words(x))))


def pruned(model: Encoder) -> Encoder:
    prune.l1_unstructured(model.layer, "weight", 0.75)
    return model


def with_torch_ao(model: Encoder) -> Encoder:
    from torch.ao.pruning import WeightNormSparsifier

    sparsifier = WeightNormSparsifier(sparsity_level=0.75, sparse_block_shape=(1, 1), zeros_per_block=1)
    sparsifier.prepare(model, [{"tensor_fqn": "layer.weight"}])
    sparsifier.step()
    return model


WAYS: list[Callable[[Encoder], Encoder]] = [
    lambda model: gossamer.sparsify(model, "nm", n=1, m=4),
    lambda model: gossamer.sparsify(gossamer.sparsify(model, "nm", n=2, m=4), "magnitude", density=0.25),
    pruned,
    lambda model: gossamer.prepare(pruned(model)),
    lambda model: gossamer.prepare(pruned(model), free_dense=True),
    with_torch_ao,
    lambda model: gossamer.prepare(with_torch_ao(model)),
    lambda model: gossamer.prepare(with_torch_ao(model), free_dense=True),
]


@pytest.mark.parametrize("way", WAYS)
def test_a_sparse_model_becomes_plain(way: Callable[[Encoder], Encoder], tmp_path: Path) -> None:
    model, x = way(Encoder()).eval(), torch.arange(64)
    expected = model(x).detach()
    assert gossamer.finalize(model) is model
    assert type(model) is Encoder and type(model.layer) is nn.Linear and type(model.layer.weight) is nn.Parameter
    assert model.head.weight is model.words.weight and not model.layer._forward_pre_hooks
    assert torch.count_nonzero(model.layer.weight) == 32 * 8
    plain = Encoder()
    assert list(model.state_dict()) == list(plain.state_dict())
    torch.save(model.state_dict(), tmp_path / "model.pt")
    plain.load_state_dict(torch.load(tmp_path / "model.pt"))
    for other in (model, plain, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), expected, rtol=0, atol=0)
    with torch.no_grad():
        report = gossamer.explain(model, x, options={"dense": "eager", "min_gain": 0})
    assert [(d.name, d.sparse) for d in report.decisions if d.density < 1] == [("layer.weight", True)]


def test_an_optimizer_goes_on() -> None:
    model = gossamer.sparsify(Encoder(), "nm")
    held = model.layer.parametrizations.weight.original
    assert gossamer.finalize(model).layer.weight is held


def test_a_weight_that_is_shared_without_its_mask_is_no_longer_shared() -> None:
    model, x = gossamer.sparsify(Encoder(), "nm", only="head"), torch.arange(64)
    words, expected = model.words.weight.detach().clone(), model(x).detach()
    gossamer.finalize(model)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert torch.equal(model.words.weight, words) and torch.count_nonzero(model.head.weight) == 64 * 16


@pytest.mark.parametrize("masked", [False, True])
def test_what_save_pretrained_wrote_is_loaded_elsewhere(masked: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 96, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    gossamer.sparsify(model, "magnitude", density=0.1)
    tokens = torch.arange(8)[None]
    expected = model(tokens).logits.detach()
    gossamer.finalize(gossamer.prepare(model) if masked else model).save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(tokens).logits, expected)


def test_torch_ao_pruning_is_seen_before_squash_mask() -> None:
    model, x = gossamer.prepare(with_torch_ao(Encoder())).eval(), torch.arange(64)
    with torch.no_grad():
        report = gossamer.explain(model, x, options={"dense": "eager", "min_gain": 0})
    assert ("layer.weight", True, 0.25) in [(d.name, d.sparse, d.density) for d in report.decisions]
    assert not report.graph_breaks


def test_a_sparsifier_of_torch_ao_goes_on() -> None:
    from torch.ao.pruning import WeightNormSparsifier

    model, sparsifier = Encoder(), WeightNormSparsifier(0.75, (1, 1), 1)
    sparsifier.prepare(model, [{"tensor_fqn": "layer.weight"}])
    gossamer.prepare(model)
    assert torch.count_nonzero(model.layer.weight) == 32 * 32
    sparsifier.step()
    assert torch.count_nonzero(model.layer.weight) == 32 * 8
    sparsifier.squash_mask()
    assert type(model.layer.weight) is nn.Parameter and torch.count_nonzero(model.layer.weight) == 32 * 8
