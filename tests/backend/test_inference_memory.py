"""What a compiled model keeps besides its weights, as far as it can be counted on any machine."""

import gc

import pytest
import torch
from torch import nn

from gossamer.backend.run import packed_weights
from gossamer.runtime.packing import Packed
from tests.backend.harness import assert_same, compile_and_run, prune_


def model() -> nn.Module:
    return prune_(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64))).eval()


def packings() -> list[Packed]:
    values = [value for kept in [*packed_weights._known.values()] for _, value in kept.items()]
    return [value.packed for value in values if value.packed is not None]


@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_the_places_of_values_are_not_kept_of_weights_that_never_change(dense: str) -> None:
    gc.collect()
    before = {id(each) for each in packings()}
    net, x = model(), torch.randn(5, 64)
    run = compile_and_run(net, x, dense=dense, regions=2)
    made = [each for each in packings() if id(each) not in before]
    assert len(made) == 2 and not any(each.has_source for each in made)
    for _ in range(3):
        with torch.no_grad():
            net[0].weight.mul_(2)
            assert_same(run.function(x), net(x))
            assert_same(run.function(x), net(x))
    kept = [each for each in packings() if id(each) not in before]
    assert sorted(each.has_source for each in kept) == [False, True]


def test_full_verification_of_a_weight_that_another_graph_has_packed() -> None:
    net, x = model(), torch.randn(5, 64)
    compile_and_run(net, x, dense="eager", regions=2)
    torch._dynamo.reset()
    run = compile_and_run(net, x, dense="eager", verify="full", regions=2)
    net[0].weight.data.mul_(2)
    with torch.no_grad():
        assert_same(run.function(x), net(x))


@pytest.mark.parametrize("regions, grad", [(3, False), (5, True)])
def test_no_context_of_mlir_outlives_a_compilation(regions: int, grad: bool) -> None:
    """Nor waits for the garbage collector, which would look at all that a process has loaded to find it."""
    from torch_mlir import ir

    def net() -> nn.Module:
        layers = nn.Sequential(nn.Linear(64, 80), nn.GELU(), nn.Linear(80, 63), nn.Unflatten(1, (7, 3, 3)), nn.Conv2d(7, 16, 3))
        layers[4].weight.data *= torch.rand(16, 7, 1, 1) < 0.2
        for layer in (layers[0], layers[2]):
            prune_(layer)
        return layers.train(grad)

    x = torch.randn(5, 64)
    compile_and_run(net(), x, grad=grad, regions=regions)
    gc.collect()
    before = ir.Context._get_live_count()
    torch._dynamo.reset()
    gc.disable()
    try:
        compile_and_run(net(), x, grad=grad, regions=regions, verify="full")
        assert ir.Context._get_live_count() <= before
    finally:
        gc.enable()
