"""Recipes refuse options that make no sense, and say why."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import gossamer
from gossamer import OptionError
from gossamer.recipes import Recipe, Schedule, Sparsifier
from tests.sparsity.recipes import adamw, attached, batch, network


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("rigl", {"sparsity": 0.9, "pattern": "2:4"}, "2:4"),
        ("gradual", {"sparsity": 0.5, "pattern": "2:4"}, "one density"),
        ("gradual", {"sparsity": 0.5, "pattern": "4x1", "distribution": "global"}, "global"),
        ("rigl", {"sparsity": 0.5, "distribution": "global"}, "global"),
        ("one-shot", {"sparsity": 0.5, "saliency": "first-order"}, "after a step"),
        ("one-shot", {"sparsity": 0.6, "pattern": "2:4"}, "leave out sparsity"),
        ("one-shot", {}, "sparsity is None"),
        ("structure-decay", {"pattern": "4x1"}, "sparsity is None"),
        ("bi-mask", {"pattern": "16:2:8"}, "way back"),
        ("gradual", {"sparsity": 0.5, "saliency": "size"}, "saliency 'size'"),
        ("prune", {}, "not known"),
        ("riggl", {"sparsity": 0.9}, "did you mean 'rigl'"),
        ("rigl", {}, "recipe 'rigl' needs sparsity"),
        ("rigl", {"sparcity": 0.9}, "no option 'sparcity' .did you mean 'sparsity'"),
        ("fixed", {"sparsity": 0.9}, "no option 'sparsity': it has none"),
        ("rigl", {"sparsity": 0.5, "density": 0.5}, "density"),
        ("fixed", {}, "no layer has zeros"),
        ("bi-mask", {}, "Conv2d"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, options: dict[str, Any], reason: str) -> None:
    model = network()
    with pytest.raises(OptionError, match=reason):
        gossamer.train_sparse(model, adamw(model), name, steps=10, **options)


def test_a_refused_recipe_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 4, 3))
    names, optimizer = list(model.state_dict()), adamw(model)
    with pytest.raises(OptionError, match=r"'2' is a Conv2d: Bi-Mask is for linear layers, `skip` it"):
        gossamer.train_sparse(model, optimizer, "bi-mask", steps=10)
    assert list(model.state_dict()) == names and "forward" not in vars(model[0])
    gossamer.train_sparse(model, optimizer, "bi-mask", steps=10, skip=nn.Conv2d)


def test_layers_that_share_a_weight_need_one_mask() -> None:
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    with pytest.raises(OptionError, match=r"'0' shares its weight with '1': Bi-Mask has a mask for one layer, `skip`"):
        gossamer.train_sparse(model, adamw(model), "bi-mask", steps=10, only=["0", "1"])
    for layer in model:
        prune.random_unstructured(layer, "weight", 0.5)
    gossamer.prepare(model)
    with pytest.raises(OptionError, match=r"'0' shares its weight with '1', but not its mask: .* gossamer.finalize"):
        gossamer.train_sparse(model, adamw(model), "fixed", only=["0", "1"])
    gossamer.train_sparse(gossamer.finalize(model), adamw(model), "fixed")


def test_a_mask_of_a_weight_that_an_embedding_uses_without_it_is_not_taken_over() -> None:
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32, bias=False))
    model[2].weight = model[0].weight
    gossamer.sparsify(model, "magnitude", density=0.5, only=["1", "2"])
    words = model[0].weight.detach().clone()
    with pytest.raises(OptionError, match=r"'2' shares its weight with another module, but not its mask"):
        gossamer.train_sparse(model, adamw(model), "fixed", only=["1", "2"])
    training = gossamer.train_sparse(model, adamw(model), "fixed")
    assert list(training.densities()) == ["1"] and torch.equal(model[0].weight, words)


def test_steps_are_asked_for_where_they_matter() -> None:
    model = network()
    with pytest.raises(OptionError, match=r"recipe 'rigl' needs steps, .* steps=len\(data\) \* epochs"):
        gossamer.train_sparse(model, adamw(model), "rigl", sparsity=0.9)
    with pytest.raises(OptionError, match="steps is -1"):
        gossamer.train_sparse(model, adamw(model), "random", sparsity=0.9, steps=-1)
    training = gossamer.train_sparse(model, adamw(model), "random", sparsity=0.75)
    training.detach()
    zeros = [int((layer.weight == 0).sum()) for layer in model if isinstance(layer, nn.Linear | nn.Conv2d)]
    training = gossamer.train_sparse(model, adamw(model), "fixed")
    assert sum(zeros) and [int((~mask.mask).sum()) for mask in training.masks.layers] == zeros


def test_steps_without_gradients() -> None:
    """Adam has no variance yet where a recipe would freeze it: it waits for one."""
    model = network()
    optimizer = adamw(model)
    gossamer.train_sparse(model, optimizer, "step", steps=4)
    for _ in range(4):
        optimizer.step()
    model(batch(0)[0]).square().mean().backward()
    for _ in range(2):
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_an_optimizer_without_a_variance_cannot_freeze_it() -> None:
    class Lion(torch.optim.SGD):
        """Without a variance, but with betas."""

    model = network()
    for make in (torch.optim.SGD, torch.optim.Adamax):
        with pytest.raises(OptionError, match=f"Adam, {make.__name__} has none: take AdamW or Adam"):
            gossamer.train_sparse(model, make(model.parameters(), lr=0.1), "step", steps=10)
    optimizer = Lion(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    gossamer.train_sparse(model, optimizer, "step", steps=10)
    optimizer.step()
    model(batch(0)[0]).square().mean().backward()
    with pytest.raises(OptionError, match="Adam, Lion has none"):
        optimizer.step()


def test_one_recipe_at_a_time_freezes_the_variance_of_an_optimizer() -> None:
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    training = gossamer.train_sparse(first, optimizer, "step", steps=10)
    with pytest.raises(OptionError, match="freezes the variance of this optimizer already"):
        gossamer.train_sparse(second, optimizer, "step", steps=10)
    training.detach()
    gossamer.train_sparse(second, optimizer, "step", steps=10)


def test_other_refusals() -> None:
    model = network()
    with pytest.raises(OptionError, match="does not train"):
        gossamer.train_sparse(model, torch.optim.SGD(model[0].parameters(), lr=0.1), "sr-ste", steps=10)
    model[0].requires_grad_(False)
    for name in ("gradual", "sr-ste"):
        with pytest.raises(OptionError, match=r"does not train 0: .* or `skip` them"):
            gossamer.train_sparse(model, adamw(model), name, steps=10, **({"sparsity": 0.5} if name == "gradual" else {}))
    model[0].requires_grad_()
    with pytest.raises(OptionError, match="Exchange"):
        Recipe(Sparsifier(grows="gradient"), Schedule(0, 10), sparsity=0.5)
    ours = attached("random", model, adamw(model))
    state = ours.state_dict() | {"recipe": "another"}
    with pytest.raises(OptionError, match="same recipe"):
        ours.load_state_dict(state)
