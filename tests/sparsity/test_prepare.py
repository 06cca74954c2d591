"""prepare: pruning hooks become mask parametrizations, and nothing else changes."""

import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import gossamer
from gossamer.sparsity import Mask


def pruned() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", 0.9)
    return model


def test_hooks_become_parametrizations_with_the_same_values() -> None:
    model, x = pruned(), torch.randn(8, 256)
    expected = model(x)
    originals = [model[0].weight_orig, model[2].weight_orig]
    assert gossamer.prepare(model) is model
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    for layer, original in zip((model[0], model[2]), originals, strict=True):
        assert not layer._forward_pre_hooks
        assert isinstance(layer.parametrizations.weight[0], Mask)
        assert layer.parametrizations.weight.original is original


def test_gradients_are_those_of_the_hooks() -> None:
    model, other, x = pruned(), gossamer.prepare(pruned()), torch.randn(8, 256)
    model(x).square().sum().backward()
    other(x).square().sum().backward()
    torch.testing.assert_close(other[0].parametrizations.weight.original.grad, model[0].weight_orig.grad)


def test_an_optimizer_goes_on() -> None:
    model, x = pruned(), torch.randn(8, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossamer.prepare(model)
    before = model[0].weight.clone()
    model(x).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert ((model[0].weight != 0) == (before != 0)).all()


def test_a_prepared_model_compiles_sparse_without_the_masking() -> None:
    model, x = gossamer.prepare(pruned()), torch.randn(64, 256)
    with torch.no_grad():
        compiled = torch.compile(model, backend="sparse", fullgraph=True, options={"dense": "eager", "min_gain": 0})
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        report = gossamer.explain(model, x, options={"dense": "eager", "min_gain": 0})
    assert [(d.name, d.sparse) for d in report.decisions] == [("0.weight", True), ("2.weight", True)]


def test_an_unpruned_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in gossamer.prepare(model).named_parameters()] == names
    assert not parametrize.is_parametrized(model[0])


def test_the_fused_path_of_transformer_layers_is_opened() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    with torch.no_grad():
        layer.linear1.weight[torch.rand_like(layer.linear1.weight) < 0.9] = 0
        x = torch.randn(2, 16, 64)
        expected = layer(x)
        enabled = torch.backends.mha.get_fastpath_enabled()
        try:
            report = gossamer.explain(gossamer.prepare(layer), x, options={"dense": "eager", "min_gain": 0})
            torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
        finally:
            torch.backends.mha.set_fastpath_enabled(enabled)
    assert "linear1.weight" in [d.name for d in report.decisions if d.sparse]
