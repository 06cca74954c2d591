"""Runs a mixture of experts in which each expert's weights are tensors of their own, as in a list of modules. No gradients.

    gossamer::listed_mlp(x, experts, scores, leaves, numbers, activation, layout, key) -> y

The kernels read the weights of all experts in one tensor. The `ListedExperts` under `key` (computed.py) makes it from `leaves`,
and again after one of them changes. The leaves are mostly the weights themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.backend.graph.expressions import Expression
from gossamer.backend.report.options import Verify
from gossamer.backend.run.computed import LEAVES, Computed, compared_for, known
from gossamer.runtime.operations import Operation
from gossamer.sparsity.experts.routed_mlp import mixture

Weights = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
"""gate_up, its bias, down, its bias."""


@dataclass(eq=False)
class ListedExperts(Computed):
    """The weights of all experts of a layer."""

    def current(self, leaves: Sequence[Tensor], numbers: Sequence[int]) -> Weights:
        """Returns the weights for these leaves."""
        found: Weights = self.remembered(leaves, numbers, lambda: self._made(leaves, numbers))
        return found

    def _made(self, leaves: Sequence[Tensor], numbers: Sequence[int]) -> Weights:
        given = {leaf.untyped_storage().data_ptr() for leaf in leaves}
        own = lambda each: each.clone() if each is not None and each.untyped_storage().data_ptr() in given else each
        first, first_bias, second, second_bias = map(own, self.values(leaves, numbers))
        return first, first_bias, second, second_bias


def listed_experts(expression: Expression, verify: Verify) -> str:
    """Registers the weights of a layer. Returns the key under which the operation finds them."""
    key = f"{expression.key}-{verify}-experts"
    ListedExperts(expression.evaluate, compared_for(verify)).shared(key)
    return key


def _mlp(x: Tensor, experts: Tensor, scores: Tensor, leaves: list[Tensor], numbers: list[int], *how: Any) -> Tensor:
    activation, layout, _, key = how
    first, first_bias, second, second_bias = known(key).current(leaves, numbers)
    y: Tensor = mixture(x, experts, scores, first, None, first_bias, second, None, second_bias, activation, layout, False)[0]
    return y


def _fake(x: Tensor, experts: Tensor, scores: Tensor, leaves: Any, numbers: Any, *how: Any) -> Tensor:
    return x.new_empty((x.shape[0], how[2]))


listed_mlp = Operation(
    "listed_mlp(Tensor x: F[tokens columns], Tensor experts: i[tokens top], Tensor scores: f[tokens top],"
    f" {LEAVES}, str activation, str layout, SymInt outputs, str key) -> Tensor",
    _mlp,
    _mlp,
    _fake,
    remembers_floats=True,
).register()
