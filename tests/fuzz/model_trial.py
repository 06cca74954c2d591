"""One case: a compiled model against the same in float64, with its gradients."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.backend import sparse as backend
from gossamer.backend.report.report import collect
from tests.fuzz.models import ModelProgram

ROUNDING = {"torch.float32": 2e-5, "torch.float64": 1e-10, "torch.bfloat16": 3e-2}
TIMES_EAGER = 8  # what an error may be of the one that eager torch makes in this type
LEAST = 1e-3  # as large as everything counts at least, and as this share of the largest gradient of a call


def difference(program: ModelProgram) -> tuple[str, str]:
    """How a model goes, in a word, and what is wrong with that, if anything is."""
    try:
        expected = _run(program, wide=True, compiled=False)
        eager = _run(program, wide=False, compiled=False)
    except Exception as refusal:
        return f"torch refuses: {type(refusal).__name__} {str(refusal)[:80]}", ""
    try:
        with collect() as collected:
            found = _run(program, wide=False, compiled=True)
    except Exception as failure:
        return "wrong", f"raises {type(failure).__name__}: {str(failure)[:1500]}"
    if not any(decision.sparse for decision in collected.decisions):
        return "wrong", f"no regions: {collected.decisions}"
    largest = _largest(expected)
    for name, reference in expected.items():
        problem = _compared(found[name], reference, eager[name], ROUNDING[program.dtype], largest[_call_of(name)])
        if problem:
            return "wrong", f"{name}: {problem}"
    return "right", ""


def _run(program: ModelProgram, wide: bool, compiled: bool) -> dict[str, Tensor | None]:
    """Outputs and gradients of all calls, by name."""
    torch._dynamo.reset()
    names: dict[str, Any] = {}
    exec(program.definition(), names)
    model: nn.Module = names["model"]
    model = (model.double() if wide else model).train(program.training)
    function: Any = model
    found: dict[str, Tensor | None] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error" if compiled else "ignore")
        warnings.filterwarnings("ignore", message=".*torch.jit.*|.*lru_cache.*|.*enable_nested_tensor.*|.*TF32.*")
        if compiled:
            options, dynamic = eval(program.options), eval(program.dynamic)
            function = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic, options=options)
        dtype = eval(program.dtype, {"torch": torch})
        for n, call in enumerate(program.calls):
            given = eval(f"inputs({call}, dtype=dtype, graph=graph)", names | {"dtype": dtype, "graph": program.graph})
            given = tuple(x.double() if wide and x.is_floating_point() else x for x in given)
            if program.marked and compiled:
                torch._dynamo.mark_dynamic(given[0], 0 if program.graph else 1)
            leaf = given[0].requires_grad_(program.training)
            with torch.set_grad_enabled(program.training):
                out = function(*given)
            found[f"output {n}"] = out.detach()
            if program.training:
                out.square().sum().backward()
                found[f"gradient {n} of the input"] = leaf.grad
                for name, parameter in model.named_parameters():
                    found[f"gradient {n} of {name}"] = parameter.grad
                    parameter.grad = None
            if n == 0 and program.change:
                exec(program.change, {"torch": torch, "model": model})
    return found


def _call_of(name: str) -> str:
    """ "gradient 1", "output 0" """
    return " ".join(name.split()[:2])


def _largest(expected: dict[str, Tensor | None]) -> dict[str, float]:
    """What results of a call are at most: gradients that are 0 but for rounding, as that of a bias of keys, are beside that."""
    found: dict[str, float] = {}
    for name, tensor in expected.items():
        size = float(tensor.abs().nan_to_num(0).max()) if tensor is not None and tensor.numel() else 0.0
        found[_call_of(name)] = max(size, found.get(_call_of(name), 0.0))
    return found


def _compared(found: Tensor | None, reference: Tensor | None, eager: Tensor | None, rounding: float, largest: float) -> str:
    if found is None or reference is None or eager is None:
        return "" if found is reference is eager else f"gives {found}, torch {eager}"
    if found.shape != eager.shape or found.dtype != eager.dtype:
        return f"gives {found.dtype} {list(found.shape)}, torch {eager.dtype} {list(eager.shape)}"
    if not reference.isfinite().all() or not eager.isfinite().all():
        return ""  # what is not stored lets no NaN through, where a dense product does
    scale = float(reference.abs().max()) if reference.numel() else 0
    allowed = TIMES_EAGER * float((eager.double() - reference).abs().max()) if reference.numel() else 0
    error = float((found.double() - reference).abs().nan_to_num(torch.inf).max()) if reference.numel() else 0
    limit = allowed + rounding * max(scale, LEAST, LEAST * largest)
    return "" if error <= limit else f"differs by {error:.3g} of {scale:.3g}, eager torch by {allowed / TIMES_EAGER:.3g}"
