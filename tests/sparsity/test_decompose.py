"""`gossamer.decompose` and `gossamer.Cuttlefish`: weights as sparse ones with a low rank beside them, and as factors."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel

import gossamer
from gossamer.backend.report.report import collect
from gossamer.sparsity.pruning.patterns import Unstructured
from gossamer.sparsity.pruning.sparse_low_rank import Budget, is_decomposed, split


def structured(rows: int = 96, columns: int = 128, rank: int = 4) -> Tensor:
    """A low rank, few large elements, and noise."""
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
    large = 8 * torch.randn(rows, columns, generator=generator) * (torch.rand(rows, columns, generator=generator) < 0.03)
    return low + large + 0.1 * torch.randn(rows, columns, generator=generator)


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 128))
    with torch.no_grad():
        made[0].weight.copy_(structured())
        made[2].weight.copy_(structured(128, 96))
    return made.eval()


def test_the_parts_keep_to_their_budget() -> None:
    weight, budget = structured(), Budget(0.2, 0.5)
    parts = split(weight, budget, Unstructured())
    numbers = int(torch.count_nonzero(parts.sparse)) + parts.first.numel() + parts.second.numel()
    assert parts.first.shape[1] == budget.rank(96, 128) == 5
    assert abs(numbers - 0.2 * weight.numel()) < 2


def test_alternating_projection_comes_nearer_with_each_step() -> None:
    weight = structured()
    lost = [float((split(weight, Budget(0.2, 0.5), Unstructured(), steps=n).whole - weight).norm()) for n in (1, 3, 20)]
    assert lost[0] > lost[1] > lost[2]


def test_a_low_rank_is_found_again() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 3, generator=generator) @ torch.randn(3, 80, generator=generator)
    parts = split(weight, Budget(0.2, 1.0), Unstructured())
    torch.testing.assert_close(parts.whole, weight, atol=1e-4, rtol=1e-4)


def test_a_low_rank_beside_it_loses_less_than_pruning_alone_at_the_same_budget() -> None:
    data = [torch.randn(64, 128) * torch.linspace(0.1, 3, 128) for _ in range(4)]
    pruned, parts = model(), model()
    alone = gossamer.prune(pruned, data, sparsity=0.8, method="wanda")
    beside = gossamer.decompose(parts, data, density=0.2, rank_share=0.5)
    assert all(b.density <= 0.2001 for b in beside.layers)
    assert all(b.error < 0.5 * a.error for a, b in zip(alone.layers, beside.layers, strict=True))


def test_the_scale_of_inputs_counts() -> None:
    data = [torch.randn(256, 128) * torch.cat([torch.full((8,), 20.0), torch.ones(120)]) for _ in range(2)]
    with_data, without = model(), model()
    expected = model()(data[0])
    gossamer.decompose(with_data, data, density=0.1)
    gossamer.decompose(without, density=0.1)
    assert (with_data(data[0]) - expected).norm() < (without(data[0]) - expected).norm()


def test_a_decomposed_model_compiles_into_products_with_a_rank_beside_them() -> None:
    made = nn.Sequential(nn.Linear(384, 512), nn.ReLU(), nn.Linear(512, 384)).eval()
    gossamer.decompose(made, density=0.15, rank_share=0.4)
    x = torch.randn(64, 384)
    with collect() as found, torch.no_grad():
        y = torch.compile(made, backend="sparse", options={"strict": True, "dense": "eager"})(x)
        torch.testing.assert_close(y, made(x), atol=1e-4, rtol=1e-4)
    assert sum("beside it" in each.reason for each in found.decisions if each.sparse) == 2


def test_parts_train_and_zeros_stay() -> None:
    made = model().train()
    gossamer.decompose(made, density=0.2)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    chain = made[0].parametrizations["weight"]
    before = [parameter.detach().clone() for parameter in chain.parameters()]
    made(torch.randn(8, 128)).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, chain.parameters(), strict=True))
    assert not torch.count_nonzero((chain.original0 - before[0])[~chain[0].mask])


def test_a_state_dict_a_copy_and_a_pickle_keep_the_parts(tmp_path: Path) -> None:
    made, x = model(), torch.randn(4, 128)
    gossamer.decompose(made, density=0.2)
    torch.save(made.state_dict(), tmp_path / "parts.pt")
    other = model()
    gossamer.decompose(other, [torch.randn(32, 128)], density=0.2)
    other.load_state_dict(torch.load(tmp_path / "parts.pt"))
    for each in (other, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert is_decomposed(each[0])
        torch.testing.assert_close(each(x), made(x), atol=0, rtol=0)


def test_an_assigned_weight_is_split_again() -> None:
    made = model()
    gossamer.decompose(made, density=0.2, rank_share=0.5)
    weight = structured(rank=2)
    made[0].weight = weight
    assert float((made[0].weight - weight).detach().norm()) < 0.2 * float(weight.norm())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0}, "density is 0"),
        ({"rank_share": 1.5}, "must be at most 1"),
        ({"pattern": "2:4"}, "has a density of its own"),
        ({"only": nn.Conv2d}, "no layer to prune"),
        ({"steps": 0}, "steps is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], message: str) -> None:
    made = model()
    with pytest.raises(gossamer.OptionError, match=message):
        gossamer.decompose(made, **options)  # type: ignore[arg-type]
    assert not is_decomposed(made[0])


def test_a_share_of_zero_is_pruning_alone() -> None:
    made = model()
    gossamer.decompose(made, density=0.2, rank_share=0)
    assert abs(float(torch.count_nonzero(made[0].weight)) / made[0].weight.numel() - 0.2) < 0.01


def test_cuttlefish_switches_a_layer_once_its_rank_has_settled() -> None:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    factors = gossamer.Cuttlefish(made, optimizer, only="0", patience=2)
    low = torch.randn(32, 3) @ torch.randn(3, 32)
    assert factors.epoch() == {} and factors.dense == ["0"]
    with torch.no_grad():
        made[0].weight.copy_(low)
    assert factors.epoch() == {}  # it has just changed
    made(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        made[0].weight.copy_(low)
    factors.epoch()
    switched = factors.epoch()
    assert list(switched) == ["0"] and 1 <= switched["0"] < 16 and factors.dense == []
    assert isinstance(made[0], nn.Sequential) and made[0][0].out_features == switched["0"]
    assert len(optimizer.param_groups[0]["params"]) == 5
    made(torch.randn(4, 32)).sum().backward()
    optimizer.step()


def test_cuttlefish_leaves_a_layer_whose_factors_would_be_larger() -> None:
    made = nn.Sequential(nn.Linear(32, 32))
    factors = gossamer.Cuttlefish(made, patience=1)
    assert factors.epoch() == {} and factors.epoch() == {}
    assert factors.dense == [] and type(made[0]) is nn.Linear


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_factors_of_full_rank_compute_the_same(dtype: torch.dtype, error: float) -> None:
    made = nn.Sequential(nn.Linear(8, 20, dtype=dtype))
    factors, x = gossamer.Cuttlefish(made, patience=1, change=1.0), torch.randn(3, 8, dtype=dtype)
    with torch.no_grad():
        made[0].weight.copy_(torch.randn(20, 2, dtype=dtype) @ torch.randn(2, 8, dtype=dtype))
    expected = made(x)
    factors.epoch()
    switched = factors.epoch()
    assert switched["0"] >= 2
    torch.testing.assert_close(made(x), expected, atol=error, rtol=error)


def switch(made: nn.Module, **options: Any) -> None:
    """Replaces linear layers whose weights are of rank 1."""
    factors = gossamer.Cuttlefish(made, patience=1, change=1.0, **options)
    with torch.no_grad():
        for layer in [module for module in made.modules() if type(module) is nn.Linear]:
            layer.weight.copy_(torch.outer(torch.randn(layer.out_features), torch.randn(layer.in_features)) / 8)
    factors.epoch()
    assert factors.epoch()


def test_a_layer_in_two_places_has_its_factors_in_both() -> None:
    shared = nn.Linear(64, 64)
    made = nn.Sequential(shared, nn.ReLU(), shared)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    switch(made, optimizer=optimizer)
    assert made[0] is made[2] and made[0] is not shared
    assert {*map(id, optimizer.param_groups[0]["params"])} == {*map(id, made.parameters())}


def test_modules_that_read_a_weight_find_that_of_the_factors() -> None:
    """torch's encoder layers read weights in inference, T5 their types."""
    made, x = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval(), torch.randn(3, 9, 64)
    switch(made)
    with torch.no_grad():
        expected = made.double()(x.double())
        torch.testing.assert_close(made.float()(x), expected.float(), atol=1e-5, rtol=1e-4)
    layer: Any = made.linear1
    assert (layer.in_features, layer.out_features, layer.weight.shape) == (64, 128, (128, 64))
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias), atol=1e-5, rtol=1e-4)
    config = T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    text = T5EncoderModel(config).eval()
    switch(text, only="*DenseReluDense.*")
    assert text(torch.arange(9)[None]).last_hidden_state.isfinite().all()


def test_cuttlefish_says_what_it_cannot_watch() -> None:
    with pytest.raises(gossamer.OptionError, match="the model is a linear layer itself"):
        gossamer.Cuttlefish(nn.Linear(8, 8))
    with pytest.raises(gossamer.OptionError, match="no layer to watch"):
        gossamer.Cuttlefish(nn.Sequential(nn.ReLU()))
