"""An operation of torch's, gossamer::name, as one record. To register it tells torch, Inductor and autograd all of it.

softmax = register(
    Operation(
        "softmax(Tensor positions: i[segments+1], Tensor values: F[entries], bool log) -> Tensor: F[entries]",
        cpu=_softmax,
        cuda=_softmax,
        derivative=Derivative("positions result", _gradient, _tangent),
    )
)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError
from gossamer.dialects.signature import Declared, Given, Known, Signature, plain
from gossamer.runtime.direct_call import describe
from gossamer.runtime.elements import ELEMENTS
from gossamer.runtime.operations import LIBRARY, TAGS, implement, untraced

Function = Callable[..., Any]
_MOST = 256  # shapes that an operation remembers to have checked


@dataclass(frozen=True)
class Operation:
    """What it is.

    schema            as torch has it. What is declared behind the name of a tensor (see signature.py) is checked at every call
    cpu, cuda         what it runs for tensors there; nothing on CUDA devices where that is None
    fake              what it gives in graphs, where the schema does not declare its results
    derivative        gives the operation of a name its derivatives, and returns what calls it (see derivatives.py)
    batched           has torch.func.vmap compute the operation of a name (see batches.py)
    remembers_floats  whether it remembers what it has made of floating-point operands, too, by their counts of writes
    tags              what torch may expect of it
    """

    schema: str
    cpu: Function
    cuda: Function | None = None
    fake: Function | None = None
    derivative: Callable[[str], Function] | None = None
    batched: Callable[[str], None] | None = None
    remembers_floats: bool = False
    tags: tuple[torch.Tag, ...] = TAGS

    @property
    def name(self) -> str:
        """Its name, without "gossamer::"."""
        return self.schema.partition("(")[0]

    @cached_property
    def signature(self) -> Signature:
        """What is declared of its tensors."""
        takes, _, gives = self.schema.partition(" -> ")
        return Signature.parse(takes, gives)

    @cached_property
    def _places(self) -> list[tuple[int, Declared]]:
        """The tensors that are declared, and which argument each is."""
        return [(self._names.index(each.name), each) for each in self.signature.takes]

    def _given(self, inputs: Sequence[Any]) -> list[tuple[Declared, Tensor]]:
        return [(each, inputs[place]) for place, each in self._places if inputs[place] is not None]

    @cached_property
    def _names(self) -> list[str]:
        """Those of its arguments."""
        arguments = plain(self.schema).partition("(")[2].partition(") ->")[0].split(", ")
        return [argument.split()[-1].partition("=")[0] for argument in arguments]

    def checked(self, function: Function) -> Function:
        """A function that computes it, of arguments that are as declared."""
        places, fitting = [place for place, _ in self._places], set[tuple[Any, ...]]()
        if not places:
            return function

        @wraps(function)
        def call(*inputs: Any) -> Any:
            key: list[Any] = []
            for place in places:
                tensor = inputs[place]
                key += (None,) if tensor is None else (tensor.shape, tensor.dtype, tensor.is_cpu or tensor.device)
            if (seen := tuple(key)) not in fitting:  # looking is quicker than checking
                check(self.name, self._given(inputs), {})
                if len(fitting) >= _MOST:
                    fitting.clear()
                fitting.add(seen)
            return function(*inputs)

        return call

    def traced(self, *inputs: Any) -> Any:
        """The results that are declared."""
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


def register(operation: Operation) -> Function:
    """Defines the operation; what calls it."""
    name = operation.name
    LIBRARY.define(plain(operation.schema), tags=operation.tags)
    implement(name, operation.checked(operation.cpu), operation.remembers_floats)
    if operation.cuda is not None:
        LIBRARY.impl(name, untraced(operation.checked(operation.cuda)), "CUDA")
    describe(name, operation.fake or operation.traced)
    OPERATIONS[name] = operation
    call: Function = getattr(torch.ops.gossamer, name).default
    if operation.derivative is not None:
        call = operation.derivative(name)
    if operation.batched is not None:
        operation.batched(name)
    return call


OPERATIONS: dict[str, Operation] = {}
"""All that are registered."""


def check(name: str, given: Sequence[tuple[Declared, Tensor]], known: Known) -> None:
    """ArgumentError unless tensors are as declared and on one device. Sizes and types that they have become `known`."""
    for declared, tensor in given:
        if (problem := declared.problem(as_given(tensor), known)) is not None:
            raise ArgumentError(f"{name}: {problem}")
    if len(places := {tensor.device for _, tensor in given}) > 1:
        raise ArgumentError(f"{name} of tensors on {' and '.join(sorted(map(str, places)))}: bring all of them to one device")


def as_given(tensor: Tensor) -> Given:
    """A tensor of torch's as signatures see it."""
    dtype = tensor.dtype
    return Given(ELEMENTS.get(dtype) or str(dtype), tensor.shape, False, lambda: f"is {dtype} {list(tensor.shape)}")


def _dtype(element: str) -> torch.dtype:
    return _DTYPES.get(element) or getattr(torch, element.removeprefix("torch."))


_DTYPES = {name: dtype for dtype, name in ELEMENTS.items()}
