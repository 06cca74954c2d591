"""Whether the graph that Dynamo traces now is for a backend of ours."""

from gossamer.runtime.torch_internals import InstructionTranslator


def is_traced_for(backend: object) -> bool:
    """Whether Dynamo traces for `backend` now. To be asked within torch.compiler.assume_constant_result."""
    compiler = getattr(InstructionTranslator.current_tx().output, "compiler_fn", None)
    compiler = getattr(getattr(compiler, "__self__", None), "backend_compile_fn", compiler)  # DDP splits graphs before
    while compiler is not backend and (inner := getattr(compiler, "compiler_fn", None)) is not None:
        compiler = inner
    return compiler is backend
