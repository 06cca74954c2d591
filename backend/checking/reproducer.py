"""Writes a program that shows a failure: Dynamo's graph as text, inputs of the same kind, and one call.

The program makes random values: weights with the same density, and integers up to the largest. Users can read it before they
send it. It contains nothing of their data but names and shapes.
"""

import os
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs, density
from gossamer.backend.report.options import Options
from gossamer.runtime.torch_internals import is_traceable_wrapper_subclass

_PROGRAM = '''"""gossamer: {about}"""

import torch
from torch import device, inf, nan

import gossamer


def made(shape, dtype=torch.float32, density=1.0, requires_grad=False):
    """Random values, of which a share is not zero."""
    values = torch.randn(shape) * (torch.rand(shape) < density)
    return values.to(dtype).requires_grad_(requires_grad)


class Graph(torch.nn.Module):
    def __init__(self):
        super().__init__()
{static}

{forward}

    def forward(self, *inputs):
        given = iter(inputs)
        return self.graph({arguments})


torch.manual_seed(0)
model = Graph()
inputs = [
{inputs}
]
with torch.set_grad_enabled({grad}):
    {call}
'''


def write_reproducer(name: str, error: Exception, context: GraphContext) -> str | None:
    """Writes the program for a graph pass that failed, into the dump directory or the one for temporary files.

    Returns its path; None if no file can be written.
    """
    return _write(name, program(name, error, context.inputs, context.options), context.options.dump_ir)


def write_difference(name: str, module: fx.GraphModule, values: Sequence[Any], options: Options) -> str | None:
    """Writes the program for a graph whose value `name` differs from torch's. Returns its path as above."""
    call = f"print(gossamer.bisect(model, *inputs, options={_changed(options)}))"
    text = _text(f"the value '{name}' of this program is not torch's.", call, Inputs.of(module, values))
    return _write("difference", text, options.dump_ir)


def _write(name: str, text: str, folder: str | None) -> str | None:
    try:
        descriptor, path = tempfile.mkstemp(prefix=f"gossamer_{name}_", suffix=".py", dir=folder)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        return None
    return path


def program(name: str, error: Exception, inputs: Inputs, options: Options) -> str:
    """Returns the text of the program for a graph pass that failed."""
    trace = "".join(traceback.format_exception(error)).replace("\\", "\\\\").replace('"""', "'''")
    dynamic = any(isinstance(size, torch.SymInt) for value in inputs.values for size in _sizes(value))
    set_ = {**_changed(options), "strict": True}
    call = f'print(torch.compile(model, backend="sparse", dynamic={dynamic or None}, options={set_})(*inputs))'
    return _text(f"the graph pass '{name}' fails on this program.\n\n{trace}", call, inputs)


def _text(about: str, call: str, inputs: Inputs) -> str:
    """Returns the text of a program that makes this call."""
    static = {index: f"s{index}" for index in inputs.statics}
    kept = [f"self.{n} = {_static(inputs.values[i])}" for i, n in static.items()] or ["pass"]
    arguments = [f"self.{static[i]}" if i in static else "next(given)" for i in range(len(inputs.values))]
    given = [f"    {_made(value)}," for index, value in enumerate(inputs.values) if index not in static]
    return _PROGRAM.format(
        about=about, static="\n".join(f"        {line}" for line in kept), forward="\n".join(_forward(inputs)),
        arguments=", ".join(arguments), inputs="\n".join(given), grad=torch.is_grad_enabled(), call=call,
    )  # fmt: skip


def _forward(inputs: Inputs) -> Iterator[str]:
    """Yields the lines of Dynamo's graph as a method `graph`."""
    for line in inputs.module.code.strip().splitlines():
        yield f"    {line}".replace("def forward(", "def graph(", 1).rstrip()


def _static(value: Any) -> str:
    """Returns an expression for an attribute of the module: a parameter, a buffer, or a plain value."""
    if isinstance(value, torch.nn.Parameter):
        return f"torch.nn.Parameter({_made(value.detach())}, requires_grad={value.requires_grad})"
    return f"torch.nn.Buffer({_made(value)})" if isinstance(value, torch.Tensor) else _made(value)


def _made(value: Any) -> str:
    """Returns an expression for a value of this kind."""
    if isinstance(value, torch.SymInt):
        return str(value.node.hint)
    if is_traceable_wrapper_subclass(value):
        return _sparse(value)
    if not isinstance(value, torch.Tensor):
        return repr(value)
    shape = tuple(int(size) for size in value.shape)
    place = "" if value.is_cpu else f".to({str(value.device)!r})"
    if not value.is_floating_point():
        largest = int(value.max()) if value.numel() and not value.is_complex() else 1
        return f"torch.randint(0, {largest + 1}, {shape}).to({value.dtype}){place}"
    grad = ", requires_grad=True" if value.requires_grad else ""
    return f"made({shape}, {value.dtype}, {density(value.detach()):.3g}{grad}){place}"


def _sparse(value: Any) -> str:
    shape = tuple(int(size) for size in value.shape)
    dense = f"made({shape}, {value.dtype}, {value.values().numel() / max(1, prod(shape)):.3g})"
    return f"gossamer.SparseTensor.from_dense({dense}, gossamer.Format.parse({str(value.format)!r}))"


def _sizes(value: Any) -> tuple[Any, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else (value,)


def _changed(options: Options) -> dict[str, Any]:
    """Returns the options that differ from their defaults."""
    usual, names = Options(), ("dense", "schedule", "min_gain", "verify", "disable")
    return {n: v for n in names if (v := getattr(options, n)) != getattr(usual, n)}
