"""`gossamer.explain`: compiles a model as `backend="sparse"` would, and reports what was decided."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gossamer.backend.dense import check_mode
from gossamer.backend.entry import sparse
from gossamer.backend.graph_passes import check_disabled
from gossamer.backend.report.graph_breaks import collect_breaks, watch_graph_breaks
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import Report, collect
from gossamer.runtime.torch_internals import known_off


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    options: Mapping[str, Any] | Options | None = None,
    mode: str | None = None,
    **kwargs: Any,
) -> Report:
    """Compiles and runs `model(*inputs, **kwargs)` once and returns what was decided for every weight.

    model          a module or function, compiled already or not
    inputs         what it is called with; the number of tokens in them enters the prediction
    options, mode  as for torch.compile(model, backend="sparse")

    Gradients are included if they are enabled and the model or an input requires them. As torch._dynamo.explain does,
    it resets Dynamo before and after, so compiled functions are compiled again when they are next called.

    Raises OptionError for an unknown option or mode.
    """
    parsed = Options.parse(options)
    check_mode(mode)
    check_disabled(parsed.disable)
    function = _uncompiled(model)
    torch.compiler.reset()
    try:
        with collect() as collected, collect_breaks() as breaks:
            compiled = torch.compile(function, backend=lambda gm, ex: sparse(gm, ex, mode=mode, options=parsed))
            compiled(*inputs, **kwargs)
    finally:
        torch.compiler.reset()  # which forgets who watches, too
        watch_graph_breaks(sparse)
    return Report(collected.decisions, breaks, len(collected.kernels), collected.seconds, known_off())


def _uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile was given, if it was."""
    for attribute in ("_orig_mod", "_torchdynamo_orig_callable"):
        model = getattr(model, attribute, model)
    return model
