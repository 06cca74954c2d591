"""Regions of torch.compiler.nested_compile_region, which Dynamo compiles once for several blocks."""

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.nested_regions import inline_pruned_regions
from tests.backend.harness import prune_

OPTIONS = {"min_gain": 0, "dense": "eager"}
X = torch.randn(24, 48)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 48)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class Block(nn.Module):
    """A block whose region has regions of its own, a branch, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.parts = nn.LayerNorm(48), nn.ModuleList(Inner() for _ in range(2))

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        for part in self.parts:
            y = part(y)
        y = torch.cond(y.sum() > 0, lambda t: t + 1, lambda t: t - 1, (y,))
        return x + y, y.sum()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            x, more = block(x)
            total = total + more
        return x * total


def calls(model: nn.Module) -> int:
    """Returns how many regions the backend gets from Dynamo and keeps, in a graph that is only looked at."""
    seen: list[int] = []

    def look(module: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        inline_pruned_regions(module, Inputs.of(module, inputs))
        seen.append(len(module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)))
        return module.forward

    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(model, backend=look, fullgraph=True)(X), model(X))  # type: ignore[arg-type]
    torch.compiler.reset()
    return seen[0]


@torch.no_grad()
def test_regions_with_pruned_weights_are_inlined() -> None:
    model = Network().eval()
    assert calls(model) > 0  # without zeros, Inductor compiles each once
    assert calls(prune_(model, 0.1)) == 0


@pytest.mark.parametrize("training", [False, True])
def test_pruned_layers_in_regions_are_sparse(training: bool) -> None:
    torch.manual_seed(0)
    model = prune_(Network(), 0.1).train(training)
    decisions = gossamer.explain(model, X, options=OPTIONS).decisions
    assert {each.name for each in decisions if each.sparse} == {
        f"blocks.{n}.parts.{k}.layer.weight" for n in range(3) for k in range(2)
    }
    compiled = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS)
    grads = []
    for function in (model, compiled):
        model.zero_grad()
        out = function(X)
        out.sum().backward()
        grads.append([out.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
