"""`gossamer.build` writes a model as a C header and a shared library that needs neither Python nor PyTorch.

    gossamer.build(model, inputs, "model.so")     →     model.so, model.h

Sparse layers are Gossamer's kernels. Inductor compiles the dense part to C++. The library has small replacements for the few
functions of libtorch that this C++ calls (see deploy/tensors.c). If a model needs another one, an error names it.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind

from gossamer.backend.deploy.archive import c_name
from gossamer.backend.deploy.c_interface import Interface, Named
from gossamer.backend.deploy.packages import called_in, compile_ahead, linked
from gossamer.backend.export import export
from gossamer.backend.report.options import Options
from gossamer.dialects.errors import CompileError
from gossamer.runtime.torch_internals import tree_map_only

_KEPT_BY_TORCH = re.compile(r"\b(aoti_torch_\w+|Sleef_\w+|\w*(?:at|c10|torch)::\w[\w:]*)")


def build(
    model: nn.Module,
    args: Sequence[Any],
    path: str | PathLike[str],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | Options | None = None,
) -> Path:
    """Writes a library of the model to a path that ends in .so, and a header beside it. Returns the header's path.

    The other arguments are those of `gossamer.export`. Inputs and results must be tensors. The names of the functions in the
    header begin with the name of the file. Raises CompileError if a part of the model needs PyTorch. The message names it.
    """
    library = Path(path).absolute()
    if library.suffix != ".so":
        raise CompileError(f"the library's name must end in .so, it is {library.name!r}")
    args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.contiguous, (tuple(args), dict(kwargs or {})))  # as C gives them
    program = export(model, args, kwargs, dynamic_shapes=dynamic_shapes, options=options)
    interface = _interface(program, c_name(library.stem))
    constants = {**program.state_dict, **program.constants}
    compiled = program.module(check_guards=False)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / f"{interface.name}.so"  # Inductor splits its command at spaces
        settings = {
            "aot_inductor.link_libtorch": False, "aot_inductor.package_constants_in_so": False,
            "aot_inductor.output_path": str(made),
        }  # fmt: skip
        more = lambda arrays: interface.code(constants, arrays)
        with linked(called_in(compiled.graph), "aoti.c", "tensors.c", "vector_math.c", more=more, public=f"{interface.name}_*"):
            compile_ahead(compiled, args, kwargs, options=settings)
        _check(made)
        library.write_bytes(made.read_bytes())
    header = library.with_suffix(".h")
    header.write_text(interface.header())
    return header


def _interface(program: torch.export.ExportedProgram, name: str) -> Interface:
    """Returns the C interface of a program.

    Raises CompileError if an input or result is no tensor, or if the program writes to its buffers or inputs."""
    signature, graph = program.graph_signature, program.graph_module.graph
    nodes = {node.name: node for node in graph.nodes}
    inputs = [spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    others = [spec for spec in signature.output_specs if spec.kind is not OutputKind.USER_OUTPUT]
    if others:
        raise CompileError(
            f"the model writes to {others[0].target or 'an input'}, which a library in C does not: it has constants"
        )
    given = [Named(each, _tensor(each, nodes)) for each in inputs]
    results = [Named(f"result {n}", _tensor(spec.arg.name, nodes)) for n, spec in enumerate(signature.output_specs)]
    ranges = {symbol: (int(max(found.lower, 0)), _bound(found.upper)) for symbol, found in program.range_constraints.items()}
    return Interface(name, given, results, ranges)


def _tensor(name: str, nodes: Mapping[str, torch.fx.Node]) -> torch.Tensor:
    value = nodes[name].meta.get("val") if name in nodes else None
    if not isinstance(value, torch.Tensor):
        raise CompileError(
            f"a library in C takes and gives tensors, and {name} is {value!r}: wrap the model in a module of tensors"
        )
    return value


def _bound(number: Any) -> float:
    return int(number) if getattr(number, "is_Integer", False) else float("inf")


def _check(library: Path) -> None:
    """Raises CompileError if a library needs a function of libtorch."""
    listed = subprocess.run(["nm", "-DC", "--undefined-only", library], capture_output=True, text=True).stdout
    if missing := sorted(set(_KEPT_BY_TORCH.findall(listed))):
        names = ", ".join(name.removeprefix("aoti_torch_").removeprefix("cpu_") for name in missing)
        raise CompileError(
            f"a part of the model needs PyTorch: {names}. A library has what Gossamer and Inductor compile themselves; prune "
            "the layers behind these operations, or make a package of AOTInductor with gossamer.export"
        )
