"""What stands in the place of convolutions lies in memory as they did, for what runs op by op behind it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.strides import orders_of_results, restore_results
from tests.backend.harness import assert_same, compile_and_run


class Block(nn.Module):
    """Images that attention has made, with channels innermost, through a norm and a convolution, and looked at as a matrix."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.mix, self.norm, self.back = nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.Linear(8, 8)
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1, groups=groups), nn.Conv2d(8, 8, 1)
        with torch.no_grad():
            for layer in (self.first, self.second):
                layer.weight.mul_(torch.rand_like(layer.weight) < 0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        y = y + self.first(F.silu(self.norm(y)))
        return self.back(self.second(y).flatten(2).transpose(1, 2).reshape(-1, 8))


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("trained", [False, True])
def test_norms_and_views_around_convolutions_of_images_with_channels_innermost(groups: int, trained: bool) -> None:
    torch.manual_seed(0)
    model, x = Block(groups), torch.randn(2, 8, 6, 6)
    wide = copy.deepcopy(model).double()
    run = compile_and_run(model, x, grad=trained)
    assert "conv 1x1" in {decision.op for decision in run.regions}
    expected = wide(x.double())
    assert_same(run.output, expected.float())
    if trained:
        run.output.square().mean().backward()
        expected.square().mean().backward()
        for ours, theirs in zip(model.parameters(), wide.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            assert_same(ours.grad, theirs.grad.float())


def test_a_gradient_that_lies_otherwise_than_torch_traced_it() -> None:
    """Of softplus: its fake gradient has the strides of the input, the real one those of what reaches it."""
    torch.manual_seed(0)
    layer, w, x = nn.Linear(16, 32), torch.randn(24, 5), torch.randn(2, 24, 16)
    layer.weight.data.mul_(torch.rand(32, 16) < 0.1)
    run = compile_and_run(lambda x: F.softplus(layer(x)).mT @ w, x, grad=True)
    assert run.regions
    assert_same(run.output, F.softplus(layer(x)).mT @ w)
    (weight,) = torch.autograd.grad(run.output.square().sum(), layer.weight)
    (expected,) = torch.autograd.grad((F.softplus(layer(x)).mT @ w).square().sum(), layer.weight)
    torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-4)


TAILS = {
    "nothing": lambda y: y,
    "another function": lambda y: torch.sin(y),
    "pixels in a row": lambda y: y.permute(0, 2, 3, 1).reshape(y.shape[0], -1, y.shape[1]),
}


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_results_lie_in_memory_as_they_do_without_compilation(dense: str, trained: bool, tail: str) -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(16, 16, 1), torch.randn(2, 16, 6, 6).to(memory_format=torch.channels_last)
    with torch.no_grad():
        layer.weight.mul_(torch.rand_like(layer.weight) < 0.1)

    def model(x: Tensor) -> Tensor:
        return TAILS[tail](F.relu(layer(x)))

    run = compile_and_run(model, x, grad=trained, dense=dense)
    assert run.regions
    expected = model(x)
    assert_same(run.output, expected)
    assert run.output.stride() == expected.stride()
    if tail == "nothing":
        assert run.output.permute(0, 2, 3, 1).view(-1, 16).shape == (72, 16)


def test_results_lie_as_before_behind_what_a_pass_has_added() -> None:
    """A bias that a pass takes out of a convolution is noted with the layout of the convolution, which a region takes away."""
    images, weight, bias = (
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(5, 3, 1, 1),
        torch.randn(5),
    )

    def model(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.relu(torch.ops.aten.convolution(x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1))

    traced = make_fx(model, tracing_mode="fake")(images, weight, bias)
    graph = traced.graph
    orders, before = orders_of_results(graph), set(graph.nodes)
    (convolution,) = graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    emit = Emitter(convolution, before=convolution.next)
    shaped = emit(torch.ops.aten.reshape.default, convolution.args[2], [5, 1, 1])
    added = emit(torch.ops.aten.add.Tensor, convolution, shaped)
    convolution.replace_all_uses_with(added, lambda user: user is not added)
    planar = Emitter(convolution)(torch.ops.aten.clone.default, convolution.args[0], memory_format=torch.contiguous_format)
    region = Emitter(convolution)(convolution.target, planar, convolution.args[1], None, *convolution.args[3:])
    convolution.replace_all_uses_with(region)
    restore_results(graph, orders, before)
    traced.recompile()
    expected = model(images, weight, bias)
    found = traced(images, weight, bias)
    assert_same(found, expected)
    assert found.stride() == expected.stride()
