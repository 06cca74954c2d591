"""`gossamer.bisect` runs a model compiled and uncompiled, and finds the layer and the pass that make the results differ."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.backend.checking.checked_graph import Difference, collect_differences
from gossamer.backend.entry import sparse
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import Decision, collect
from gossamer.backend.unchanged import unchanged
from gossamer.runtime.torch_internals import tree_flatten


@dataclass(frozen=True)
class Bisection:
    """The result of `bisect`. `print` shows it; `bool` says whether anything differs.

    differences  for each graph, one entry if its results differ from torch's, and one if its gradients do
    decisions    the decisions about all weights in these graphs, sparse or dense
    """

    differences: Sequence[Difference]
    decisions: Sequence[Decision]

    def __bool__(self) -> bool:
        return bool(self.differences)

    def __str__(self) -> str:
        sparse = sum(decision.sparse for decision in self.decisions)
        if not self.differences:
            return f"Results and gradients are torch's. {sparse} of {len(self.decisions)} uses of weights are sparse."
        return "\n".join(str(each)[0].upper() + str(each)[1:] for each in self.differences)


def bisect(
    model: Callable[..., Any],
    *inputs: Any,
    options: Mapping[str, Any] | Options | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Bisection:
    """Calls `model(*inputs, **kwargs)` compiled and uncompiled, compares, and finds the layer and the pass at fault.

    model                        a module or a function that is not compiled
    inputs                       example inputs that show the fault
    options, fullgraph, dynamic  as for torch.compile(model, backend="sparse")

    If gradients are enabled, `bisect` also compares gradients, for random tangents. The model, the inputs and their gradients
    do not change. Dense parts run op by op. For each difference, `bisect` writes a small program that shows it, into the folder
    of the option `dump_ir` or the one for temporary files.

    Raises OptionError for an unknown option. With `fullgraph`, raises torch's error if the graph breaks.
    """
    parsed = replace(Options.parse(options), check=True)
    torch.compiler.reset()
    try:
        with unchanged(model, inputs, kwargs) as held, collect_differences() as found, collect() as decided:
            held.copy_parameters()
            compiled = torch.compile(model, backend=_backend(parsed), fullgraph=fullgraph, dynamic=dynamic)
            results = [each for each in tree_flatten(compiled(*inputs, **kwargs))[0] if _has_gradient(each)]
            leaves = [each for each in (*tree_flatten((inputs, kwargs))[0], *_parameters(model)) if _has_gradient(each)]
            if torch.is_grad_enabled() and results and leaves:
                tangents = [torch.randn_like(each) for each in results]
                torch.autograd.grad(results, leaves, tangents, allow_unused=True)
    finally:
        torch.compiler.reset()
    return Bisection(found, decided.decisions)


def _backend(options: Options) -> Callable[..., Any]:
    def checked(gm: Any, example_inputs: Any) -> Callable[..., Any]:
        return sparse(gm, example_inputs, options=options)

    return checked


def _parameters(model: object) -> list[nn.Parameter]:
    return list(model.parameters()) if isinstance(model, nn.Module) else []


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
