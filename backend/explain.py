"""`gossamer.explain` compiles a model as `backend="sparse"` would, and reports the decisions."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from gossamer.backend.dense import check_mode
from gossamer.backend.dump_page import add_to_page
from gossamer.backend.entry import compile_dynamo_graph, sparse
from gossamer.backend.example_call import of_torch, tensor_names, uncompile, uncompiled
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.without_zeros import is_multiplied, without_zeros
from gossamer.backend.graph_passes import check_disabled
from gossamer.backend.pictures import patterns_of
from gossamer.backend.regions.details import answered
from gossamer.backend.report.graph_breaks import collect_breaks, is_whole, watch_graph_breaks
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import Collector, collect
from gossamer.backend.report.table import Report
from gossamer.backend.unchanged import Held, unchanged
from gossamer.runtime.torch_internals import callback_handler, known_off


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    options: Mapping[str, Any] | Options | None = None,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    both: bool | None = None,
    **kwargs: Any,
) -> Report:
    """Compiles `model(*inputs, **kwargs)`, and returns a report of the decision for every weight. `print` shows it as a table.

    model                    a module or a function, compiled or not
    inputs                   example inputs; predictions are for the number of tokens in them
    options, mode, fullgraph, dynamic
                             as for torch.compile(model, backend="sparse")
    both                     whether to compile for the other mode, too (`Report.other`), if gradients are enabled. By default,
                             a report about training also covers inference, but a report about inference not training

    The report is about training or inference, as torch.compile would compile the model now. `Report.training` says which.

    The model and the inputs do not change. A model that is one graph does not run. A model with graph breaks runs. Then its
    state and inputs are restored, from copies in memory. Like torch._dynamo.explain, this function resets Dynamo before and
    after, so compiled functions are compiled again at their next call.

    With options={"dump_ir": DIR}, that folder has each stage of the IR, and a page that shows them all, index.html.

    Raises OptionError for an unknown option or mode. With `fullgraph`, raises torch's error if the graph breaks.
    """
    torchs, ours = of_torch(options)
    parsed = Options.parse(ours)
    check_mode(mode)
    check_disabled(parsed.disable)
    call = _Call(uncompiled(model), inputs, kwargs, mode, fullgraph, dynamic, torchs)
    report, held = call.explained(parsed)
    wanted = report.training if both is None else both
    if wanted and torch.is_grad_enabled() and any(each.requires_grad for each in held.tensors):
        report.other = _other(call, report, held, parsed)
    add_to_page(report, parsed)
    return report


@dataclass(frozen=True)
class _Call:
    """A call of a model, and the settings to compile it with. `torchs` are options that torch.compile reads itself."""

    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mode: str | None
    fullgraph: bool
    dynamic: bool | None
    torchs: dict[str, Any] | None

    def explained(self, options: Options) -> tuple[Report, Held]:
        """Returns the report about the call, and the tensors and modules that the model and inputs hold."""
        torch.compiler.reset()
        try:
            with unchanged(self.function, self.inputs, self.kwargs) as held, collect() as found, collect_breaks() as breaks:
                backend = _Backend(self, options, held, found)
                callback_handler.register_end_callback(backend.before_code_runs)  # code between graphs may write to parameters
                uncompile(held.modules)
                settings: Any = {
                    "fullgraph": self.fullgraph,
                    "dynamic": self.dynamic,
                    "options": dict(self.torchs or {}) or None,
                }
                compiled = torch.compile(self.function, backend=backend, **settings)
                with suppress(_Finished):
                    compiled(*self.inputs, **self.kwargs)
                told = {each.name for each in found.decisions}
                others = list(without_zeros(backend.parameters, told, backend.multiplied))  # lazy ones have no shape later
        finally:
            torch.compiler.reset()  # this removes our callbacks, too
            watch_graph_breaks(sparse)
        report = Report(
            [*answered(found.decisions), *others], breaks, len(found.kernels), found.seconds, known_off(), found.training
        )
        report.min_gain, report.patterns, report.dump = options.min_gain, backend.patterns, options.dump_ir
        report.flows = found.flows
        return report, held


class _Finished(BaseException):
    """Ends the call of a model after its only graph is compiled. It is no Exception, so that handlers of errors let it pass."""


def _finish(*_: Any) -> Any:
    raise _Finished


@dataclass(repr=False)
class _Backend:
    """The backend for one call. It also collects data for the report.

    found       the decisions about all graphs
    parameters  the parameters of the graphs, by their names
    multiplied  the names of the parameters for which zeros can save time
    patterns    pictures of the tensors that decisions are about, by their names
    whole       whether the last graph does everything that the call does
    """

    call: _Call
    options: Options
    held: Held
    found: Collector
    parameters: dict[str, Tensor] = field(default_factory=dict)
    multiplied: set[str] = field(default_factory=set)
    patterns: dict[str, Any] = field(default_factory=dict)
    whole: bool = False

    __name__ = "sparse"
    compiler_fn = staticmethod(sparse)  # the backend inside; torch's own wrappers of backends have this attribute

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        decisions = self.found.decisions
        start, drawn = len(decisions), len(self.found.flows)
        compiled = compile_dynamo_graph(gm, example_inputs, self.call.mode, self.options)
        inputs, own = Inputs.of(gm, example_inputs), tensor_names(self.call.function)
        names = {name: own.get(id(inputs.values[index]), name) for index, name in inputs.names.items()}
        decisions[start:] = [replace(each, name=names.get(each.name, each.name)) for each in decisions[start:]]
        for part in (part for flow in self.found.flows[drawn:] for part in flow):
            part["weights"] = [names.get(name, name) for name in part["weights"]]
        own_names = {name: names[name] for name in inputs.names.values()}
        self.patterns |= patterns_of(inputs, decisions[start:], own_names)
        parameters = {index: inputs.values[index] for index in inputs.statics if isinstance(inputs.values[index], nn.Parameter)}
        self.parameters |= {names[inputs.names[index]]: each for index, each in parameters.items()}
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.multiplied |= {names[inputs.names[index]] for index in parameters if is_multiplied(placeholders[index])}
        self.whole = is_whole(gm, self.call.function)
        return _finish if self.whole else compiled

    def before_code_runs(self, *_: Any) -> None:
        """Copies the parameters after Dynamo's first compilation, unless its graph is the whole model, which does not run."""
        if not self.whole:
            self.held.copy_parameters()


def _other(call: _Call, report: Report, held: Held, options: Options) -> Report | None:
    """Returns the report about the other mode: inference if `report` is about training, and vice versa.

    Returns None if the model fails in that mode. Dense parts are not compiled, because nobody will use their code.
    """
    training = not report.training
    with warnings.catch_warnings(), _in_mode(held.modules, training), torch.enable_grad() if training else torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            return call.explained(replace(options, dense="eager", dump_ir=None, strict=False))[0]
        except Exception:  # a model can raise any error in a mode that its user does not call it in
            return None


@contextmanager
def _in_mode(modules: list[nn.Module], training: bool) -> Iterator[None]:
    """Sets the modules to training or eval mode. Does not call train() or eval(), which change the weights of some modules."""
    before = [module.training for module in modules]
    for module in modules:
        module.training = training
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.training = value
