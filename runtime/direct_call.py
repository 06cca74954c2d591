"""Makes Inductor's code call our operations as Python functions. Torch's dispatcher takes 3 µs a call, and 15 µs for an
operation that has gradients or takes a spec.

    buf0 = torch.ops.gossamer.einsum.default([arg0, arg1], …)      →      buf0 = call_einsum([arg0, arg1], …)

The dispatcher has nothing left to do there: the graph is traced, and AOTAutograd has added the gradients. While a profiler
runs, the call goes through the dispatcher all the same, so that the trace shows the operation.

Our operations remember what they made of positions, coordinates and masks until somebody writes to these tensors
(see remembered.py). Torch's count of writes does not show this in Inductor's code: it writes one array after the other into the
same memory, and it reads parts of inputs through new tensors. So the code passes such arrays with a count that does show it:

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
"""By the name of an operation, the function that computes it for CPU tensors."""

REMEMBER_FLOATS: set[str] = set()
"""The operations that also remember what they made of floating-point operands, by their counts of writes."""


@cache
def direct(name: str) -> Callable[..., Any]:
    """Returns a function that computes gossamer::name for CPU tensors. It uses the dispatcher only while a profiler runs."""
    kernel, operation = KERNELS[name], getattr(torch.ops.gossamer, name).default

    def call(*given: Any) -> Any:
        return operation(*given) if profiler._is_profiler_enabled else kernel(*given)

    def watch(wrap: Wrap | None) -> None:
        nonlocal kernel
        kernel = KERNELS[name] if wrap is None else wrap("operation", name, KERNELS[name])

    call.watch = watch  # type: ignore[attr-defined]
    return watchable(call)


def dispatched(name: str, kernel: Callable[..., Any], label: Callable[..., str]) -> Callable[..., Any]:
    """Returns the function that torch's dispatcher calls for gossamer::name. Profiles show a call as a range."""
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
"""Returns a new count of writes. It starts at 2^24, so that torch's own counts stay below it."""


def holding(tensor: Tensor, content: int) -> Tensor:
    """Returns a tensor over the same memory whose count of writes is `content`."""
    found = tensor.data
    if not found.is_inference():  # inference tensors have no count; their values are compared
        set_version_counter((found,), (content,))
    return found


def part_of(view: Tensor, whole: Tensor) -> Tensor:
    """Returns the same view, with the count of writes of `whole`, whose part it is."""
    return whole.as_strided(view.shape, view.stride(), view.storage_offset())


def enable() -> None:
    """Makes Inductor's Python wrapper write such calls, if this torch has the hook for it."""
    if not off(DIRECT_CALLS):
        from gossamer.runtime.torch_internals import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen

        for name in KERNELS:
            CUSTOM_EXTERN_KERNEL_CODEGEN.setdefault(f"torch.ops.gossamer.{name}.default", CustomCodegen(python=_write))


def _write(node: Any, writeline: Callable[[str], None]) -> None:
    from gossamer.runtime.torch_internals import V

    name, header = node.op_overload._schema.name.partition("::")[2], _header(V.graph.wrapper_code)
    header.add_import_once(f"import {KERNELS[name].__module__}")  # defines it where another process finds this code
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
    """Returns the outermost wrapper. The wrapper of a loop's body writes no header of its own."""
    while (outer := getattr(wrapper, "parent_wrapper", None)) is not None:
        wrapper = outer
    return wrapper


def _remembered(operand: Any, name: str) -> bool:
    """Whether an operation may remember what it makes of the operand, by the operand's count of writes."""
    dtype: torch.dtype = operand.get_dtype()
    return name in REMEMBER_FLOATS or not (dtype.is_floating_point or dtype.is_complex)


_named: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""By the wrapper that writes a function, the buffers that already have a `content_…` variable in it."""


def _told(operand: Any, graph: Any, writeline: Callable[[str], None]) -> str:
    """Returns code for an operand with a count of writes that changes with its values.

    An input of the graph that nothing writes to keeps its own count, because torch counts all writes to it.
    """
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
