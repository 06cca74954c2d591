"""A model and its copy are two: what is done to one leaves the other as it was."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

import gossamer
from gossamer.sparsity.pruning.mask import Mask
from gossamer.sparsity.pruning.parametrizations import register_parametrization, remove_parametrizations
from gossamer.sparsity.training.recipes import RECIPES

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))


class Written(nn.Module):
    """A mask as users write one."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", weight.abs() > weight.abs().flatten().kthvalue(weight.numel() * 4 // 5).values)

    def forward(self, weight: Tensor) -> Tensor:
        """weight * kept"""
        return torch.where(self.kept, weight, 0)  # type: ignore[arg-type]


def under_masks() -> nn.Sequential:
    return gossamer.sparsify(plain(), "magnitude", density=0.2)


def under_two_masks() -> nn.Sequential:
    return gossamer.sparsify(gossamer.sparsify(plain(), "nm"), "magnitude", density=0.2)


def under_written_masks() -> nn.Sequential:
    model = plain()
    for layer in (model[0], model[2]):
        parametrize.register_parametrization(layer, "weight", Written(layer.weight.detach()))
    return model


def prepared() -> nn.Sequential:
    model = plain()
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", 0.8)
        prune.random_unstructured(layer, "bias", 0.5)
    return gossamer.prepare(model)


COPIES: list[Callable[[nn.Module], Any]] = [copy.deepcopy, lambda model: AveragedModel(model).module]
CHANGES: dict[str, Callable[[Any], Any]] = {
    "finalize": gossamer.finalize,
    "quantize": gossamer.quantize,
    "quantize in groups": lambda model: gossamer.quantize(model, weights="int4", group=16),
    "quantize aware": lambda model: gossamer.quantize(model, aware=True),
    "store_sparse": gossamer.store_sparse,
    "free_dense": lambda model: gossamer.prepare(model, free_dense=True),
    "sparsify": lambda model: gossamer.sparsify(model, "magnitude", density=0.1),
    "another tensor": lambda model: register_parametrization(model[0], "bias", Mask(torch.zeros(48))),
    "train fixed": lambda model: gossamer.train_sparse(model, torch.optim.SGD(model.parameters(), 0.1), "fixed", steps=1),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("make", [under_masks, under_two_masks, under_written_masks, prepared])
def test_a_change_of_one_leaves_the_other(
    make: Callable[[], nn.Sequential], copied: Callable[[nn.Module], Any], name: str
) -> None:
    model = make()
    if name == "another tensor" and make is prepared:
        pytest.skip("its bias has a parametrization already")
    names = list(model.state_dict())
    for changed, left in ((copied(model), model), (copied(copied(model)), model), (model, copied(model))):
        expected, before = left(X).detach(), changed(X).detach()
        changed_kind = CHANGES[name](changed)
        torch.testing.assert_close(left(X).detach(), expected, rtol=0, atol=0)
        assert list(left.state_dict()) == names
        left(X).sum().backward()
        if name in ("finalize", "free_dense", "train fixed"):
            torch.testing.assert_close(changed(X).detach(), before)
        del changed_kind


def test_a_copy_of_a_copy_is_changed_alone() -> None:
    model = under_masks()
    copies = [model, copy.deepcopy(model)]
    copies += [copy.deepcopy(copies[1]), copy.copy(copies[1])]
    copies[3]._modules = copy.deepcopy(copies[1]._modules)
    expected = model(X).detach()
    for each in copies:
        gossamer.finalize(each)
        for other in copies:
            torch.testing.assert_close(other(X).detach(), expected, rtol=0, atol=0)
        assert type(each[0]) is nn.Linear


def test_compiled_code_of_the_model_runs_on_when_a_copy_is_finalized() -> None:
    model = under_masks().eval()
    compiled = torch.compile(model, backend="sparse", fullgraph=True, options={"dense": "eager", "min_gain": 0})
    with torch.no_grad():
        expected = compiled(X)
        other = gossamer.finalize(copy.deepcopy(model))
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(compiled(X), expected, rtol=0, atol=0)
        torch.testing.assert_close(other(X), expected)
        report = gossamer.explain(other, X, options={"dense": "eager", "min_gain": 0})
    assert [d.sparse for d in report.decisions] == [True, True]


@pytest.mark.parametrize("ends", ["detach", "finalize copy", "detach after finalize", "store copy", "free copy"])
@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_at_work_and_a_copy_of_its_model(name: str, store: bool, ends: str) -> None:
    if store and name not in ("fixed", "one-shot", "gradual", "random", "set", "rigl"):
        pytest.skip("the recipe needs what is not stored, too")
    model = gossamer.finalize(under_masks()) if name == "fixed" else plain()
    names = list(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    options: dict[str, Any] = {"sparsity": 0.8} if name in ("one-shot", "gradual", "random", "set", "rigl", "soft") else {}
    if name in ("set", "rigl"):
        options["every"] = 2
    training = gossamer.train_sparse(model, optimizer, name, steps=8, store=store, **options)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(X).square().sum().backward()
            optimizer.step()

    train(5)
    other = copy.deepcopy(model)
    expected = other(X).detach()
    if ends == "detach":
        training.detach()
    elif ends == "detach after finalize":
        gossamer.finalize(model)
        training.detach()
    else:
        change = {"finalize copy": gossamer.finalize, "store copy": stored, "free copy": freed}[ends]
        change(other)
        train(2)
        training.detach()
        assert list(other.state_dict()) == names
    assert list(model.state_dict()) == names
    assert all(type(layer) is nn.Linear and "forward" not in vars(layer) for layer in (model[0], model[2]))
    torch.testing.assert_close(other(X).detach(), expected)


def stored(model: nn.Module) -> nn.Module:
    return gossamer.store_sparse(model, densest=1.0)


def freed(model: nn.Module) -> nn.Module:
    return gossamer.prepare(model, free_dense=True)


def test_a_copy_of_a_model_that_looks_at_all_gradients_follows_its_own_weights() -> None:
    class Twice(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    torch.manual_seed(0)
    model = gossamer.store_sparse(gossamer.finalize(gossamer.sparsify(nn.Sequential(Twice(32, 32)), "magnitude", density=0.2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gossamer.train_sparse(model, optimizer, "rigl", steps=8, every=1, sparsity=0.8)
    other = copy.deepcopy(model)
    torch.testing.assert_close(other(X), model(X))
    with torch.no_grad():
        other[0].weight.values().zero_()  # type: ignore[operator]
        other[0].bias.zero_()  # type: ignore[union-attr, operator]
    assert not other(X).any() and model(X).any()


@pytest.mark.parametrize("make", [under_masks, under_two_masks, prepared])
def test_a_model_under_masks_goes_into_a_pickle(make: Callable[[], nn.Sequential]) -> None:
    model = make()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found = [pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    found.append(pickle.loads(pickle.dumps(found[0])))
    for each in found:
        assert type(each[0]).__name__ == "ParametrizedLinear" and list(each.state_dict()) == list(model.state_dict())
        torch.testing.assert_close(each(X), model(X), rtol=0, atol=0)
        torch.testing.assert_close(copy.deepcopy(each)(X), model(X), rtol=0, atol=0)
    expected = model(X).detach()
    gossamer.finalize(found[0])
    for each in (*found, model):
        torch.testing.assert_close(each(X).detach(), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: gossamer.finalize(under_masks()),
        lambda: gossamer.store_sparse(under_masks()),
        lambda: gossamer.prepare(under_masks(), free_dense=True),
        lambda: gossamer.quantize(under_masks()),
        lambda: gossamer.quantize(under_masks(), weights="int4"),
        lambda: gossamer.quantize(under_masks(), aware=True),
    ],
)
def test_whole_models_of_other_kinds_go_into_a_pickle(make: Callable[[], nn.Sequential]) -> None:
    model = make()
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(again(X), model(X), rtol=0, atol=0)
    assert [type(layer) for layer in again] == [type(layer) for layer in model]


def test_a_single_layer_that_prepare_has_wrapped_is_finalized() -> None:
    layer = nn.Linear(32, 32)
    prune.l1_unstructured(layer, "weight", 0.75)
    layer = gossamer.prepare(layer)
    expected, other = layer(X).detach(), copy.deepcopy(layer)
    gossamer.finalize(layer)
    assert type(layer) is nn.Linear and torch.count_nonzero(layer.weight) == 256
    torch.testing.assert_close(other(X).detach(), expected, rtol=0, atol=0)
    register_parametrization(other, "bias", Mask(torch.zeros(32)))
    remove_parametrizations(other, "weight")
    remove_parametrizations(other, "bias")
    assert torch.equal(gossamer.finalize(other).weight, layer.weight) and type(other) is nn.Linear
    assert not other.bias.any()


def test_parametrizations_that_are_no_masks_stay_in_both() -> None:
    model = gossamer.sparsify(plain(), "magnitude", density=0.2, only="0")
    parametrizations.weight_norm(model[2])
    expected, other = model(X).detach(), copy.deepcopy(model)
    gossamer.finalize(other)
    assert type(other[0]) is nn.Linear and parametrize.is_parametrized(other[2])
    for each in (model, other):
        torch.testing.assert_close(each(X).detach(), expected, rtol=0, atol=0)
