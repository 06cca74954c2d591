"""sparsify: which layers of a model it takes, by name, pattern, type or a function; those of GPT-2 and tied ones."""

import re

import pytest
import torch
from torch import nn

import gossamer
from gossamer.dialects.errors import OptionError


class Model(nn.Module):
    """Two blocks, an embedding and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.ModuleDict({"query": nn.Linear(16, 16), "gate": nn.Linear(16, 4)}) for _ in range(2))
        self.pixels = nn.Conv2d(4, 8, 3)
        self.head = nn.Linear(16, 32, bias=False)
        if tied:
            self.head.weight = self.words.weight


def masked(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if nn.utils.parametrize.is_parametrized(layer)]


QUERIES, GATES = ["blocks.0.query", "blocks.1.query"], ["blocks.0.gate", "blocks.1.gate"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({}, sorted([*QUERIES, *GATES, "head"])),
        ({"only": "head"}, ["head"]),
        ({"only": "*.query"}, QUERIES),
        ({"only": re.compile(r"blocks\.\d\.gate")}, GATES),
        ({"only": ["head", "blocks.0.*"], "skip": "*.gate"}, ["blocks.0.query", "head"]),
        ({"skip": lambda name, layer: layer.out_features < 16}, [*QUERIES, "head"]),
        ({"only": nn.Conv2d}, ["pixels"]),
        ({"only": "pixels"}, ["pixels"]),
        ({"only": ["pix*", "head"], "skip": "words"}, ["head", "pixels"]),
        ({"only": "*"}, sorted([*QUERIES, *GATES, "head", "pixels"])),
        ({"only": "words"}, ["words"]),
        ({"only": [nn.Conv2d, nn.Linear], "skip": nn.Linear}, ["pixels"]),
    ],
)
def test_layers_are_taken_and_skipped(choice: dict[str, object], expected: list[str]) -> None:
    model = gossamer.sparsify(Model(), "magnitude", density=0.25, **choice)
    assert sorted(masked(model)) == sorted(expected)
    for name in expected:
        weight = model.get_submodule(name).weight
        assert torch.count_nonzero(weight) == weight.numel() // 4


def test_a_name_that_no_layer_has_is_refused() -> None:
    with pytest.raises(OptionError, match=r"'haed' \(did you mean 'head'\?\): there are .*head"):
        gossamer.sparsify(Model(), "nm", only="haed")


def test_a_name_of_several_layers_says_how_they_are_named() -> None:
    with pytest.raises(OptionError, match=r"'blocks.0' \(that is a ModuleDict; 'blocks.0.\*' names the layers in it\)"):
        gossamer.sparsify(Model(), "nm", only="blocks.0")
    many = nn.Sequential(*(nn.Linear(4, 4) for _ in range(30)))
    with pytest.raises(OptionError, match=r"there are 0, .*, 11 and 18 more"):
        gossamer.sparsify(many, "nm", skip="fc")


def test_a_model_of_convolutions_is_said_to_be_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    with pytest.warns(UserWarning, match="sparsify has changed nothing: without `only` .* this model has 2 Conv2d"):
        gossamer.sparsify(model, "nm")
    with pytest.raises(OptionError, match=r"no layer to prune: .* has 2 Conv2d. Convolutions are taken by name or type"):
        gossamer.prune(model, [torch.randn(2, 4, 8, 8)], 0.5)
    gossamer.prune(model, [torch.randn(2, 4, 8, 8)], 0.5, only="2")
    assert torch.count_nonzero(model[2].weight) == model[2].weight.numel() // 2 and model[0].weight.all()


def test_a_tied_weight_stays_unless_it_is_asked_for() -> None:
    assert "head" not in masked(gossamer.sparsify(Model(tied=True), "nm"))
    model = gossamer.sparsify(Model(tied=True), "nm", only="head")
    assert torch.count_nonzero(model.words.weight) == 2 * torch.count_nonzero(model.head.weight)


@pytest.mark.parametrize("by_hook", [False, True])
def test_a_tied_weight_under_a_mask_stays_unless_it_is_asked_for(by_hook: bool) -> None:
    model = Model(tied=True)
    if by_hook:
        nn.utils.prune.l1_unstructured(model.head, "weight", 0.5)
    else:
        gossamer.sparsify(model, "magnitude", density=0.5, only="head")
    before = model.head.weight.detach().clone()
    gossamer.sparsify(model, "nm", n=1, m=4)
    assert torch.equal(model.head.weight, before)
    gossamer.sparsify(model, "nm", n=1, m=4, only="head")
    assert not torch.equal(model.head.weight, before)


def test_the_layers_of_gpt2_are_sparsified_along_their_inputs() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 96, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    gossamer.sparsify(model, "nm", n=1, m=4)
    assert masked(model) == [f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    kept = model.transformer.h[0].mlp.c_fc.weight != 0  # [inputs, outputs]
    assert (kept.unflatten(0, (-1, 4)).sum(1) == 1).all()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        report = gossamer.explain(model, tokens, options={"dense": "eager", "min_gain": 0})
    assert {d.name.split(".h.0.")[-1] for d in report.sparse if d.density < 1} == {f"{name}.weight" for name in (
        "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}  # fmt: skip
