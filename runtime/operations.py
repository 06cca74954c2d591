"""Registers our operations with torch. Each is one record; torch's compilers treat it as opaque, and Gossamer compiles it.

softmax = Operation(
    "softmax(Tensor positions: i[segments+1], Tensor values: F[entries], bool log) -> Tensor: F[entries]",
    cpu=_softmax,
    cuda=_softmax,
    derivative=Derivative("positions result", _gradient, _tangent),
).register()
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError
from gossamer.dialects.signature import Declared, Given, Known, Signature, plain
from gossamer.runtime.direct_call import KERNELS, REMEMBER_FLOATS, dispatched, enable
from gossamer.runtime.elements import ELEMENTS
from gossamer.runtime.modules.when_loaded import when_loaded
from gossamer.runtime.torch_internals import FrameAction, FrameExecStrategy, SingleLevelFunction, off, set_code_exec_strategy
from gossamer.runtime.torch_names import UNTRACED
from gossamer.runtime.watching.names import name_of

LIBRARY = torch.library.Library("gossamer", "FRAGMENT")

TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
"""What torch may assume about our operations. They may pack an operand at its first use, and pack it again when it has changed.
A CUDA graph cannot replay that."""

Function = Callable[..., Any]
_MOST = 256  # shapes of operands that an operation remembers as checked
_Function = TypeVar("_Function", bound=Callable[..., Any])
_UNTRACED = None if off(UNTRACED) else FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
_BELOW = None if off(UNTRACED) else FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT)


def untraced(function: _Function) -> _Function:
    """Makes Dynamo skip a Python function, and the functions that it calls, where it runs after a graph break.

    `torch.compiler.disable` does the same, but adds 2 µs to every call.
    """
    if _UNTRACED is None:
        return torch.compiler.disable(function)
    python: Any = function.func if isinstance(function, partial) else function
    set_code_exec_strategy(python.__code__, _UNTRACED)
    return function


def traced_below(function: _Function) -> _Function:
    """Makes Dynamo start no graph at a Python function, but in the functions that it calls. Within a graph, Dynamo traces it.

    `torch.compiler.disable(recursive=False)` would end a graph here, and forbid torch.export.
    """
    if _BELOW is None:
        return torch.compiler.disable(function, recursive=False)
    python: Any = function
    set_code_exec_strategy(python.__code__, _BELOW)
    return function


def one_node(function: _Function) -> _Function:
    """Makes each call of a function one node of Dynamo's graph (torch.compiler.allow_in_graph). AOTAutograd traces into it."""
    when_loaded("torch._dynamo", partial(torch.compiler.allow_in_graph, function))
    return function


def constant(function: _Function) -> _Function:
    """Makes Dynamo take the result of a function as a constant (torch.compiler.assume_constant_result)."""
    when_loaded("torch._dynamo", partial(torch.compiler.assume_constant_result, function))
    return function


@dataclass(frozen=True)
class Operation:
    """An operation, gossamer::name.

    schema            torch's schema. Sizes and types may be declared behind the name of a tensor (see signature.py); every call
                      checks them
    cpu, cuda         functions that compute it for tensors on these devices; no CUDA where `cuda` is None
    fake              returns its results while a graph is traced; needed if the schema does not declare the results
    derivative        registers the derivatives of the operation with this name, and returns the function that calls it
                      (see derivatives.py)
    batched           registers the rule of torch.func.vmap for the operation with this name (see batches.py)
    remembers_floats  whether it also remembers what it made of floating-point operands, by their counts of writes
    label             returns the name of a call in profiles; by default the operation's name and the names of its weights
    tags              what torch may assume about it
    direct            whether Inductor's Python code calls it without the dispatcher (see direct_call.py)
    """

    schema: str
    cpu: Function
    cuda: Function | None = None
    fake: Function | None = None
    derivative: Callable[[str], Function] | None = None
    batched: Callable[[str], None] | None = None
    remembers_floats: bool = False
    label: Callable[..., str] | None = None
    tags: tuple[torch.Tag, ...] = TAGS
    direct: bool = True

    def register(self) -> Function:
        """Registers the operation with torch. Returns the function that calls it."""
        name, kernel = self.name, self.checked(self.cpu)
        OPERATIONS[name] = self
        if self.direct:
            KERNELS[name] = kernel
        if self.remembers_floats:
            REMEMBER_FLOATS.add(name)
        LIBRARY.define(plain(self.schema), tags=self.tags)
        label = lambda *given: self.called(given)
        LIBRARY.impl(name, _entered(dispatched(name, kernel, label), kernel), "CPU")
        if self.cuda is not None:
            kernel = self.checked(self.cuda)
            LIBRARY.impl(name, _entered(dispatched(name, kernel, label), kernel), "CUDA")
        torch.library.register_fake(f"{LIBRARY.ns}::{name}", _traced(self.fake or self.traced), lib=LIBRARY)
        call: Function = getattr(torch.ops.gossamer, name).default
        if self.derivative is not None:
            call = self.derivative(name)
        if self.batched is not None:
            self.batched(name)
        return call

    def called(self, given: Sequence[Any]) -> str:
        """Returns the name of a call in profiles."""
        if self.label is not None:
            return self.label(*given)
        weights = dict.fromkeys(each for tensor in tensors_in(given) if tensor.dim() > 1 and (each := name_of(tensor)))
        return f"{self.name} of {', '.join(weights)}" if weights else self.name

    @property
    def name(self) -> str:
        """The name, without "gossamer::"."""
        return self.schema.partition("(")[0]

    @cached_property
    def signature(self) -> Signature:
        """The sizes and types of tensors that the schema declares."""
        takes, _, gives = self.schema.partition(" -> ")
        return Signature.parse(takes, gives)

    @cached_property
    def _places(self) -> list[tuple[int, Declared]]:
        """For each declared tensor, the number of its argument, and the declaration."""
        return [(self._names.index(each.name), each) for each in self.signature.takes]

    def _given(self, inputs: Sequence[Any]) -> list[tuple[Declared, Tensor]]:
        return [(each, inputs[place]) for place, each in self._places if inputs[place] is not None]

    @cached_property
    def _names(self) -> list[str]:
        """The names of the arguments."""
        arguments = plain(self.schema).partition("(")[2].partition(") ->")[0].split(", ")
        return [argument.split()[-1].partition("=")[0] for argument in arguments]

    def checked(self, function: Function) -> Function:
        """Returns `function` with a check before it: ArgumentError unless the arguments are as the schema declares."""
        places, fitting = [place for place, _ in self._places], set[tuple[Any, ...]]()
        if not places:
            return function

        @wraps(function)
        def call(*inputs: Any) -> Any:
            key: list[Any] = []
            for place in places:
                tensor = inputs[place]
                key += (None,) if tensor is None else (tensor.shape, tensor.dtype, tensor.is_cpu or tensor.device)
            if (seen := tuple(key)) not in fitting:  # a look-up is quicker than the check
                check(self.name, self._given(inputs), {})
                if len(fitting) >= _MOST:
                    fitting.clear()
                fitting.add(seen)
            return function(*inputs)

        return call

    def traced(self, *inputs: Any) -> Any:
        """Returns empty tensors for the results that the schema declares."""
        known: Known = {}
        given = self._given(inputs)
        for each, tensor in given:
            each.note(as_given(tensor), known)
        known |= {name: inputs[place] for place, name in enumerate(self._names[: len(inputs)]) if name not in known}
        like = given[0][1]
        made = [
            like.new_empty([size.of(known) for size in each.sizes], dtype=_dtype(known.get(each.element, each.element)))
            for each in self.signature.gives
        ]
        return made[0] if len(made) == 1 else tuple(made)


