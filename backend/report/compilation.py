"""Finds out what Dynamo compiles in this thread at the moment."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gossamer.runtime.torch_internals import InstructionTranslator, callback_handler


@dataclass(frozen=True)
class Compilation:
    """A compilation of Dynamo: the user's backend, the name of the function, and whether a graph break is an error."""

    backend: object
    function: str
    full_graph: bool


def compilation_in_progress() -> Compilation | None:
    """Returns the compilation in this thread. Returns None if there is none, or if this version of torch has another call
    stack."""
    frame = sys._getframe()
    while frame is not None:
        variables = frame.f_code.co_varnames + frame.f_code.co_cellvars
        if frame.f_code.co_name == "_compile" and {"compiler_fn", "one_graph", "code"} <= set(variables):
            found = frame.f_locals
            backend = found["compiler_fn"]
            while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
                backend = inner
            return Compilation(getattr(backend, "compiler_fn", backend), found["code"].co_name, found["one_graph"])
        frame = frame.f_back  # type: ignore[assignment]
    return None


def variables_of_calls() -> set[str]:
    """Returns the names of variables that belong to a compiled call that runs, and that functions within it capture.

    After a graph break, Dynamo compiles the rest of the function, or a comprehension, as a function that captures them:

        masks = one_hot(chosen, 8).float()                 new at every call
        print("routed")                                    breaks the graph
        return [expert(masks[:, n].t() @ x) for n, expert in enumerate(experts)]

    Returns an empty set if Dynamo compiles nothing, or if this version of torch has another call stack.
    """
    names, frame, compiling = set[str](), sys._getframe(), False
    while frame is not None and not (compiling and frame.f_code.co_name == "compile_wrapper"):
        if compiling and not frame.f_globals.get("__name__", "").startswith("torch."):
            names.update(frame.f_code.co_cellvars)
        compiling = compiling or (frame.f_code.co_name == "_compile" and "compiler_fn" in frame.f_locals)
        frame = frame.f_back  # type: ignore[assignment]
    return names if frame is not None else set()


def is_traced_for(backend: object) -> bool:
    """Whether Dynamo traces for `backend` now. Call it within torch.compiler.assume_constant_result."""
    compiler = getattr(InstructionTranslator.current_tx().output, "compiler_fn", None)
    compiler = getattr(getattr(compiler, "__self__", None), "backend_compile_fn", compiler)  # DDP's wrapper
    while compiler is not backend and (inner := getattr(compiler, "compiler_fn", None)) is not None:
        compiler = inner
    return compiler is backend


@contextmanager
def callbacks_may_raise() -> Iterator[None]:
    """In this context, a callback at the end of a compilation may raise. Otherwise Dynamo would count the compilation as
    pending for ever."""
    try:
        yield
    except BaseException:
        pending = "_CompilationCallbackHandler__pending_callbacks_counter"
        if getattr(callback_handler, pending, 0):
            setattr(callback_handler, pending, getattr(callback_handler, pending) - 1)
        raise
