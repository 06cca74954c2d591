"""One case: the gradients of a program with sparse tensors, of what they store and of dense operands, against dense float64."""

import warnings
from typing import Any

import torch
from torch import Tensor

from gossamer import GossamerError, SparseTensor
from gossamer.backend import sparse as backend
from tests.fuzz.programs import NAMES, Program

TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def difference(program: Program, compiled: bool) -> tuple[str, str]:
    """How a program goes, in a word, and what is wrong with its gradients, if anything is."""
    dense = {name: _leaf(tensor) for name, tensor in program.tensors(sparse=False, wide=True).items()}
    try:
        expected = program.function()(**dense)
        narrow = program.function()(**program.tensors(sparse=False))
        if not isinstance(expected, Tensor) or not expected.requires_grad or not expected.is_floating_point():
            return "no gradient", ""
        of_dense = _gradients(expected, dense)
    except Exception:
        return "torch refuses", ""
    given = program.tensors(sparse=True)
    leaves = {name: _leaf(each.values() if isinstance(each, SparseTensor) else each) for name, each in given.items()}
    operands = {name: each.with_values(leaves[name]) if isinstance(each, SparseTensor) else leaves[name]
                for name, each in given.items()}  # fmt: skip
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _run(program, operands, compiled)
            if not isinstance(found, Tensor) or found.shape != narrow.shape:
                return "other result", ""  # which the trial of values is about
            ours = _gradients(found.to_dense() if isinstance(found, SparseTensor) else found, leaves)
    except GossamerError as refusal:
        return f"refused: {str(refusal)[:60]}", ""
    except Exception as failure:
        cause: BaseException | None = failure
        while cause is not None and not isinstance(cause, GossamerError):
            cause = cause.__cause__
        refused = cause is not None or "not implemented for" in str(failure)
        return ("refused", "") if refused else ("wrong", f"raises {type(failure).__name__}: {str(failure)[:300]}")
    tolerance = max(TOLERANCE[leaf.dtype] for leaf in leaves.values() if leaf.is_floating_point())
    for name, gradient in ours.items():
        reference = of_dense[name]
        if isinstance(given[name], SparseTensor):
            reference, entries = _stored(given[name], reference)
            gradient = gradient.flatten()[entries]
        finite = reference.isfinite()
        error = (gradient.double() - reference)[finite].abs()
        scale = reference[finite].abs().max().clamp(min=1) if finite.any() else 1
        if not bool((error <= tolerance * scale).all()):
            return "wrong", f"the gradient of {name} is\n{gradient}\ntorch's\n{reference}"
    return "right", ""


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _run(program: Program, operands: dict[str, Any], compiled: bool) -> Any:
    if not compiled:
        return program.function()(**operands)
    torch._dynamo.reset()
    names: dict[str, Any] = dict(NAMES)
    exec(program.source(), names)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return torch.compile(names["program"], backend=backend, fullgraph=True)(**operands)


def _gradients(out: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if not out.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in wanted.items()}
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
    found = torch.autograd.grad((out * weights).sum(), list(wanted.values()), allow_unused=True)
    return {name: torch.zeros_like(leaf) if each is None else each
            for (name, leaf), each in zip(wanted.items(), found, strict=True)}  # fmt: skip


def _stored(pattern: SparseTensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """What stands in a dense gradient where a tensor stores something, and which of its values that are.

    What fills up blocks at the edge lies nowhere; zeros that fill up groups of N:M are no entries in other formats.
    """
    numbers = torch.arange(1, pattern.values().numel() + 1, dtype=torch.float64)
    filled = any(level.kind == "structured" for level in pattern.format.levels)
    order = pattern.with_values(torch.where(pattern.values().flatten() == 0, 0, numbers) if filled else numbers).to_dense()
    return gradient[order > 0], order[order > 0].long() - 1
