"""One case: a program with sparse tensors against the same with dense ones."""

import warnings
from typing import Any

import torch
from torch import Tensor

from gossamer import GossamerError, SparseTensor
from gossamer.backend import sparse as backend
from gossamer.sparsity.arrays.structure import check
from tests.fuzz.programs import NAMES, Program

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.complex64: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def difference(program: Program, compiled: bool) -> tuple[str, str]:
    """How a program goes, in a word, and what is wrong with that, if anything is."""
    given = program.tensors(sparse=False)
    try:
        expected = program.function()(**given)
        problem = None
    except Exception as refusal:
        expected, problem = None, refusal
    try:
        found = _run(program, compiled)
    except GossamerError as refusal:
        return f"refused: {str(refusal)[:60]}", ""
    except Exception as failure:
        cause: BaseException | None = failure
        while cause is not None and not isinstance(cause, GossamerError):  # Dynamo wraps what is raised while it traces
            cause = cause.__cause__
        if cause is not None:
            return f"refused: {str(cause)[:60]}", ""
        if problem is None:
            if isinstance(failure, IndexError) and _empty_on_the_way(program):
                return "more strict", ""  # torch does not look at the indices of an empty tensor
            refused = isinstance(failure, NotImplementedError) or "not implemented for" in str(failure)
            return ("not implemented", "") if refused else ("wrong", f"raises {type(failure).__name__}: {str(failure)[:300]}")
        return "both raise", ""
    if problem is not None:
        # Inductor takes what eager kernels of torch do not, and a SparseTensor has no strides that a view could not have.
        if compiled or "not implemented for" in str(problem) or "view size is not compatible" in str(problem):
            return "more", ""
        return "wrong", f"gives {_described(found)}, torch raises {type(problem).__name__}: {str(problem)[:200]}"
    try:
        return _compared(program, found, expected)
    except GossamerError as refusal:
        return "wrong", f"cannot be looked at: {str(refusal)[:300]}"


def _empty_on_the_way(program: Program) -> bool:
    operands = program.tensors(sparse=False)
    results = []
    for step in program.codes():
        operands["a"] = eval(step, NAMES | operands)
        results.append(operands["a"])
    return any(isinstance(each, Tensor) and not each.numel() for each in results)


def _run(program: Program, compiled: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = program.tensors(sparse=True)
        if not compiled:
            return program.function()(**given)
        torch._dynamo.reset()
        names: dict[str, Any] = dict(NAMES)
        exec(program.source(), names)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            return torch.compile(names["program"], backend=backend, fullgraph=True)(**given)


def _compared(program: Program, found: Any, expected: Any) -> tuple[str, str]:
    if not isinstance(expected, Tensor):
        return ("right", "") if type(found) is type(expected) else ("wrong", f"gives {found}, torch {expected}")
    if not isinstance(found, Tensor):
        return "wrong", f"gives {found}"
    plain = found
    if isinstance(found, SparseTensor):
        check(found.format, tuple(found.shape), [each.detach() for each in found.components])
        plain = found.to_dense()
        if plain.shape != found.shape or plain.dtype != found.dtype:
            return "wrong", f"is {_described(found)}, to_dense() {_described(plain)}"
    if plain.shape != expected.shape or plain.dtype != expected.dtype:
        return "wrong", f"gives {_described(found)}, torch {_described(expected)}"
    wide = expected
    if expected.is_floating_point():
        try:
            wide = program.function()(**program.tensors(sparse=False, wide=True)).to(expected.dtype)
        except Exception:
            wide = expected
    tolerance = TOLERANCE.get(expected.dtype, 0)
    if any(
        torch.allclose(plain, each, tolerance, tolerance, equal_nan=True)
        for each in (expected, wide)
        if each.shape == plain.shape
    ):
        return "right", ""
    if _equal_without_negative_zeros(program, tolerance):
        return "right", ""
    return "wrong", f"gives\n{plain}\ntorch\n{expected}"


def _equal_without_negative_zeros(program: Program, tolerance: float) -> bool:
    """Whether the signs of zeros alone make the difference: what is not stored has none, and 1 / 0 shows it."""
    both = [_run_steps(program, sparse) for sparse in (True, False)]
    found, expected = (each.to_dense() if isinstance(each, SparseTensor) else each for each in both)
    return torch.allclose(found, expected, tolerance, tolerance, equal_nan=True)


def _run_steps(program: Program, sparse: bool) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return program.function(signed_zeros=False)(**program.tensors(sparse))


def _described(found: Any) -> str:
    return f"{type(found).__name__} {found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else repr(found)
