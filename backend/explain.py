"""`gossamer.explain`: compiles a model as `backend="sparse"` would, and reports what was decided."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from gossamer.backend.dense import check_mode
from gossamer.backend.entry import sparse
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph_passes import check_disabled
from gossamer.backend.report.graph_breaks import collect_breaks, is_whole
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import Report, collect
from gossamer.backend.report.without_zeros import without_zeros
from gossamer.backend.unchanged import Held, unchanged
from gossamer.runtime.torch_internals import known_off


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    options: Mapping[str, Any] | Options | None = None,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    both: bool = True,
    **kwargs: Any,
) -> Report:
    """Compiles `model(*inputs, **kwargs)` and returns what was decided for every weight.

    model                    a module or function, compiled already or not
    inputs                   what it is called with; the number of tokens in them enters the prediction
    options, mode, fullgraph, dynamic
                             as for torch.compile(model, backend="sparse")
    both                     whether to look at the other mode, too, if gradients are enabled: `Report.other`

    The report is about training if gradients are enabled and required, and about inference otherwise.

    Nothing is left behind: a model in one graph is not run at all. Where the graph breaks, the model runs, and its state and
    its inputs are put back, for which a copy of its parameters is made. As torch._dynamo.explain does, it resets Dynamo before
    and after, so compiled functions are compiled again when they are next called.

    Raises OptionError for an unknown option or mode; with `fullgraph`, torch's error where the graph breaks.
    """
    parsed = Options.parse(options)
    check_mode(mode)
    check_disabled(parsed.disable)
    call = _Call(_uncompiled(model), inputs, kwargs, mode, fullgraph, dynamic)
    report, held = call.explained(parsed)
    if both and torch.is_grad_enabled() and any(each.requires_grad for each in held.tensors):
        report.other = _other(call, report, held, parsed)
    return report


@dataclass(frozen=True)
class _Call:
    """A call of a model, and how it is to be compiled."""

    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mode: str | None
    fullgraph: bool
    dynamic: bool | None

    def explained(self, options: Options) -> tuple[Report, Held]:
        """The report about it, and what it holds."""
        torch.compiler.reset()
        try:
            with unchanged(self.function, self.inputs, self.kwargs) as held, collect() as found, collect_breaks() as breaks:
                backend = _Backend(self, options, held)
                compiled = torch.compile(self.function, backend=backend, fullgraph=self.fullgraph, dynamic=self.dynamic)
                with suppress(_Finished):
                    compiled(*self.inputs, **self.kwargs)
        finally:
            torch.compiler.reset()
        decisions = [*found.decisions, *without_zeros(backend.parameters, {each.name for each in found.decisions})]
        return Report(decisions, breaks, len(found.kernels), found.seconds, known_off(), found.training), held


class _Finished(BaseException):
    """Ends the call of a model whose only graph is compiled. Nobody who handles errors takes it for one."""


@dataclass
class _Backend:
    """The backend, for one call."""

    call: _Call
    options: Options
    held: Held
    parameters: dict[str, Tensor] = field(default_factory=dict)

    compiler_fn = staticmethod(sparse)  # who it compiles for, as torch's own wrappers of backends say it

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        compiled = sparse(gm, example_inputs, mode=self.call.mode, options=self.options)
        statics = Inputs.of(gm, example_inputs).statics.values()
        self.parameters |= {static.name: static.tensor for static in statics if isinstance(static.tensor, nn.Parameter)}
        if is_whole(gm, self.call.function):
            raise _Finished
        self.held.copy_parameters()
        return compiled


def _other(call: _Call, report: Report, held: Held, options: Options) -> Report | None:
    """The report about inference beside that about training, or the other way round; None if the model fails there.

    What is dense runs op by op: no time goes into code that is not going to be used.
    """
    training = not report.training
    with warnings.catch_warnings(), _in_mode(held.modules, training), torch.enable_grad() if training else torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            return call.explained(replace(options, dense="eager", dump_ir=None, strict=False))[0]
        except Exception:  # whatever a model raises in a mode that it was not called in
            return None


@contextmanager
def _in_mode(modules: list[nn.Module], training: bool) -> Iterator[None]:
    """The modules in train() or eval() mode, without calling them: some change their weights then."""
    before = [module.training for module in modules]
    for module in modules:
        module.training = training
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.training = value


def _uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile was given, if it was."""
    for attribute in ("_orig_mod", "_torchdynamo_orig_callable"):
        model = getattr(model, attribute, model)
    return model
