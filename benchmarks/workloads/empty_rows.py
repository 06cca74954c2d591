"""Linear layers of which whole rows of the weight are zero, beside the smaller dense layer that somebody makes by hand.

layer  3072 -> 768, for 128 tokens
mlp    768 -> 3072 -> 768 with gelu, for 128 tokens: rows of the first layer are empty, so columns of the second are constant

By hand, the layer has the rows that are left, and its results are put where they belong. In the MLP nothing has to be moved.
"""

from __future__ import annotations

from argparse import Namespace, _ActionsContainer
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.arguments import add_list, shares, some_of
from benchmarks.models import PrunedModel
from benchmarks.own_code import compiled
from benchmarks.registry import Case, Contender, Prepared, Workload, contender

_TOLERANCE = {"f32": 1e-5}
_TOKENS = 128


class Rows(nn.Module):
    """A linear layer of some rows of the result; the others are the bias."""

    kept: Tensor
    rest: Tensor

    def __init__(self, linear: nn.Linear, kept: Tensor) -> None:
        super().__init__()
        self.linear = _with_rows(linear, kept)
        self.register_buffer("kept", kept)
        assert linear.bias is not None
        self.register_buffer("rest", linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y = self.rest.expand(*x.shape[:-1], -1).clone()
        y[..., self.kept] = self.linear(x)
        return y


@torch.no_grad()
def _with_rows(linear: nn.Linear, kept: Tensor) -> nn.Linear:
    smaller = nn.Linear(linear.in_features, len(kept))
    smaller.weight.copy_(linear.weight[kept])
    smaller.bias.copy_(linear.bias[kept])
    return smaller


@torch.no_grad()
def _with_columns(linear: nn.Linear, kept: Tensor, constant: Tensor) -> nn.Linear:
    """The layer for some of its inputs, where the others are `constant`."""
    smaller = nn.Linear(len(kept), linear.out_features)
    smaller.weight.copy_(linear.weight[:, kept])
    rest = constant.clone()
    rest[kept] = 0
    smaller.bias.copy_(linear.bias + linear.weight @ rest)
    return smaller


def left(linear: nn.Linear) -> Tensor:
    """The numbers of the rows that are not empty."""
    return linear.weight.detach().count_nonzero(1).nonzero().flatten()


def smaller(model: nn.Module) -> nn.Module:
    """What somebody writes who knows of the empty rows."""
    if isinstance(model, nn.Linear):
        return Rows(model, left(model)).eval()
    assert isinstance(model, nn.Sequential)
    up, act, down = model
    assert isinstance(up, nn.Linear) and isinstance(down, nn.Linear)
    kept = left(up)
    return nn.Sequential(_with_rows(up, kept), act, _with_columns(down, kept, act(up.bias.detach()))).eval()


def prepare_smaller(problem: PrunedModel) -> Prepared:
    call = compiled(smaller(problem.model), fullgraph=True)
    return Prepared(lambda: call(*problem.inputs))


def build(name: str, sparsity: float) -> PrunedModel:
    torch.manual_seed(0)
    first = nn.Linear(3072, 768) if name == "layer" else nn.Linear(768, 3072)
    with torch.no_grad():
        first.weight[torch.randperm(first.out_features)[: round(sparsity * first.out_features)]] = 0
    model = first if name == "layer" else nn.Sequential(first, nn.GELU(), nn.Linear(3072, 768))
    return PrunedModel(model.eval(), (torch.randn(_TOKENS, first.in_features),), _TOLERANCE)


def contenders() -> dict[str, Contender]:
    by_hand = Contender("smaller by hand, Inductor", prepare_smaller)
    return {**{name: contender(name) for name in ("dense", "inductor")}, "smaller": by_hand, "sparse": contender("sparse")}


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--models", some_of("layer", "mlp"), "layer,mlp", "of which")
    add_list(parser, "--sparsity", shares, ".3,.6,.9", "shares of rows that are empty")


def cases(args: Namespace) -> list[Case]:
    return [
        Case(f"{name} {sparsity:.0%}", {"model": name, "sparsity": sparsity}, partial(build, name, sparsity), 1.2)
        for name in args.models
        for sparsity in args.sparsity
    ]


WORKLOAD = Workload(
    "linear layers with empty rows, beside the smaller dense layer", add_arguments, cases, contenders, preparing=3.0
)
