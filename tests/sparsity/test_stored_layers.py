"""What else Gossamer does with models whose weights store their nonzeros alone: each takes them, or says what to do."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import prune

import gossamer
from gossamer import Format, SparseTensor
from gossamer.dialects.errors import OptionError
from tests.backend.harness import prune_


def stored() -> nn.Sequential:
    torch.manual_seed(0)
    return gossamer.store_sparse(dense())


def dense() -> nn.Sequential:
    layers = nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)
    return prune_(nn.Sequential(*layers), 0.1)  # type: ignore[return-value]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(8, 64)


def assert_plain(model: nn.Module) -> None:
    assert [type(p) for p in model.parameters()] == [nn.Parameter] * 4
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_finalize_makes_plain_weights_of_them(x: Tensor) -> None:
    model = stored()
    model[2].weight.requires_grad_(False)
    expected = model(x)
    assert_plain(gossamer.finalize(model))
    assert model[0].weight.requires_grad and not model[2].weight.requires_grad
    torch.testing.assert_close(model(x), expected)


def test_stored_once_is_stored() -> None:
    model = stored()
    weights = [model[0].weight, model[2].weight]
    assert gossamer.store_sparse(model) is model and [model[0].weight, model[2].weight] == weights


def test_layers_that_share_a_weight_share_the_stored_one_if_their_masks_are_equal(x: Tensor) -> None:
    torch.manual_seed(0)
    model, masks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), torch.rand(2, 64, 64) < 0.3
    model[1].weight = model[2].weight = model[0].weight
    for layer, mask in zip(model, (0, 0, 1), strict=True):
        prune.custom_from_mask(layer, "weight", masks[mask])
    expected = [layer(x) for layer in model]
    gossamer.store_sparse(model)
    assert model[0].weight is model[1].weight is not model[2].weight
    torch.testing.assert_close([layer(x) for layer in model], expected)


@pytest.mark.parametrize("into", [stored, dense])
def test_files(x: Tensor, tmp_path: Path, into: Callable[[], nn.Module]) -> None:
    model, other = stored(), into()
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[2].weight = model[2].weight
    gossamer.save(model, tmp_path / "model.safetensors")
    found = gossamer.load(other, tmp_path / "model.safetensors")
    torch.testing.assert_close(found(x), model(x))
    assert isinstance(found.get_parameter("0.weight"), SparseTensor) is (into is stored)


def test_safetensors_says_what_to_save_by(tmp_path: Path) -> None:
    with pytest.raises(
        gossamer.GossamerError, match=r"gossamer\.save\(model, file\) the nonzeros.* Trainer needs save_strategy"
    ):
        save_file(stored().state_dict(), tmp_path / "model.safetensors")


def test_a_graph_is_saved_by_its_entries_not_by_its_elements(tmp_path: Path) -> None:
    many, at = 1 << 20, torch.arange(100)

    def with_graph(values: Tensor) -> nn.Module:
        model = nn.Linear(3, 3)
        model.register_buffer(
            "graph", SparseTensor.from_edge_index(torch.stack([at, at + 1]), values, (many, many), Format.COO)
        )
        return model

    saved, model = with_graph(torch.ones(100)), with_graph(torch.zeros(100))
    assert gossamer.save(saved, tmp_path / "model.safetensors") < 8192
    gossamer.load(model, tmp_path / "model.safetensors")
    assert torch.equal(model.graph.values(), torch.ones(100))


def test_quantized_and_packed_ones_are_as_from_dense_weights(x: Tensor) -> None:
    with torch.no_grad():
        for change in gossamer.quantize, lambda model: gossamer.prepare(model, free_dense=True):
            model = stored()
            same = gossamer.finalize(stored())
            torch.testing.assert_close(change(model)(x), change(same)(x))


def test_distilled_ones_keep_their_pattern(x: Tensor) -> None:
    model, teacher = stored(), dense()
    kept = model[0].weight.to_dense() != 0
    loss = gossamer.DistillationLoss(logits=1)
    gossamer.distill(model, teacher, [x], loss, steps=3)
    assert torch.equal(model[0].weight.to_dense() != 0, kept)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: gossamer.prune(model, [torch.randn(8, 64)], sparsity=0.95),
        lambda model: gossamer.sparsify(model, "magnitude", density=0.05),
        lambda model: gossamer.distill(model, dense(), [], gossamer.DistillationLoss(logits=1), steps=3, sparsity=0.95),
    ],
    ids=["prune", "sparsify", "distill"],
)
def test_other_patterns_want_plain_weights(change: Callable[[nn.Module], object]) -> None:
    with pytest.raises(OptionError, match=r"call gossamer\.finalize\(model\) first"):
        change(stored())


class Mixed(nn.Module):
    """A convolution before a linear layer, both pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 6)
        with torch.no_grad():
            for weight in (self.conv.weight, self.head.weight):
                weight[torch.rand_like(weight) > 0.2] = 0


def test_convolutions_are_said_to_stay_plain() -> None:
    model = Mixed()
    with pytest.warns(UserWarning, match="Pruned convolutions keep plain weights: conv\\."):
        gossamer.store_sparse(model)
    assert isinstance(model.head.weight, gossamer.SparseTensor) and type(model.conv.weight) is nn.Parameter


def test_a_network_of_convolutions_alone_is_told_why_nothing_is_stored() -> None:
    with pytest.raises(gossamer.GossamerError, match="convolutions cannot be stored, and keep plain weights \\(0\\)"):
        gossamer.store_sparse(nn.Sequential(Mixed().conv))


def test_convolutions_without_zeros_or_left_out_are_not_mentioned(recwarn: pytest.WarningsRecorder) -> None:
    model, other = Mixed(), Mixed()
    nn.init.normal_(model.conv.weight)
    gossamer.store_sparse(model)
    gossamer.store_sparse(other, skip="conv")
    assert not [each for each in recwarn if "convolutions" in str(each.message)]
