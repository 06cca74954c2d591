"""Recipes of sparse training do what their papers say, keep zeros zero, and go on bit for bit from a checkpoint."""

import copy
import io
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
from gossamer.sparsity.training.distributions import densities
from gossamer.sparsity.training.latent import BackwardMask
from gossamer.sparsity.training.recipes import RECIPES
from tests.sparsity.recipes import RULED, STEPS, adamw, attached, batch, network, train, weights


@pytest.mark.parametrize("name", RECIPES)
def test_attached_trained_resumed_and_detached(name: str) -> None:
    model = network(name)
    parameters, names = dict(model.named_parameters()), list(model.state_dict())
    optimizer = adamw(model)
    training = attached(name, model, optimizer)
    train(model, optimizer, range(17))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), training.state_dict()], file)
    losses = train(model, optimizer, range(17, STEPS))

    file.seek(0)
    again = network(name)
    optimizer_again = adamw(again)
    training_again = attached(name, again, optimizer_again)
    for each, state in zip((again, optimizer_again, training_again), torch.load(file, weights_only=True), strict=True):
        each.load_state_dict(state)
    assert train(again, optimizer_again, range(17, STEPS)) == losses
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(again), strict=True))

    found = training.densities()
    training.detach()
    assert list(model.state_dict()) == names
    assert all(p is parameters[n] for n, p in model.named_parameters())
    nonzeros = [float((w != 0).float().mean()) for w in weights(model)]
    kept = list(found.values())
    assert nonzeros == pytest.approx(kept, abs=0.06)  # what has just grown may be zero still
    if name in RULED:
        for layer in weights(model)[1 if name != "bi-mask" else 0 :]:
            assert int((layer.unflatten(1, (-1, 4)) != 0).sum(2).max()) == 2
    else:
        share = 0.3 if name == "fixed" else 0.2
        sizes = [w.numel() for w in weights(model)]
        if name == "fixed":
            assert kept[0] == 1
            kept, sizes = kept[1:], sizes[1:]
        assert sum(n * s for n, s in zip(kept, sizes, strict=True)) / sum(sizes) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("name", ["set", "rigl", "gradual", "random"])
def test_pruned_weights_stay_zero_whatever_an_optimizer_does(name: str) -> None:
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, fused=True),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
    ):
        model = network()
        optimizer = make(model.parameters())
        training = attached(name, model, optimizer)
        for step in range(12):
            train(model, optimizer, range(step, step + 1))
            assert all(bool((layer.parameter[~layer.mask] == 0).all()) for layer in training.masks.layers)
            for layer in training.masks.layers:
                for state in optimizer.state[layer.parameter].values():
                    if isinstance(state, Tensor) and state.shape == layer.mask.shape:
                        assert bool((state[~layer.mask] == 0).all())


