"""The patterns of what a graph was decided about, for the page: of its static tensors, and of sparse inputs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from gossamer.backend.graph.inputs import Inputs, density
from gossamer.backend.page.pattern import pattern_of, pattern_of_places
from gossamer.backend.report.report import Decision

_SAME = 1e-6
"""Difference of densities up to which a tensor is the one that a decision is about."""


def patterns_of(inputs: Inputs, decisions: Sequence[Decision], names: Mapping[str, str]) -> dict[str, Any]:
    """The pattern of each tensor that a decision is about, by its name there; `names` are other names of the inputs.

    A decision may be about a product of inputs, such as a weight and its mask: then it is the one of the density decided on.
    Tensors of which this is not known are left out.
    """
    given = {names.get(name, name): inputs.values[index] for index, name in inputs.names.items()}
    given |= {names.get(static.name, static.name): static.tensor for static in inputs.statics.values()}
    found = dict[str, Any]()
    for decision in decisions:
        if decision.name in found:
            continue
        for pattern in _candidates(decision, given):
            if pattern is not None:
                found[decision.name] = pattern
                break
    return found


def _candidates(decision: Decision, given: Mapping[str, Any]) -> Iterator[dict[str, Any] | None]:
    """The pattern of the tensor itself, or of it times another of the same module."""
    tensor, threads = given.get(decision.name), torch.get_num_threads()
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
        return
    if hasattr(tensor, "to_torch"):
        coo = tensor.to_torch().to_sparse_coo()
        if coo.dim() == 2 and not coo.is_meta:
            rows, columns = coo.coalesce().indices()
            yield pattern_of_places(rows, columns, (int(coo.shape[0]), int(coo.shape[1])), threads)
        return
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return
    own = tensor.detach()
    if not decision.sparse or abs(density(own) - decision.density) < _SAME:
        yield pattern_of(own, threads)
    module = decision.name.rpartition(".")[0]
    beside = [each for name, each in given.items() if name != decision.name and name.rpartition(".")[0] == module]
    for other in beside:
        if isinstance(other, torch.Tensor) and other.layout is torch.strided and other.shape == own.shape:
            masked = (own != 0) & (other.detach() != 0)
            if abs(density(masked) - decision.density) < _SAME:
                yield pattern_of(masked, threads)