def _entered(call: Function, kernel: Function) -> Function:
    """Returns `call`, the function for the dispatcher. Dynamo will trace neither it nor the kernel below it."""
    untraced(kernel)
    return untraced(call)


def tensors_in(given: Any) -> Iterator[Tensor]:
    """Yields the tensors among the arguments or the results of an operation."""
    for each in given if isinstance(given, list | tuple) else (given,):
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from tensors_in(each)


def _traced(fake: Function) -> Function:
    """Returns the same function. When it runs, a graph is traced, so Inductor's code is told to call operations directly
    (see direct_call.py)."""

    @wraps(fake)
    def traced(*given: Any, **named: Any) -> Any:
        if "torch._inductor" in sys.modules:
            enable()
        return fake(*given, **named)

    return traced


OPERATIONS: dict[str, Operation] = {}
"""All registered operations, by name."""


def check(name: str, given: Sequence[tuple[Declared, Tensor]], known: Known) -> None:
    """Raises ArgumentError unless the tensors are as declared and on one device. Adds their sizes and types to `known`."""
    for declared, tensor in given:
        if (problem := declared.problem(as_given(tensor), known)) is not None:
            raise ArgumentError(f"{name}: {problem}")
    if len(places := {tensor.device for _, tensor in given}) > 1:
        raise ArgumentError(f"{name} of tensors on {' and '.join(sorted(map(str, places)))}: bring all of them to one device")


def as_given(tensor: Tensor) -> Given:
    """Returns the description of a torch tensor that signatures check."""
    dtype = tensor.dtype
    return Given(ELEMENTS.get(dtype) or str(dtype), tensor.shape, False, lambda: f"is {dtype} {list(tensor.shape)}")


def _dtype(element: str) -> torch.dtype:
    return _DTYPES.get(element) or getattr(torch, element.removeprefix("torch."))


_DTYPES = {name: dtype for dtype, name in ELEMENTS.items()}


def defined_in(name: str) -> str:
    """Returns the name of the module that defines an operation and its function for CPU tensors."""
    kernel: Any = KERNELS[name]
    module: str = (kernel.func if isinstance(kernel, partial) else kernel).__module__
    return module


class Node(SingleLevelFunction):
    """The base of our nodes in autograd's graph: functions with a backward pass that Dynamo does not trace.

    It replaces torch.autograd.Function, which inspects every argument for torch.func. That takes longer than a small product.
    """

    def __init_subclass__(cls) -> None:
        if "backward" in vars(cls):
            cls.backward = staticmethod(untraced(cls.backward))  # autograd may call it after a graph break

    @staticmethod
    @untraced
    def _compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
        """Returns the key by which compiled autograd knows the node. It asks for the key before Dynamo sees the backward pass.

        The backward pass reads versions and addresses, and calls our kernels. So Dynamo's graph must end there. This function
        disables Dynamo for the pass only now, because `torch.compiler.disable` adds 2 µs to every call.
        """
        node = ctx._forward_cls
        if "_opaque" not in vars(node):
            node._opaque, node.backward = True, staticmethod(torch.compiler.disable(node.backward))
        return (ctx._autograd_function_id,)
