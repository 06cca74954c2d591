"""Makes pictures of sparsity patterns for the page: of static tensors and of sparse inputs that decisions are about."""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from gossamer.backend.graph.inputs import Inputs, density
from gossamer.backend.page.pattern import pattern_of, pattern_of_places
from gossamer.backend.report.report import Decision, log
from gossamer.dialects.format import Format
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor

_SAME = 1e-6
"""If a tensor's density differs from that of a decision by less than this, the decision is about this tensor."""


def patterns_of(inputs: Inputs, decisions: Sequence[Decision], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the pattern of each tensor that a decision is about, by its name in the decision.

    names  other names of the inputs

    Several inputs may have that name, such as a weight and its mask. Then the pattern is of the input that has the density of
    the decision. If no input has that density, there is no pattern.
    """
    given: dict[str, list[Any]] = {}
    for index, name in inputs.names.items():
        static = inputs.statics.get(index)
        given.setdefault(names.get(name, name), []).append(inputs.values[index] if static is None else static.tensor)
    found = dict[str, Any]()
    for decision in decisions:
        if decision.name in found:
            continue
        try:
            pattern = next((each for each in _candidates(decision, given.get(decision.name, [])) if each is not None), None)
        except Exception as problem:  # tensors of other libraries may raise anything; the compilation must not fail for it
            log.info("no picture of %s: %s", decision.name, problem)
            continue
        if pattern is not None:
            found[decision.name] = pattern
    return found


def _candidates(decision: Decision, tensors: Sequence[Any]) -> Iterator[dict[str, Any] | None]:
    """Yields the patterns of the tensors of this name, such as a weight and its mask, and of the product of all of them."""
    threads, dense = torch.get_num_threads(), list[torch.Tensor]()
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            continue
        if isinstance(tensor, SparseTensor) or decision.op == "aggregation":
            yield _sparse(tensor, decision, threads)
        elif tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            dense.append(tensor.detach())
    alike = [tensor != 0 for tensor in dense if dense and tensor.shape == dense[0].shape]
    for mask in [*alike, reduce(torch.logical_and, alike)] if alike else []:
        if len(dense) == 1 or abs(density(mask) - decision.density) < _SAME:
            yield pattern_of(mask, threads)


def _sparse(tensor: torch.Tensor, decision: Decision, threads: int) -> dict[str, Any] | None:
    """Returns the pattern of a SparseTensor, or of an edge list: a row for each target, a column for each source.

    Returns None if the tensor is neither, or does not fit the shape in the decision."""
    if len(decision.shape) != 2:
        return None
    if isinstance(tensor, SparseTensor):
        if tuple(tensor.shape) != decision.shape:
            return None
        listed = tensor.to_format(Format.COO)
        rows, columns = listed.coordinates(0).long(), listed.coordinates(1).long()
    elif tensor.dim() == 2 and tensor.shape[0] == 2 and tensor.numel():
        columns, rows = tensor.long()
    else:
        return None
    if rows.numel() and (int(rows.max()) >= decision.shape[0] or int(columns.max()) >= decision.shape[1]):
        return None
    return pattern_of_places(rows, columns, (decision.shape[0], decision.shape[1]), threads)
