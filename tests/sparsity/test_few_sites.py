"""A compiled network of points runs for many sites, one and none, wherever they run out, as it does eagerly."""

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import gossamer.nn as spconv
import gossamer.torchsparse.nn as spnn
from gossamer.torchsparse import SparseTensor
from tests.sparsity.clouds import close

SHAPE = (12, 14)
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def cloud(kept: int) -> tuple[Tensor, Tensor]:
    """Features and indices of many sites. A stride of 2 leads from so many of them to others, and from the rest nowhere."""
    everywhere = torch.cartesian_prod(torch.arange(2), *map(torch.arange, SHAPE)).int()
    even = (everywhere[:, 1:] % 2 == 0).all(1)
    indices = torch.cat(
        [each[torch.randperm(len(each))[:n]] for each, n in ((everywhere[even], kept), (everywhere[~even], 30))]
    )
    indices = indices[torch.randperm(len(indices))]
    return torch.randn(len(indices), 4, dtype=torch.float64), indices


class Residual(spconv.SparseModule):
    """As spconv's programs write it, with layers of torch called on features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = spconv.SubMConv2d(8, 8, 3, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: spconv.SparseConvTensor) -> spconv.SparseConvTensor:
        y = self.conv(x)
        y = y.replace_feature(self.norm(y.features))
        return y.replace_feature(torch.relu(y.features + self.linear(x.features)))


def sequence(*modules: nn.Module) -> nn.Module:
    return spconv.SparseSequential(*modules)


DOWN: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: spconv.SparseConv2d(4, 8, 1, 2, indice_key="d"),
    "largest": lambda: sequence(spconv.SubMConv2d(4, 8, 3), spconv.SparseMaxPool2d(1, 2, indice_key="d")),
    "mean": lambda: sequence(spconv.SubMConv2d(4, 8, 3), spconv.SparseAvgPool2d(1, 2, indice_key="d")),
}
NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: sequence(nn.BatchNorm1d(8), nn.ReLU(True)),
    "residual": Residual,
    "twice": lambda: sequence(spconv.SparseConv2d(8, 8, 1, 2), nn.BatchNorm1d(8)),
}
ALSO: dict[str, Callable[[], nn.Module]] = {
    "without statistics": lambda: nn.BatchNorm1d(8, track_running_stats=False),
    "without weight": lambda: nn.BatchNorm1d(8, affine=False),
    "pointwise": lambda: sequence(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.0), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.SiLU()),
    "back": lambda: spconv.SparseInverseConv2d(8, 8, 1, "d"),
    "finer": lambda: sequence(spconv.SparseConvTranspose2d(8, 8, 3, 2), nn.BatchNorm1d(8)),
    "whole grids": spconv.SparseGlobalMaxPool,
    "mean of grids": spconv.SparseGlobalAvgPool,
    "dense": spconv.ToDense,
}
CASES = [*product(["convolution"], {**NORMS, **ALSO}), ("largest", "batch norm"), ("mean", "residual")]


def results(
    call: Callable[..., Tensor], network: nn.Module, inputs: tuple[Tensor, Tensor], gradients: bool
) -> list[Tensor] | str:
    """The outputs, the gradients and what the network holds after a call, or what it raises."""
    network.zero_grad()
    x = inputs[0].clone().requires_grad_(gradients)
    try:
        with torch.set_grad_enabled(gradients):
            y = call(x, inputs[1])
            if gradients:
                y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    except ValueError as problem:
        return str(problem)
    leaves = [x, *network.parameters()] if gradients else []
    of = [torch.zeros_like(each) if each.grad is None else each.grad for each in leaves]
    return [y.detach(), *of, *(each.clone() for name, each in network.named_buffers() if name.endswith(("mean", "var")))]


def assert_as_eager(network: nn.Module, call: Callable[..., Callable[..., Tensor]], counts: list[int], dense: str) -> None:
    """One graph gives what the network gives eagerly, for each number of sites and in each state."""
    for training, gradients in ((True, True), (False, True), (False, False)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        mine, theirs = (copy.deepcopy(network).double().train(training) for _ in range(2))
        compiled = torch.compile(call(mine), backend="sparse", fullgraph=True, dynamic=True, options={"dense": dense})
        for count in counts:
            inputs = cloud(count)
            found, expected = results(compiled, mine, inputs, gradients), results(call(theirs), theirs, inputs, gradients)
            if isinstance(expected, str):
                assert count == 1 and found == expected
                continue
            for one, other in zip(found, expected, strict=True):
                assert one.shape == other.shape
                close(one, other)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(("down", "after"), CASES, ids=[" ".join(each) for each in CASES])
def test_any_number_of_sites_may_be_left(down: str, after: str) -> None:
    network = sequence(DOWN[down](), ({**NORMS, **ALSO})[after]())

    def call(module: nn.Module) -> Callable[..., Tensor]:
        def function(x: Tensor, indices: Tensor) -> Tensor:
            y = module(spconv.SparseConvTensor(x, indices, SHAPE, 2))
            return y.features if isinstance(y, spconv.SparseConvTensor) else y

        return function

    assert_as_eager(network, call, [30, 0, 1], "eager")


def test_inductor_compiles_any_number_of_sites() -> None:
    network = sequence(DOWN["convolution"](), nn.BatchNorm1d(8), Residual(), spconv.SparseInverseConv2d(8, 4, 1, "d"))

    def call(module: nn.Module) -> Callable[..., Tensor]:
        return lambda x, indices: module(spconv.SparseConvTensor(x, indices, SHAPE, 2)).features

    assert_as_eager(network, call, [30, 0, 1], "auto")


def test_torchsparse_names_run_for_any_number_of_sites() -> None:
    down = nn.Sequential(
        spnn.Conv3d(4, 8, 1, stride=2), spnn.BatchNorm(8), spnn.ReLU(True), spnn.Conv3d(8, 8, 3), spnn.BatchNorm(8)
    )
    network = nn.Sequential(*down, spnn.LeakyReLU(0.1), spnn.GroupNorm(2, 8), spnn.Conv3d(8, 4, 1, stride=2, transposed=True))

    def call(module: nn.Module) -> Callable[..., Tensor]:
        def function(x: Tensor, indices: Tensor) -> Tensor:
            return module(SparseTensor(x, torch.nn.functional.pad(indices, (0, 1)))).F

        return function

    assert_as_eager(network, call, [30, 0, 1], "eager")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("parameters", ["of the same type", "of float32"])
def test_batch_norm_over_rows_that_a_mask_keeps(dtype: torch.dtype, parameters: str) -> None:
    """Not of points alone: any rows whose number a graph learns when it runs, and [N, C, L]."""
    norm, tolerance = nn.BatchNorm1d(5), {torch.float64: 1e-12, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    nn.init.normal_(norm.weight)
    norm = norm.to(torch.float64 if dtype == torch.float64 else dtype if parameters == "of the same type" else torch.float32)
    for training in (True, False):
        mine, theirs = (copy.deepcopy(norm).train(training) for _ in range(2))
        compiled = torch.compile(lambda x, kept, mine=mine: mine(x[kept.nonzero()[:, 0]]), backend="sparse", fullgraph=True)
        with torch.no_grad():
            for count in (8, 0, 5, 1):
                x, kept = torch.randn(9, 5, 3, dtype=dtype) + 2, torch.arange(9) < count
                found, expected = compiled(x, kept), theirs(x[kept])
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                for one, other in ((found, expected), *zip(mine.buffers(), theirs.buffers(), strict=True)):
                    torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=tolerance)
        torch._dynamo.reset()
