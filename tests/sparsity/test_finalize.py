"""finalize: however a model was made sparse, it becomes the plain model with zeros in its weights."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import orthogonal, spectral_norm
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

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


class Scaled(nn.Module):
    """A mask that is not 1 where it keeps a weight."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", 0.5 * mask)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.mask


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


PLAIN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "finalize": gossamer.finalize,
    "store_sparse": gossamer.store_sparse,
    "free_dense": lambda model: gossamer.prepare(model, free_dense=True),
    "quantize": lambda model: gossamer.quantize(model, only=nn.Linear),
}


@pytest.mark.parametrize("way", PLAIN)
def test_a_mask_that_is_multiplied_in_leaves_other_users_of_the_weight_alone(way: str) -> None:
    model, x = gossamer.sparsify(Encoder(), "magnitude", density=0.25, only="head"), torch.arange(64)
    words, expected = model.words.weight.detach().clone(), model(x).detach()
    PLAIN[way](model)
    assert torch.equal(model.words.weight, words) and not is_parametrized(model.head, "weight")
    assert (model(x) - expected).norm() < 0.03 * expected.norm()
    torch.manual_seed(0)
    pair, x = nn.ModuleList(nn.Linear(16, 16) for _ in range(2)), torch.randn(4, 16)
    pair[1].weight = pair[0].weight
    for layer in pair:
        prune.random_unstructured(layer, "weight", 0.75)
    wanted = [layer(x).detach() for layer in pair]
    PLAIN[way](pair)
    for layer, y in zip(pair, wanted, strict=True):
        assert not is_parametrized(layer, "weight") and (layer(x) - y).norm() < 0.03 * y.norm()


def test_weights_that_are_shared_under_masks_stay_shared_if_the_masks_are_equal() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(4)]
    masks = [torch.rand(16, 16) < 0.5 for _ in range(2)]
    for layer in layers:
        layer.weight = layers[0].weight
    for layer, mask in zip(layers, (0, 1, 0, 1), strict=True):
        register_parametrization(layer, "weight", Scaled(masks[mask]))
    model, x = nn.Sequential(*layers), torch.randn(4, 16)
    original, expected = layers[0].parametrizations.weight.original, model(x).detach()
    assert torch.equal(gossamer.finalize(model)(x), expected)
    weights = [layer.weight for layer in layers]
    assert weights[0] is weights[2] is original and weights[1] is weights[3] is not original


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


class Times(nn.Module):
    """A mask as users write one: a factor for each element."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("factor", kept(weight).to(weight.dtype))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """weight * factor"""
        return weight * self.factor  # type: ignore[operator]


class Where(nn.Module):
    """Another way to write it."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", kept(weight))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight where it is kept."""
        return torch.where(self.kept, weight, 0.0)  # type: ignore[arg-type]


class Largest(nn.Module):
    """The mask follows the weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The largest quarter."""
        return weight * kept(weight)


class Scored(nn.Module):
    """The mask is trained: it follows scores, which are a parameter beside the weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()

    def forward(self, weight: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The weights whose scores are the largest quarter."""
        return weight * kept(scores)

    def right_inverse(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight, and its sizes as first scores."""
        return weight, weight.abs()


class Twice(nn.Module):
    """No mask."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight, doubled."""
        return 2 * weight


def kept(weight: torch.Tensor) -> torch.Tensor:
    """Where its largest quarter is."""
    return weight.abs() > weight.abs().flatten().kthvalue(weight.numel() * 3 // 4).values


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("written", [Times, Where, Largest, Scored])
def test_a_mask_that_the_user_wrote_is_multiplied_in(
    written: Callable[[torch.Tensor], nn.Module], dtype: torch.dtype, zeros: bool, tmp_path: Path
) -> None:
    model = Encoder().to(dtype)
    if zeros:  # in the parameter already
        with torch.no_grad():
            model.layer.weight.mul_(kept(model.layer.weight))
    register_parametrization(model.layer, "weight", written(model.layer.weight.detach()))
    expected = model.layer.weight.detach()
    assert 240 < torch.count_nonzero(expected) <= 256
    with pytest.raises(gossamer.OptionError, match="'layer' has a mask"):
        gossamer.save(model, tmp_path / "model.safetensors")
    for change in (gossamer.finalize, gossamer.store_sparse, lambda each: gossamer.prepare(each, free_dense=True)):
        other = change(copy.deepcopy(model))
        assert torch.equal(other.layer.weight.detach().to_dense(), expected)
        size = gossamer.save(other, tmp_path / "model.safetensors")
        assert size < 4096 + (64 * 32 + 32 * 32 // 4) * dtype.itemsize + 32 * 32 // 8
        plain = gossamer.load(Encoder().to(dtype), tmp_path / "model.safetensors")
        assert torch.equal(plain.layer.weight, expected)
    assert gossamer.finalize(model).layer.weight.requires_grad and list(model.state_dict()) == list(Encoder().state_dict())


def test_masks_among_other_parametrizations_are_multiplied_in() -> None:
    model, x = Encoder(), torch.arange(64)
    for each in (Twice(), Times(model.layer.weight.detach()), Twice()):
        register_parametrization(model.layer, "weight", each)
    expected = model(x).detach()
    gossamer.finalize(model)
    torch.testing.assert_close(model(x).detach(), expected)
    assert type(model.layer) is nn.Linear and torch.count_nonzero(model.layer.weight) == 32 * 8


@pytest.mark.parametrize("make", [lambda layer: register_parametrization(layer, "weight", Twice()), orthogonal, spectral_norm])
def test_parametrizations_that_make_nothing_zero_stay(make: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    model = Encoder()
    make(model.layer)
    state = copy.deepcopy(model.state_dict())
    gossamer.finalize(model)
    gossamer.save(model, tmp_path / "model.safetensors")
    assert is_parametrized(model.layer, "weight")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items()), "no buffer was written to"


def test_masks_of_convolutions_embeddings_and_biases_are_multiplied_in() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Embedding(16, 8), nn.BatchNorm1d(16)])
    tensors = [(model[0], "weight"), (model[0], "bias"), (model[1], "weight"), (model[2], "running_var")]
    for module, name in tensors:
        register_parametrization(module, name, Where(torch.randn_like(getattr(module, name))), unsafe=True)
    expected = [getattr(module, name).detach().clone() for module, name in tensors]
    gossamer.finalize(model)
    assert [type(module) for module in model] == [nn.Conv2d, nn.Embedding, nn.BatchNorm1d]
    for value, (module, name) in zip(expected, tensors, strict=True):
        assert torch.equal(getattr(module, name), value)
    assert "running_var" in model[2]._buffers


def test_training_asks_to_finalize_a_weight_that_is_made_of_two_parameters() -> None:
    model = Encoder()
    register_parametrization(model.layer, "weight", Scored(model.layer.weight.detach()))
    with pytest.raises(gossamer.OptionError, match=r"'layer' has a mask: gossamer\.finalize"):
        gossamer.train_sparse(model, torch.optim.SGD(model.parameters(), 0.1), "fixed", steps=1)
    gossamer.finalize(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gossamer.train_sparse(model, optimizer, "fixed", steps=1)
    before = model.layer.weight.detach().clone()
    model(torch.arange(64)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.layer.weight, before)
    assert torch.equal(model.layer.weight != 0, before != 0)
