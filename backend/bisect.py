"""`gossamer.bisect` runs a model compiled and uncompiled, and finds the layer and the pass that make the results differ."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gossamer.backend.checking.checked_graph import Difference, collect_differences
from gossamer.backend.entry import sparse
from gossamer.backend.example_call import of_torch, with_gradients
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import Decision, collect
from gossamer.backend.unchanged import unchanged


@dataclass(frozen=True)
class Bisection:
    """The result of `bisect`. `print` shows it; `bool` says whether anything differs.

    differences  for each graph, one entry if its results differ from torch's, and one if its gradients do
    decisions    the decisions about all weights in these graphs, sparse or dense
    gradients    whether gradients were compared, too
    """

    differences: Sequence[Difference]
    decisions: Sequence[Decision]
    gradients: bool = True

    def __bool__(self) -> bool:
        return bool(self.differences)

    def __str__(self) -> str:
        sparse = sum(decision.sparse for decision in self.decisions)
        if not self.differences:
            what = "Results and gradients are" if self.gradients else "Results are"
            return f"{what} torch's. {sparse} of {len(self.decisions)} uses of weights are sparse."
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
    torchs, ours = of_torch(options)
    parsed = replace(Options.parse(ours), check=True)
    torch.compiler.reset()
    try:
        with unchanged(model, inputs, kwargs) as held, collect_differences() as found, collect() as decided:
            held.copy_parameters()
            compiled = torch.compile(model, backend=_backend(parsed), fullgraph=fullgraph, dynamic=dynamic, options=torchs)
            results, leaves = with_gradients(compiled(*inputs, **kwargs)), [each for each in held.tensors if each.requires_grad]
            gradients = torch.is_grad_enabled() and bool(results) and bool(leaves)
            if gradients:
                tangents = [torch.randn_like(each) for each in results]
                torch.autograd.grad(results, leaves, tangents, allow_unused=True)
    finally:
        torch.compiler.reset()
    return Bisection(found, decided.decisions, gradients)


def _backend(options: Options) -> Callable[..., Any]:
    def checked(gm: Any, example_inputs: Any) -> Callable[..., Any]:
        return sparse(gm, example_inputs, options=options)

    return checked
