"""Inductor's code calls our operations as Python functions: the dispatcher costs 3 µs a call and, where an operation has
gradients or takes a spec, 15 µs.

    buf0 = torch.ops.gossamer.einsum.default([arg0, arg1], …)      →      buf0 = call_einsum([arg0, arg1], …)

Nothing is left for the dispatcher to do there: the graph is traced, and what is differentiable has been differentiated.
While a profiler runs, the call goes through it all the same, so that operations are seen in its trace.

What is made of positions, coordinates and masks is remembered until somebody writes to them (see remembered.py). Inductor's
code writes one array after the other into the same memory, and reads parts of inputs by tensors of its own; torch counts
neither. So operations get such arrays with counts that tell:

    buf5 = call_einsum([buf4, reinterpret_tensor(arg0, …), …], …)
    →
    content_buf4 = new_content()
    buf5 = call_einsum([holding(buf4, content_buf4), part_of(reinterpret_tensor(arg0, …), arg0), …], …)
"""

import itertools
import re
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gossamer.runtime.torch_internals import off, profiler, set_version_counter
from gossamer.runtime.torch_names import DIRECT_CALLS
from gossamer.runtime.watching.calls import Wrap, watchable

KERNELS: dict[str, Callable[..., Any]] = {}
"""What each operation runs for CPU tensors."""

REMEMBER_FLOATS: set[str] = set()
"""The operations that remember what they have made of floating-point operands, too, by their counts of writes."""


@cache
def direct(name: str) -> Callable[..., Any]:
    """What gossamer::name does for CPU tensors, without the dispatcher unless somebody profiles."""
    kernel, operation = KERNELS[name], getattr(torch.ops.gossamer, name).default

    def call(*given: Any) -> Any:
        return operation(*given) if profiler._is_profiler_enabled else kernel(*given)

    def watch(wrap: Wrap | None) -> None:
        nonlocal kernel
        kernel = KERNELS[name] if wrap is None else wrap("operation", name, KERNELS[name])

    call.watch = watch  # type: ignore[attr-defined]
    return watchable(call)


def dispatched(name: str, kernel: Callable[..., Any], label: Callable[..., str]) -> Callable[..., Any]:
    """What torch's dispatcher calls for gossamer::name. In profiles, each call is a range with a label of its own."""
    function = kernel

    def call(*given: Any) -> Any:
        if profiler._is_profiler_enabled:
            with torch.profiler.record_function(label(*given)):
                return function(*given)
        return function(*given)

    def watch(wrap: Wrap | None) -> None:
        nonlocal function
        function = kernel if wrap is None else wrap("operation", name, kernel)

    call.watch = watch  # type: ignore[attr-defined]
    return watchable(call)


new_content = itertools.count(1 << 24).__next__
"""A count for memory that has been written to. Those that torch counts stay below."""


def holding(tensor: Tensor, content: int) -> Tensor:
    """The same memory as a tensor that has been written to so many times."""
    found = tensor.data
    if not found.is_inference():  # which have no count, and are compared
        set_version_counter((found,), (content,))
    return found


def part_of(view: Tensor, whole: Tensor) -> Tensor:
    """The same view, written to as often as what it is a part of."""
    return whole.as_strided(view.shape, view.stride(), view.storage_offset())


def enable() -> None:
    """Has Inductor's Python wrapper write such calls, if this torch lets it be told to."""
    if not off(DIRECT_CALLS):
        from gossamer.runtime.torch_internals import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen

        for name in KERNELS:
            CUSTOM_EXTERN_KERNEL_CODEGEN.setdefault(f"torch.ops.gossamer.{name}.default", CustomCodegen(python=_write))


def _write(node: Any, writeline: Callable[[str], None]) -> None:
    from gossamer.runtime.torch_internals import V

    name, header = node.op_overload._schema.name.partition("::")[2], _header(V.graph.wrapper_code)
    header.add_import_once(f"import {KERNELS[name].__module__}")  # where it is defined, for a process that finds this code
    arguments = ", ".join([*node.codegen_args(), *node.codegen_kwargs()])
    told = {
        operand.codegen_reference(): _told(operand, V.graph, writeline) for operand in node.inputs if _remembered(operand, name)
    }
    if told := {reference: text for reference, text in told.items() if reference != text}:
        header.add_import_once(f"from {__name__} import {holding.__name__}, {part_of.__name__}, new_content")
        longest_first = sorted(told, key=len, reverse=True)
        pattern = "|".join(rf"(?<!\w){re.escape(reference)}(?!\w)" for reference in longest_first)
        arguments = re.sub(pattern, lambda found: told[found.group()], arguments)
    function = node.python_kernel_name
    if {operand.get_device().type for operand in node.inputs} == {"cpu"}:
        function = f"call_{name}"
        header.add_import_once(f"from {__name__} import {direct.__name__}")
        header.add_import_once(f'{function} = {direct.__name__}("{name}")')
    writeline(f"{node.get_name()} = {function}({arguments})")


def _header(wrapper: Any) -> Any:
    """What writes the beginning of the code that this writes a part of: the body of a loop has none."""
    while (outer := getattr(wrapper, "parent_wrapper", None)) is not None:
        wrapper = outer
    return wrapper


def _remembered(operand: Any, name: str) -> bool:
    """Whether an operation may remember what it makes of it by its count of writes."""
    dtype: torch.dtype = operand.get_dtype()
    return name in REMEMBER_FLOATS or not (dtype.is_floating_point or dtype.is_complex)


_named: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""The buffers whose contents have numbers, by what writes a function."""


def _told(operand: Any, graph: Any, writeline: Callable[[str], None]) -> str:
    """An operand, as code, with a count that tells what it is: its own, where torch counts all writes to an input."""
    reference, buffer = operand.codegen_reference(), operand.get_name()
    names, changes = _named.setdefault(graph.wrapper_code, set()), buffer in graph.mutated_buffers
    outside = buffer in graph.graph_inputs or buffer in graph.constants
    if outside and not changes and not hasattr(graph, "parent"):
        return reference if reference == buffer else f"{part_of.__name__}({reference}, {buffer})"
    if changes:
        return f"{holding.__name__}({reference}, new_content())"
    if buffer not in names:
        names.add(buffer)
        writeline(f"content_{buffer} = new_content()")
    return f"{holding.__name__}({reference}, content_{buffer})"