def test_rigl_keeps_its_count_drops_the_smallest_and_grows_by_the_gradient() -> None:
    """Evci et al., 2020: nonzeros are as many after each update; those that come are where the dense gradient is largest."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    training = attached("rigl", model, optimizer)
    layer = training.masks.layers[1]
    count, before = int(layer.mask.sum()), layer.mask.clone()
    train(model, optimizer, range(4))
    twin = network()
    twin.load_state_dict(model.state_dict())
    F.cross_entropy(twin(batch(4)[0]), batch(4)[1]).backward()
    train(model, optimizer, range(4, 5))
    stepped = (twin[3].weight.detach() - 0.05 * twin[3].weight.grad) * before  # what the optimizer made of it
    moved = round(count * (1 - training.recipe.schedule.exchanged(5)))
    assert moved < count
    kept = torch.zeros_like(before).flatten()
    kept[torch.where(before, stepped.abs(), -1.0).flatten().topk(moved).indices] = True
    grown = torch.where(kept.view_as(before), -1.0, twin[3].weight.grad.abs()).flatten().topk(count - moved).indices
    kept[grown] = True
    assert torch.equal(layer.mask, kept.view_as(before)) and int(layer.mask.sum()) == count
    assert not bool(layer.parameter.detach()[layer.mask & ~before].any())  # they start as zeros
    counts = [int(each.mask.sum()) for each in training.masks.layers]
    train(model, optimizer, range(5, STEPS))
    assert [int(each.mask.sum()) for each in training.masks.layers] == counts and not torch.equal(
        layer.mask, kept.view_as(before)
    )


def test_erdos_renyi_kernel_is_the_formula_of_the_paper() -> None:
    """Evci et al., 2020, (1): density ~ (n_in + n_out + w + h) / (n_in n_out w h), none above 1, the total as asked for."""
    shapes = [(64, 3, 3, 3), (128, 64, 3, 3), (256, 128, 3, 3), (10, 256)]
    found = densities("erdos-renyi-kernel", shapes, 0.1)
    assert found[0] == 1 and sum(d * prod(s) for d, s in zip(found, shapes, strict=True)) == pytest.approx(
        0.1 * sum(map(prod, shapes))
    )
    ratios = [d / (sum(s) / prod(s)) for d, s in zip(found[1:3], shapes[1:3], strict=True)]
    assert ratios[0] == pytest.approx(ratios[1])
    plain = densities("erdos-renyi", shapes[1:3], 0.1)
    assert plain[0] / plain[1] == pytest.approx(((64 + 128) / (64 * 128)) / ((128 + 256) / (128 * 256)))


def test_gradual_sparsity_rises_by_the_cube() -> None:
    """Zhu and Gupta, 2017, section 3, and masks only shrink."""
    model = network()
    optimizer = adamw(model)
    training = gossamer.train_sparse(model, optimizer, "gradual", steps=STEPS, sparsity=0.9, end=20, every=4)
    before = training.masks.layers[1].mask
    for step in range(24):
        train(model, optimizer, range(step, step + 1))
        layer = training.masks.layers[1]
        at = min((step + 1) // 4 * 4, 20)
        assert 1 - float(layer.mask.float().mean()) == pytest.approx(0.9 - 0.9 * (1 - at / 20) ** 3, abs=0.001)
        assert not bool((layer.mask & ~before).any())
        before = layer.mask


def test_sr_ste_adds_its_decay_to_pruned_weights_alone() -> None:
    """Zhou et al., 2021, formula 9: w - lr (g + decay (1 - mask) w), g straight through; scaled gradients change nothing."""
    for fused in (False, True):
        model, scaler = nn.Linear(8, 4, bias=False), torch.amp.GradScaler("cpu", init_scale=1024.0)
        before = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
        training = gossamer.train_sparse(model, optimizer, "sr-ste", steps=10, decay=0.25)
        mask, x = training.masks.layers[0].mask.clone(), torch.randn(3, 8)
        assert bool((mask.unflatten(1, (-1, 4)).sum(2) == 2).all())
        torch.testing.assert_close(model(x), x @ (before * mask).t())
        scaler.scale(model(x).square().sum()).backward()
        scaler.step(optimizer)
        straight = 2 * (x @ (before * mask).t()).t() @ x
        expected = before - 0.5 * (straight + 0.25 * ~mask * before)
        torch.testing.assert_close(model.parametrizations.weight.original.detach(), expected)
        assert training.step == 1


def test_a_step_that_the_scaler_skips_is_none() -> None:
    for fused in (False, True):
        model, scaler = network(), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        training = attached("rigl", model, optimizer)
        scaler.scale(model(batch(0)[0]).sum() * torch.inf).backward()
        scaler.step(optimizer)
        assert training.step == 0 and all(bool(p.isfinite().all()) for p in model.parameters())


def test_masks_and_structures_decay() -> None:
    """Kao et al., 2022: they fade by 1 - t', or N falls by halves; Bambhaniya et al., 2024: by an exponential."""
    for name, expected in (("mask-decay", 0.5), ("progressive-gradient-flow", 0.082085)):
        model = nn.Linear(16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        training = gossamer.train_sparse(model, optimizer, name, steps=8, pattern="1:8", end=4)
        for _ in range(2):
            model(torch.ones(16)).sum().backward()
            optimizer.step()
        layer = training.masks.layers[0]
        optimizer.zero_grad()
        model(torch.ones(16)).sum().backward()
        assert layer.parameter.grad is not None
        torch.testing.assert_close(layer.parameter.grad, torch.where(layer.mask, 1.0, expected))
    schedule = RECIPES["structure-decay"](100, pattern="1:8", end=30).schedule
    assert [schedule.kept(step, 1, 8) for step in (0, 9, 10, 20, 30, 100)] == [7, 7, 4, 2, 1, 1]


def test_step_freezes_the_variance_after_the_switch() -> None:
    """Lu et al., 2023, algorithm 1: dense Adam before; then v stays v*, and w moves by lr m / sqrt(v* + eps)."""
    for fused in (False, True):
        model = nn.Linear(16, 8, bias=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
        training = gossamer.train_sparse(model, optimizer, "step", steps=60, earliest=12, latest=15)
        seen = []
        for step in range(30):
            optimizer.zero_grad()
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            original = model.parametrizations.weight.original
            before = original.detach().clone()
            optimizer.step()
            state = optimizer.state[original]
            seen.append(state["exp_avg_sq"].clone())
            dense = training.densities()[""]
            assert dense == (1.0 if step < 14 else 0.5) and float(state["step"]) == step + 1
            if step > 14:
                expected = before - 0.01 * state["exp_avg"] / (seen[14].sqrt() + 1e-8)
                torch.testing.assert_close(original.detach(), expected, rtol=1e-5, atol=1e-6)
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        assert all(torch.equal(each, seen[14]) for each in seen[15:]) and not torch.equal(seen[13], seen[12])


def test_a_step_that_fails_leaves_beta_and_step_numbers_of_a_frozen_variance() -> None:
    model, fails = nn.Linear(16, 8, bias=False), list[bool]()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    training = gossamer.train_sparse(model, optimizer, "step", steps=20, earliest=2, latest=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 16)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        if fails:
            raise RuntimeError(fails.pop())
        return loss

    for step in range(5):
        optimizer.step(closure)
        fails.append(True)
        with pytest.raises(RuntimeError, match="True"):
            optimizer.step(closure)
        assert training.step == step + 1
    training.detach()
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert float(optimizer.state[model.weight]["step"]) == 5


def test_step_bears_gradients_that_come_after_the_switch() -> None:
    """eps lies beneath the root with v*: what had no gradient before it moves by lr m / sqrt(eps), not by lr m / eps."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    gossamer.train_sparse(model, optimizer, "step", steps=20, earliest=2, latest=4)
    before = model.bias.detach().clone()
    for step in range(5):
        optimizer.zero_grad()
        x = torch.ones(1, 8)
        x[:, 0] = float(step == 4)  # an input that is 0 until the variance is frozen
        (model(x) * 1e-4).sum().backward()
        previous = model.parametrizations.weight.original.detach().clone()
        optimizer.step()
    moved = model.parametrizations.weight.original.detach() - previous
    torch.testing.assert_close(moved[:, 0], torch.full((4,), -0.01 * 0.1 * 1e-4 / 1e-8**0.5), rtol=1e-3, atol=0.0)
    assert bool((model.bias.detach() != before).all())


def test_the_variance_settles_by_itself() -> None:
    """Section 5, AutoSwitch: where the mean change of v over 1 / (1 - beta2) steps falls below eps."""
    model = nn.Linear(16, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.5, 0.75), eps=1e-4)
    training = gossamer.train_sparse(model, optimizer, "step", steps=100, earliest=1, latest=100)
    for _ in range(40):
        optimizer.zero_grad()
        (model(torch.ones(16)).sum() * 0.1).backward()  # the same gradient always: v goes to 0.01 by 0.75^t / 4
        optimizer.step()
    changes = [0.01 * 0.25 * 0.75**t for t in range(1, 100)]
    means = [sum(changes[i : i + 4]) / 4 for i in range(90)]
    assert training._variance is not None
    assert training._variance.since == next(i for i, mean in enumerate(means) if mean < 1e-4) + 5


def test_bi_mask_has_columns_of_its_own_on_the_way_back() -> None:
    """Zhang et al., 2023, section 3: dx = dy (w f b), b is N:M down columns after rows have changed places."""
    model = nn.Linear(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = gossamer.train_sparse(model, optimizer, "bi-mask", steps=10)
    x, dy = torch.randn(3, 5, 16, requires_grad=True), torch.randn(3, 5, 8)
    model(x).backward(dy)
    mask, back = training.masks.layers[0].mask, model.backward_mask
    original = training.masks.layers[0].parameter
    torch.testing.assert_close(x.grad, dy @ (original * mask * back))
    torch.testing.assert_close(original.grad, dy.flatten(0, 1).t() @ x.detach().flatten(0, 1))
    assert bool((back.sum(0) == 4).all())
    masks = BackwardMask(nn.Linear(4, 8), training.recipe.rule)
    sorted_rows = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0])[:, None].expand(8, 4)
    assert masks.eligible(sorted_rows) == 4 and masks.eligible(sorted_rows[[0, 4, 1, 5, 2, 6, 3, 7]]) == 8
    masks.choose(sorted_rows, torch.Generator().manual_seed(0))
    assert float((masks.layer.backward_mask * sorted_rows).sum()) == 16  # nothing is lost


def test_soft_pruning_lets_zeros_return() -> None:
    """He et al., 2018, section 3.2: what was set to zero trains on until the next time."""
    model = network()
    optimizer = adamw(model)
    training = attached("soft", model, optimizer)
    layer = training.masks.layers[1]
    assert not bool(layer.parameter[~layer.mask].any())
    train(model, optimizer, range(2))
    assert float((layer.parameter[~layer.mask] != 0).float().mean()) > 0.8  # but what is behind a dead unit
    train(model, optimizer, range(2, STEPS))
    assert not bool(layer.parameter[~layer.mask].any())


def test_saliency_is_that_of_the_papers() -> None:
    """w^2 / 2 E[g^2] (LeCun et al., 1990) and E[(w g)^2] (Molchanov et al., 2019) choose other elements than magnitude."""
    for saliency in ("first-order", "second-order"):
        model = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        gossamer.train_sparse(model, optimizer, "one-shot", steps=2, sparsity=0.5, at=1, saliency=saliency)
        model(torch.tensor([8.0, 3.0, 1.0, 0.1])).sum().backward()
        optimizer.step()
        assert (model.weight != 0).tolist() == [[True, True, False, False]]


def test_accumulated_and_clipped_gradients_are_those_of_nonzeros() -> None:
    model = network()
    optimizer = adamw(model)
    training = attached("random", model, optimizer)
    twin = copy.deepcopy(network())
    twin.load_state_dict(model.state_dict())
    for each in (model, twin):
        for step in range(2):
            F.cross_entropy(each(batch(step)[0]), batch(step)[1]).backward()
    for layer, reference in zip(training.masks.layers, (twin[0], twin[3], twin[5]), strict=True):
        reference.weight.grad.mul_(layer.mask)
        torch.testing.assert_close(layer.parameter.grad, reference.weight.grad)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0))


@pytest.mark.parametrize(
    ("recipe", "options", "way"),
    [
        ("random", {"sparsity": 0.8}, "dense"), ("gradual", {"sparsity": 0.8, "every": 3}, "dense"), ("sr-ste", {}, "dense"),
        ("mask-decay", {}, "dense"), ("rigl", {"sparsity": 0.8, "every": 3}, "dense"), ("fixed", {}, "pruned"),
        ("rigl", {"sparsity": 0.8, "every": 3}, "stored"),
    ],
)  # fmt: skip
def test_layers_that_share_a_weight_train_as_one_layer_that_is_used_twice(
    recipe: str, options: dict[str, Any], way: str
) -> None:
    def model(twice: bool) -> nn.Sequential:
        torch.manual_seed(0)
        first, second, last = (nn.Linear(16, 16) for _ in range(3))
        if way != "dense":
            gossamer.finalize(gossamer.sparsify(first, "magnitude", density=0.2))
        second.weight, second.bias = first.weight, first.bias
        found = nn.Sequential(first, nn.Tanh(), first if twice else second, nn.Tanh(), last)
        return gossamer.store_sparse(found) if way == "stored" else found

    found = list[list[Tensor]]()
    for twice in (True, False):
        net = model(twice)
        optimizer = adamw(net)
        only = ["0"] if twice else ["0", "2"]
        training = gossamer.train_sparse(net, optimizer, recipe, steps=16, only=only, **options)
        for step in range(14):
            optimizer.zero_grad()
            net(torch.randn(32, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
        densities = training.densities()
        assert len(densities) == (1 if twice else 2) and len(set(densities.values())) == 1 and densities["0"] < 1
        training.detach()
        assert net[0].weight is net[2].weight
        found.append([parameter.detach() for parameter in gossamer.finalize(net).parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["sr-ste", "bi-mask"])
def test_gradients_of_single_samples_are_those_of_autograd(name: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)), torch.randn(6, 16)
    gossamer.train_sparse(model, adamw(model), name, steps=10)
    given = {key: each.detach() for key, each in model.named_parameters()}

    def loss(given: dict[str, Tensor], one: Tensor) -> Tensor:
        return torch.func.functional_call(model, given, (one[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(given, x)
    model(x).square().sum().backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(each[key].sum(0), parameter.grad)
