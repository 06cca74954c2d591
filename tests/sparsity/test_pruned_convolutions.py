"""`gossamer.prune` on convolutions of all kinds: against torch's convolution and, group by group, against linear layers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.sparsity.pruning.layer_problem import Curvature, LayerProblem, Moments
from gossamer.sparsity.pruning.methods import METHODS
from gossamer.sparsity.pruning.patterns import EqualRows
from gossamer.sparsity.pruning.unfolding import patches
from tests.backend.harness import compile_and_run

KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": 1},
    {"dilation": 2, "padding": 3},
    {"padding": "same", "dilation": 3},
    {"padding": "valid"},
    {"padding": 2, "padding_mode": "reflect"},
    {"padding": "same", "padding_mode": "circular"},
    {"padding": "same", "padding_mode": "replicate"},
    {"groups": 2, "stride": 2},
    {"groups": 4, "padding": "same", "padding_mode": "reflect"},
    {"padding": "valid", "padding_mode": "circular"},
]


def image(sides: int, count: int = 3, channels: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(sides)
    return torch.randn(count, channels, *(9, 7, 5)[:sides], generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sides", KINDS)
@torch.no_grad()
def test_patches_times_the_weight_is_the_convolution(sides: int, options: dict[str, Any]) -> None:
    taps = (2, 3, 1)[:sides] if "groups" not in options else (3, 2, 2)[:sides]  # even ones are padded unevenly
    layer, x = KINDS[sides](4, 8, taps, **options).double(), image(sides)
    for given in (x, x[0], x[:0]):
        if not given.numel() and options.get("padding_mode", "zeros") != "zeros":
            continue  # torch pads no empty batch so
        wanted = layer(given)
        rows = patches(layer, given)
        weight, bias = layer.weight.flatten(1), layer.bias
        rows = rows if rows.dim() == 3 else rows[None]
        product = torch.cat([z @ w.t() for z, w in zip(rows, weight.chunk(layer.groups), strict=True)], 1) + bias
        places = wanted if wanted.dim() == sides + 2 else wanted[None]
        torch.testing.assert_close(product, places.movedim(1, -1).flatten(0, -2))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("centred", [True, False])
def test_groups_are_problems_of_their_own(method: str, centred: bool) -> None:
    """Equally many in each row, so that the mask of a group does not depend on the others."""
    generator, rule = torch.Generator().manual_seed(0), EqualRows()
    mixed = torch.randn(3, 12, 12, generator=generator, dtype=torch.float64)
    x = torch.randn(3, 60, 12, generator=generator, dtype=torch.float64) @ mixed + 1
    z = x + 0.2 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    weight, bias = torch.randn(6, 12, generator=generator, dtype=torch.float64), torch.ones(6, dtype=torch.float64)

    def problem_of(z: Tensor, x: Tensor, weight: Tensor) -> LayerProblem:
        moments = Moments(12, torch.float64, groups=z.shape[:-2])
        moments.add(z, x)
        return LayerProblem.of(weight, Curvature(moments, centred=centred, damping=0.01))

    whole, parts = problem_of(z, x, weight), [problem_of(*each) for each in zip(z, x, weight.chunk(3), strict=True)]
    found = METHODS[method](whole, rule, 0.5)
    if method in ("admm", "best"):  # rho, and which is best, follow from all groups
        for part, own in zip(parts, found, strict=True):
            gradient = (own - part.target) @ part.curvature.hessian
            assert (gradient * (own != 0)).abs().max() < 1e-3 * (part.target @ part.curvature.hessian).abs().max()
            assert (own != 0).sum(1).eq(6).all()
        assert whole.error(found) <= whole.error(METHODS["sparsegpt"](whole, rule, 0.5))
    else:
        torch.testing.assert_close(found, torch.stack([METHODS[method](part, rule, 0.5) for part in parts]))
    lost = sum(part.error(own) * part.power for part, own in zip(parts, found, strict=True))
    assert whole.error(found.flatten(0, 1)) == pytest.approx(lost / sum(part.power for part in parts))
    biases = [part.bias(own, b) for part, own, b in zip(parts, found, bias.chunk(3), strict=True)]
    torch.testing.assert_close(whole.bias(found, bias), torch.cat(biases))  # type: ignore[arg-type]


def network(sides: int) -> nn.Sequential:
    torch.manual_seed(0)
    conv: Any = KINDS[sides]
    return nn.Sequential(
        conv(4, 8, 3, padding="same", padding_mode="reflect"), nn.ReLU(), conv(8, 8, 3, groups=8, padding=1), nn.ReLU(),
        conv(8, 16, 3, groups=2, dilation=2, padding=2), nn.ReLU(), conv(16, 8, 1),
    )  # fmt: skip


@pytest.mark.parametrize("budget", ["uniform", "sensitivity"])
@pytest.mark.parametrize("sides", KINDS)
def test_networks_of_them_are_pruned_and_run_sparse(sides: int, budget: str, tmp_path: Path) -> None:
    net, data = network(sides), list(image(sides, 6).float().split(2))
    dense, fresh = copy.deepcopy(net), copy.deepcopy(net)
    worse = copy.deepcopy(net)
    report = gossamer.prune(net, data, 0.5, budget=budget, only=KINDS[sides], resume=tmp_path / "run")
    assert [line.shape[0] for line in report.layers] == [8, 8, 16, 8] and not any(line.note for line in report.layers)
    assert report.sparsity == pytest.approx(0.5, abs=0.02)
    depthwise = next(line for line in report.layers if line.name == "2")
    assert depthwise.us == depthwise.dense_us and depthwise.density < 1
    gossamer.prune(worse, data, 0.5, method="magnitude", only=KINDS[sides])
    torch._dynamo.reset()  # it gives up code that was compiled for too many models
    with torch.no_grad():
        x = data[0]
        assert (net(x) - dense(x)).norm() < (worse(x) - dense(x)).norm()
        run = compile_and_run(net, x)
        torch.testing.assert_close(run.output, net(x), rtol=1e-4, atol=1e-5)
        again = gossamer.prune(dense, data, 0.5, budget=budget, only=KINDS[sides], resume=tmp_path / "run")
        assert torch.equal(dense(x), net(x)) and again.sparsity == report.sparsity
        gossamer.save(net, tmp_path / "net.safetensors")
        assert torch.equal(gossamer.load(fresh, tmp_path / "net.safetensors")(x), net(x))


def test_what_is_no_such_convolution_is_refused() -> None:
    net = nn.Sequential(nn.ConvTranspose1d(4, 4, 3))
    with pytest.raises(gossamer.OptionError, match="'0' is a ConvTranspose1d: linear layers, Conv1d, Conv2d and Conv3d"):
        gossamer.prune(net, [torch.randn(2, 4, 9)], 0.5, only=nn.ConvTranspose1d)
