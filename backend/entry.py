"""The torch.compile backend: `torch.compile(model, backend="sparse")`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx

from gossamer.backend.attention.trace_gradients import trace_flex_gradients
from gossamer.backend.calls.lifetime import keep_with
from gossamer.backend.calls.profile_marks import leave_out_profile_marks
from gossamer.backend.dense import check_mode, eagerly, has_cpp_compiler, has_triton_for, with_inductor
from gossamer.backend.given_back import give_back
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph_passes import check_disabled
from gossamer.backend.measuring.first_use import calibrate_at_first_use
from gossamer.backend.report.generate import watch_for_generate
from gossamer.backend.report.graph_breaks import watch_for_sparse
from gossamer.backend.report.options import MEASURING, Options
from gossamer.backend.rewrite import SparseRewrite
from gossamer.backend.smaller.compile import compile_smaller
from gossamer.dialects.errors import GossamerError
from gossamer.runtime.torch_internals import INDUCTOR, off


def sparse(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | Options | None = None,
) -> Callable[..., Any]:
    """Compiles one of Dynamo's graphs: sparse regions by Gossamer, the rest by Inductor (or eagerly).

    gm, example_inputs  as Dynamo passes them: the graph, and a real tensor for each of its inputs
    mode                as in torch.compile, for what Inductor compiles; with "max-autotune" (and its kin without CUDA
                        graphs) the sparse schedules are measured, too, instead of predicted (see `tune`)
    options             see `Options`

    A graph of operations on SparseTensors that cannot be compiled runs as without torch.compile, with a warning.

    Raises OptionError for an unknown mode or option; with {"strict": True}, GossamerError for what fails.
    """
    watch_for_sparse(sparse)
    leave_out_profile_marks()
    parsed = Options.parse(options)
    check_mode(mode)
    check_disabled(parsed.disable)
    calibrate_at_first_use(Inputs.of(gm, example_inputs))
    return compile_smaller(gm, example_inputs, parsed, partial(_compiled, mode=mode, parsed=parsed))


def _compiled(gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None, parsed: Options) -> Callable[..., Any]:
    """A graph, compiled with all passes over what AOTAutograd makes of it."""
    inputs = Inputs.of(gm, example_inputs)
    rewrite = SparseRewrite(inputs, parsed, measuring=parsed.max_autotune or mode in MEASURING)
    wanted = parsed.dense == "inductor" or (parsed.dense == "auto" and has_cpp_compiler() and has_triton_for(example_inputs))
    try:
        if wanted and not off(INDUCTOR):
            compiled = with_inductor(gm, example_inputs, rewrite, mode or (MEASURING[-1] if parsed.max_autotune else None))
        else:
            compiled = eagerly(gm, example_inputs, rewrite)
    except GossamerError as error:  # an operation on SparseTensors that exists in eager code alone
        if parsed.strict:
            raise
        rewrite.give_up(error)
        return gm.forward
    called = rewrite.finish()
    keep_with(compiled, called)
    if called:
        give_back()
    return compiled


trace_flex_gradients(sparse)
watch_for_generate(sparse)
watch_for_sparse(sparse)  # a model that breaks at its first line never gets as far as calling the backend
