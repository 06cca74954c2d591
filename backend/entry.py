"""The entry point of the backend: Dynamo calls `sparse` for each graph under `torch.compile(model, backend="sparse")`.

sparse → Compiler.compile (compile_module.py) → SparseRewrite (rewrite.py) → compile_graph (compile_graph.py)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx

from gossamer.backend.attention.trace_gradients import trace_flex_gradients
from gossamer.backend.compile_eval import compile_eval
from gossamer.backend.compile_module import Compiler
from gossamer.backend.dense import check_mode
from gossamer.backend.devices.unproven import stays_dense
from gossamer.backend.experts.trace_experts import trace_experts
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph_passes import STEPS, check_disabled
from gossamer.backend.measuring.first_use import calibrate_at_first_use
from gossamer.backend.nested_regions import inline_pruned_regions
from gossamer.backend.owners.eval_mode import is_in_eval_mode
from gossamer.backend.owners.owners import Owners
from gossamer.backend.owners.zeros_guard import guard_zeros
from gossamer.backend.report.generate import watch_for_generate
from gossamer.backend.report.graph_breaks import watch_graph_breaks
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import collect
from gossamer.backend.run.profile_marks import leave_out_profile_marks
from gossamer.backend.static_results import split_static_results
from gossamer.runtime.modules.packages import watch_packages
from gossamer.runtime.torch_internals import ahead_of_time
from gossamer.runtime.watching.names import name_tensors

if TYPE_CHECKING:
    from gossamer.backend.checking.checked_graph import CheckedGraph


def sparse(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | Options | None = None,
) -> Callable[..., Any]:
    """Compiles one of Dynamo's graphs. Gossamer compiles its sparse regions; Inductor compiles its dense part, or torch runs
    it eagerly.

    gm, example_inputs  as Dynamo passes them: the graph, and a real tensor for each of its inputs
    mode                as in torch.compile, for the code that Inductor compiles; "max-autotune" and
                        "max-autotune-no-cudagraphs" also measure the sparse schedules instead of predicting them (see `tune`)
    options             see `Options`

    For modules in eval mode, the forward pass is compiled for inference even if gradients are enabled (see `compile_eval`).
    If a graph cannot be compiled, or torch cannot trace it, the graph runs as without torch.compile, with a warning.

    Raises OptionError for an unknown mode or option. With {"strict": True}, raises each error of a compilation.
    """
    parsed = Options.parse(options)
    check_mode(mode)
    check_disabled(parsed.disable)
    if parsed.dump_ir is None:
        return compile_dynamo_graph(gm, example_inputs, mode, parsed)
    with collect() as found:
        compiled = compile_dynamo_graph(gm, example_inputs, mode, parsed)
    from gossamer.backend.dump_page import write_page  # only dumps need this import

    write_page(found, Inputs.of(gm, example_inputs), parsed)
    return compiled


def compile_dynamo_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], mode: str | None, parsed: Options
) -> Callable[..., Any]:
    """Does the same as `sparse`, for a valid mode and valid options. Writes no page."""
    watch_graph_breaks(sparse)
    leave_out_profile_marks()
    inputs = Inputs.of(gm, example_inputs)
    inline_pruned_regions(gm, inputs)
    name_tensors((inputs.values[index], static.name) for index, static in inputs.statics.items())
    calibrate_at_first_use(inputs)
    compiler = Compiler(parsed, mode)
    if stays_dense(inputs.values, parsed):
        return compiler.compile(gm, example_inputs)
    checked = _checked(gm, inputs, parsed) if parsed.check else None
    apart = split_static_results(gm, inputs)
    owners = Owners(gm.graph)
    guard_zeros(owners, inputs)
    twice = compile_eval(gm, inputs, compiler, owners) if is_in_eval_mode(owners, inputs.values) else None
    compiled = compiler.compile(gm, example_inputs) if twice is None else twice.__call__
    beside = compiled if apart is None else apart.beside(compiled, twice is not None)
    return beside if checked is None else checked.around(beside)


def _checked(gm: fx.GraphModule, inputs: Inputs, options: Options) -> "CheckedGraph":
    """Returns an object that compares the results of the compiled graph with those of this one."""
    from gossamer.backend.checking.checked_graph import CheckedGraph  # only the option `check` needs these imports
    from gossamer.backend.checking.locate import Ways

    def compile_part(part: fx.GraphModule, values: Sequence[Any], changed: Options) -> Callable[..., Any]:
        return Compiler(replace(changed, dump_ir=None), None).compile(part, values)

    return CheckedGraph(gm, inputs, Ways(compile_part, options, STEPS))


trace_experts(sparse)
trace_flex_gradients(sparse)
watch_for_generate(sparse)
watch_packages(ahead_of_time)
watch_graph_breaks(sparse)  # here, because a model whose graph breaks at its first line never calls the backend
