"""A model in which the pruned Linears are computed by somebody else's sparse product."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import nn

from benchmarks.registry import Problem, Unsupported

_LEAST_ZEROS = 0.1


def with_sparse_linears(problem: Problem, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """A copy of the model in which `make` has replaced every Linear with at least a tenth of zeros."""
    if problem.precision != "f32":
        raise Unsupported("float32 only")
    model = copy.deepcopy(problem.model)
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and (child.weight == 0).float().mean() >= _LEAST_ZEROS:
                setattr(parent, name, make(child))
                replaced += 1
    if not replaced:
        raise Unsupported("no Linear of the model has a tenth of zeros")
    return model
