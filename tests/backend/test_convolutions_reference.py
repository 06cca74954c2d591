"""Convolutions by MLIR's own sparsifier (schedule="reference"), against dense torch, and against our kernel."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gossamer.sparsity.prepare import Mask
from tests.backend.harness import assert_same, compile_and_run
from tests.backend.test_convolutions import Block, prune_

LAYERS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Conv2d(8, 12, 3, padding=1), (2, 8, 9, 21)),
    (nn.Conv2d(8, 5, 1, bias=False), (3, 8, 4, 5)),
    (nn.Conv1d(6, 12, 5, 2), (2, 6, 40)),
    (nn.Conv3d(4, 8, 3, (2, 1, 2), (1, 0, 2), (1, 2, 1)), (2, 4, 6, 7, 9)),
    (nn.Conv2d(5, 4, 3, padding=2, padding_mode="circular"), (1, 5, 8, 8)),
    (nn.Conv2d(5, 4, (2, 3), padding="same"), (1, 5, 8, 8)),
    (nn.ConvTranspose2d(6, 4, 4, 2, 1), (2, 6, 5, 7)),
    (nn.ConvTranspose1d(6, 4, 3, 2, 5, 1), (2, 6, 30)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_kinds_of_layers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    network = prune_(nn.ModuleList(layer for layer, _ in LAYERS)).eval().to(dtype)
    images = [torch.randn(shape, dtype=dtype) for _, shape in LAYERS]

    def call(*images: Tensor) -> list[Tensor]:
        return [F.relu(layer(x)) + 1 for layer, x in zip(network, images, strict=True)]

    run = compile_and_run(call, *images, regions=len(LAYERS), schedule="reference")
    assert {d.schedule for d in run.regions} == {"reference"}
    with torch.no_grad():
        for change in (lambda w: w, lambda w: w * -2, torch.randn_like):
            for parameter in network.parameters():
                parameter.copy_(change(parameter))
            for actual, expected in zip(run.function(*images), call(*images), strict=True):
                assert_same(actual, expected)


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_a_residual_block_with_its_norms(dense: str, images: int) -> None:
    torch.manual_seed(0)
    block, x = prune_(Block()).eval(), torch.randn(images, 20, 17, 15)
    run = compile_and_run(block, x, regions=4, dense=dense, schedule="reference")
    ours = compile_and_run(block, x, regions=4, dense=dense)
    assert_same(run.output, ours.output)
    with torch.no_grad():
        assert_same(run.output, block(x))
        x[0, 3, 5, 5] = float("nan")
        assert run.function(x).isnan().any() and torch.equal(run.function(x).isnan(), ours.function(x).isnan())


def test_open_sizes_empty_batches_and_gradients() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(6, 8, 3, 2, 1)
    parametrize.register_parametrization(layer, "weight", Mask((torch.rand_like(layer.weight) < 0.3).float()))
    x = torch.randn(2, 6, 11, 14, requires_grad=True)
    for axis in (0, 2, 3):
        torch._dynamo.mark_dynamic(x, axis)
    run = compile_and_run(layer, x, grad=True, regions=2, schedule="reference")
    for shape in ((2, 6, 11, 14), (0, 6, 9, 9), (3, 6, 8, 17)):
        given = [torch.randn(shape).requires_grad_()]
        given.append(given[0].detach().clone().requires_grad_())
        for call, images in zip((run.function, layer), given, strict=True):
            layer.zero_grad()
            call(images).square().sum().backward()
        assert given[0].grad is not None and given[1].grad is not None
        assert_same(given[0].grad, given[1].grad)


def test_groups_stay_dense_with_a_reason() -> None:
    layer, x = prune_(nn.Conv2d(8, 8, 3, groups=4)).eval(), torch.randn(1, 8, 9, 9)
    run = compile_and_run(layer, x, regions=0, schedule="reference")
    assert [d.reason for d in run.decisions] == ["schedule reference is not for convolutions with groups"]
