"""One case: a compiled model against the same in float64, with its gradients."""

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.backend import sparse
from gossamer.backend.report.report import collect
from gossamer.backend.run import lost_zeros
from tests.fuzz.builder import ModelProgram
from tests.fuzz.pruned import open_sizes, small_layers_pay

ROUNDING = {"torch.float32": 2e-5, "torch.float64": 1e-10, "torch.bfloat16": 3e-2}
TIMES_EAGER = 8  # what an error may be of the one that eager torch makes in this type
LEAST = 1e-3  # as large as everything counts at least
SHARE = (
    1e-2  # of the largest gradient of a call, as large as its others count at least: they may be differences of equal numbers
)


def difference(program: ModelProgram) -> tuple[str, str]:
    """How a model goes, in a few words, and what is wrong with that, if anything is."""
    try:
        expected = _run(program, wide=True, backend=None)
        eager = _run(program, wide=False, backend=None)
    except Exception as refusal:
        return f"torch refuses: {type(refusal).__name__} {str(refusal)[:80]}", ""
    try:
        with collect() as collected, small_layers_pay() if program.smaller else nullcontext():
            found = _run(program, wide=False, backend=sparse)
    except Exception as failure:
        try:
            _run(program, wide=False, backend="eager" if "twice" in program.backward else "aot_eager")
        except Exception as refusal:
            return f"torch.compile refuses: {type(refusal).__name__} {str(refusal)[:80]}", ""
        return "wrong", f"raises {type(failure).__name__}: {str(failure)[:1500]}"
    if not program.smaller and not any(decision.sparse for decision in collected.decisions):
        return "wrong", f"no regions: {collected.decisions}"
    largest = _largest(expected)
    if program.marked == "unbacked" and "last=True" in program.calls[0]:  # a layout that torch's own traces do not know
        found, eager = _contiguous(found), _contiguous(eager)
    for name, reference in expected.items():
        problem = _compared(found[name], reference, eager[name], ROUNDING[program.dtype], largest[_call_of(name)])
        if problem:
            return "wrong", f"{name}: {problem}"
    smaller = ", smaller" if any(decision.schedule == "smaller" for decision in collected.decisions) else ""
    gradients = ", gradients" if "enable_grad" in program.modes else ""
    return f"right: {'training' if program.training else 'eval'}{gradients}{smaller}", ""


def _run(program: ModelProgram, wide: bool, backend: Any) -> dict[str, Tensor | None]:
    """Outputs, gradients and buffers after all calls, by name; compiled by a backend, if there is one."""
    torch._dynamo.reset()
    lost_zeros._times = 0
    names: dict[str, Any] = {}
    exec(program.definition(), names)
    model: nn.Module = names["model"]
    model = model.double() if wide else model
    found: dict[str, Tensor | None] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error" if backend is sparse else "ignore")
        warnings.filterwarnings("ignore", message=".*torch.jit.*|.*lru_cache.*|.*enable_nested_tensor.*|.*TF32.*")
        if backend is not None:
            options = eval(program.options) if backend is sparse else None
            model = torch.compile(model, backend=backend, fullgraph=True, dynamic=eval(program.dynamic), options=options)
        for n, (call, mode, backward) in enumerate(zip(program.calls, program.modes, program.backward, strict=True)):
            given = eval(program.inputs(call), names)
            given = tuple(x.double() if wide and x.is_floating_point() else x for x in given)
            if program.marked and backend is not None:
                open_sizes(given, program.kind, program.marked)
            leaf = given[0].requires_grad_(mode == "enable_grad")
            with getattr(torch, mode)():
                out = model(*given)
                out = out.mul_(2) if program.written else out
            found[f"output {n}"] = out
            if backward:
                _differentiate(out, leaf, backward)
                found[f"gradient {n} of the input"] = leaf.grad
                for name, parameter in model.named_parameters():
                    found[f"gradient {n} of {_own(name)}"] = parameter.grad
                    parameter.grad = None
            if n == 0 and program.change:
                model = _changed(model, program.change)
    return found | {f"buffer {len(program.calls)} {_own(name)}": each for name, each in model.named_buffers()}


def _differentiate(out: Tensor, leaf: Tensor, backward: str) -> None:
    loss = out.square().sum()
    if backward == "twice":
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        loss = first.square().sum()
    loss.backward()


def _changed(model: nn.Module, change: str) -> nn.Module:
    names: dict[str, Any] = {"torch": torch, "copy": copy, "model": model}
    exec(change, names)
    changed: nn.Module = names["model"]
    return changed


def _own(name: str) -> str:
    return name.removeprefix("_orig_mod.")


def _call_of(name: str) -> str:
    """ "gradient 1", "output 0" """
    return " ".join(name.split()[:2])


def _contiguous(results: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if result is None else result.contiguous() for name, result in results.items()}


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
    if _described(found) != _described(eager):
        return f"gives {_described(found)}, torch {_described(eager)}"
    found, eager, reference = found.detach(), eager.detach(), reference.detach()
    if not reference.isfinite().all() or not eager.isfinite().all():
        return ""  # what is not stored lets no NaN through, where a dense product does
    scale = float(reference.abs().max()) if reference.numel() else 0
    allowed = TIMES_EAGER * float((eager.double() - reference).abs().max()) if reference.numel() else 0
    error = float((found.double() - reference).abs().nan_to_num(torch.inf).max()) if reference.numel() else 0
    limit = allowed + rounding * max(scale, LEAST, SHARE * largest)
    return "" if error <= limit else f"differs by {error:.3g} of {scale:.3g}, eager torch by {allowed / TIMES_EAGER:.3g}"


def _described(tensor: Tensor) -> str:
    """What else than its values code may depend on."""
    steps = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1 and tensor.numel()]
    kept = "with gradients" if tensor.requires_grad else "without gradients"
    return f"{tensor.dtype} {list(tensor.shape)}, strides {steps}, {kept}"
