"""Registers attention over edges as an operation with derivatives.

A kernel computes its gradients. Compositions of other operations compute tangents and second gradients.

gossamer::attend_edges(...) -> (Tensor, Tensor)          sums, and the statistics of each row's softmax
gossamer::attend_edges_backward(...) -> Tensor[]         gradients of the terms that need them
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gossamer.runtime.operations import Operation
from gossamer.runtime.torch_internals import set_forward_gradients
from gossamer.sparsity.edges import composed_attention, edge_attention
from gossamer.sparsity.edges.edge_attention import NAMES
from gossamer.sparsity.operations.batches import batched_one_by_one
from gossamer.sparsity.operations.derivatives import Derivative


def _setup(ctx: Any, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    *given, ctx.scale, ctx.slope, ctx.dropout = inputs
    ctx.there = [each is not None for each in given]
    return *outputs, *(each for each in given if each is not None)


def _kept(ctx: Any) -> tuple[list[Tensor], list[Tensor | None], list[Any]]:
    """Returns the saved outputs and pattern of a call, its terms, and its other arguments."""
    out, statistics, *saved = ctx.saved_tensors
    positions, coordinates, *terms, seed = _by_place(ctx, saved)
    assert positions is not None and coordinates is not None
    return [out, statistics, positions, coordinates], terms, [seed, ctx.scale, ctx.slope, ctx.dropout]


def _by_place(ctx: Any, given: Sequence[Any]) -> list[Any]:
    """Returns values by the place of their argument, with None for each tensor that was left out."""
    remaining = iter(given)
    return [next(remaining) if there else None for there in ctx.there]


def _gradients(ctx: Any, gradient: Tensor) -> Sequence[Tensor | None]:
    saved, terms, others = _kept(ctx)
    needs = [bool(needed) for needed in _by_place(ctx, ctx.needs_input_grad[2:])[2:-1]]
    # The composition records a graph, which only gradients of gradients need.
    again = torch.is_grad_enabled()
    backward = composed_attention.attend_edges_backward if again else attend_edges_backward
    found = iter(backward(gradient, *saved, *terms, *others, needs))
    by_place = [None, None, *(next(found) if needed else None for needed in needs), None]
    return [each for each, there in zip(by_place, ctx.there, strict=True) if there]


def _tangent(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    (_, _, *pattern), terms, others = _kept(ctx)
    of_terms = _by_place(ctx, tangents)[2:-1]
    with set_forward_gradients(True):  # torch has only one level (2.13)
        dual = [
            term if term is None or tangent is None
            else forward_ad.make_dual(forward_ad.unpack_dual(term, level=0).primal, tangent, level=0)
            for term, tangent in zip(terms, of_terms, strict=True)
        ]  # fmt: skip
        return forward_ad.unpack_dual(composed_attention.attend_edges(*pattern, *dual, *others)[0], level=0).tangent


_PATTERN = "Tensor positions, Tensor coordinates"
_TERMS = "Tensor values, " + "".join(f"Tensor? {name}, " for name in (*NAMES[1:], "seed"))
_NUMBERS = "float scale, float slope, float dropout"
_TAGS = (torch.Tag.pt2_compliant_tag,)
attend_edges = Operation(
    f"attend_edges({_PATTERN}, {_TERMS}{_NUMBERS}) -> (Tensor, Tensor)",
    edge_attention.attend_on_cpu,
    composed_attention.attend_edges,
    edge_attention.attend_fake,
    Derivative(_setup, _gradients, _tangent),
    batched_one_by_one,
    tags=_TAGS,
).register()
attend_edges_backward = Operation(
    f"attend_edges_backward(Tensor gradient, Tensor out, Tensor statistics, {_PATTERN}, {_TERMS}{_NUMBERS}, bool[] needs)"
    " -> Tensor[]",
    edge_attention.backward_on_cpu,
    composed_attention.attend_edges_backward,
    edge_attention.backward_fake,
    batched=batched_one_by_one,
    tags=_TAGS,
).register()
