"""Restores objects after calls: when a block ends, `unchanged` undoes the changes that the block made to them.

    with unchanged(model, inputs):
        model(*inputs)          # batch statistics, caches, attributes, inputs that are written in place

A walk over all objects that they hold notes the contents of containers and attributes, and copies tensors. Parameters and
their gradients are copied only on request, because forward passes hardly ever write to them.
"""

import collections
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.backend.example_call import filled_cells, used_globals
from gossamer.runtime.torch_internals import is_fake, is_traceable_wrapper_subclass

_NUMBERS = (int, float, complex, torch.dtype, torch.device, torch.Size)
_WITHOUT_CONTENT = (*_NUMBERS, str, bytes, range, slice, type(None), type, ModuleType, BuiltinFunctionType, CodeType)
_OF_OTHERS = ("torch._", "torch.fx", "torch.distributed", "torch.utils", "gossamer.", "logging", "threading", "multiprocessing")
"""Modules whose objects are not part of a model's state. They hold compiled code, data sets, locks, and files."""

Undo = Callable[[], object]


@contextmanager
def unchanged(*objects: object) -> Iterator["Held"]:
    """Undoes the changes of the block to these objects, to all that they hold, and to the states of random generators.

    Functions and the forward methods of modules hold the variables that they capture. They also hold the global modules,
    tensors, optimizers, random generators and functions that they name. It cannot restore the position of a Python generator
    or a file, nor memory that no reference from these objects leads to.
    """
    held = Held(objects)
    generators = (random.getstate(), np.random.get_state())
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield held
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        held.put_back()


class Held:
    """All objects that some objects hold.

    tensors, modules  the tensors and modules among them
    """

    def __init__(self, objects: tuple[object, ...]) -> None:
        self.tensors: list[Tensor] = []
        self.modules: list[nn.Module] = []
        self._undo: list[Undo] = []
        self._parameters: list[Tensor] = []
        self._seen: dict[int, object] = {}
        waiting = list(reversed(objects))
        while waiting:
            found = waiting.pop()
            if isinstance(found, _WITHOUT_CONTENT) or id(found) in self._seen:
                continue
            self._seen[id(found)] = found
            waiting += self._note(found)

    def copy_parameters(self) -> None:
        """Copies parameters and gradients, so that `put_back` restores them, too."""
        self._undo += [_values(each) for each in self._parameters if _is_memory(each)]
        self._parameters = []

    def put_back(self) -> None:
        """Restores everything to its noted state, and drops the copies."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._seen.clear()

    def _note(self, found: Any) -> list[Any]:
        """Notes the content of an object, and returns the objects that it holds."""
        if isinstance(found, Tensor):
            return self._note_tensor(found)
        if isinstance(found, np.ndarray):
            self._undo.append(partial(_write_array, found, found.copy()))
            return []
        if isinstance(found, _RANDOM):
            self._undo += _random_state(found)
            return []
        if isinstance(found, FunctionType):
            return [*self._note_cells(found), *_named(found)]
        if isinstance(found, MethodType):
            return [found.__self__, found.__func__]
        if isinstance(found, partial):
            return [found.func, found.args, found.keywords]
        if isinstance(found, tuple | frozenset):
            return list(found)
        inside = self._note_container(found)
        if isinstance(found, nn.Module):
            self.modules.append(found)
            self._undo.append(partial(_set_class, found, type(found)))  # lazy modules change theirs at the first call
            inside += [vars(each)["forward"] for each in type(found).__mro__ if "forward" in vars(each)]
        elif type(found).__module__.startswith(_OF_OTHERS):
            return inside
        return [*inside, *self._note_slots(found), getattr(found, "__dict__", None)]

    def _note_tensor(self, tensor: Tensor, of_parameter: bool = False) -> list[Any]:
        self.tensors.append(tensor)
        self._seen[id(tensor)] = tensor
        late = of_parameter or isinstance(tensor, nn.Parameter)
        if nn.parameter.is_lazy(tensor):
            self._undo.append(partial(_set_lazy, tensor, type(tensor), tensor.data))
        if tensor.is_leaf:
            self._undo.append(partial(_set_gradient, tensor, tensor.requires_grad, tensor.grad))
            self._parameters += [tensor.grad] if tensor.grad is not None else []
        if is_traceable_wrapper_subclass(tensor):
            arrays = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
            return [each for array in arrays if id(array) not in self._seen for each in self._note_tensor(array, late)]
        if tensor.is_nested and tensor.layout is torch.strided:  # has no shape
            self._undo.append(_values(tensor.detach().values()))
        elif _is_memory(tensor):
            self._undo.append(partial(_set_memory, tensor, tensor.detach()))
            if late:
                self._parameters.append(tensor)
            else:
                self._undo.append(_values(tensor))
        return [vars(tensor)]  # Dynamo marks parameters there

    def _note_container(self, found: Any) -> list[Any]:
        kind = next((each for each in _CONTAINERS if isinstance(found, each)), None)
        if kind is None:
            return []
        content = _content(found, kind)
        self._undo.append(partial(_refill, found, kind, content))
        return content

    def _note_slots(self, found: Any) -> list[Any]:
        slots = {n for cls in type(found).__mro__ for n in _as_names(getattr(cls, "__slots__", ())) if hasattr(found, n)}
        values = {name: getattr(found, name) for name in slots - {"__dict__", "__weakref__"}}
        self._undo += [partial(_set_slot, found, name, value) for name, value in values.items()]
        return list(values.values())

    def _note_cells(self, function: FunctionType) -> list[Any]:
        filled = filled_cells(function).values()
        self._undo += [partial(setattr, cell, "cell_contents", cell.cell_contents) for cell in filled]
        return [cell.cell_contents for cell in filled]


_CONTAINERS = (collections.OrderedDict, dict, list, set, collections.deque)


def _content(found: Any, kind: Any) -> list[Any]:
    """Returns the elements of a container in order. For a mapping, keys and values alternate."""
    return [part for pair in kind.items(found) for part in pair] if issubclass(kind, dict) else list(found)


def _refill(found: Any, kind: Any, content: list[Any]) -> None:
    """Fills a container with its old content, unless it still has that content."""
    now = _content(found, kind)
    if len(now) == len(content) and all(a is b for a, b in zip(now, content, strict=True)):
        return
    kind.clear(found)
    if issubclass(kind, dict):
        for key, value in zip(content[::2], content[1::2], strict=True):
            kind.__setitem__(found, key, value)
    elif kind is set:
        set.update(found, content)
    else:
        kind.extend(found, content)


def _named(function: object) -> list[object]:
    """Returns the modules, tensors, optimizers, random generators and functions that a function reads as globals."""
    if not isinstance(function, FunctionType) or str(function.__module__).startswith("torch."):
        return []
    values = used_globals(function).values()
    return [each for each in values if isinstance(each, (nn.Module, Tensor, torch.optim.Optimizer, FunctionType, *_RANDOM))]


_RANDOM = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator)


def _random_state(generator: Any) -> list[Undo]:
    """Returns the function that restores the state of a random generator; none for one of the system, which has no state."""
    if isinstance(generator, random.SystemRandom):
        return []
    if isinstance(generator, random.Random):
        return [partial(generator.setstate, generator.getstate())]
    if isinstance(generator, torch.Generator):
        return [partial(generator.set_state, generator.get_state())]
    if isinstance(generator, np.random.RandomState):
        return [partial(generator.set_state, generator.get_state(legacy=False))]
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return [partial(setattr, bits, "state", bits.state)]


def _is_memory(tensor: Tensor) -> bool:
    """Whether a tensor has real, strided memory, to which one can write."""
    plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return plain and not is_fake(tensor) and not nn.parameter.is_lazy(tensor) and tensor.untyped_storage().size() > 0


def _values(tensor: Tensor) -> Undo:
    return partial(_write, tensor.detach(), tensor.detach().clone())


@torch.no_grad()
def _write(tensor: Tensor, values: Tensor) -> None:
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            _write(tensor, values)
    elif not _equal(tensor, values):
        once = [0 if stride == 0 else slice(None) for stride in tensor.stride()]  # writes each element of an expanded one once
        tensor[tuple(once)].copy_(values[tuple(once)])


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one type are equal. False if the type has no comparison."""
    try:
        return torch.equal(a, b)
    except (RuntimeError, NotImplementedError):  # types without a comparison
        return False


def _set_gradient(tensor: Tensor, required: bool, gradient: Tensor | None) -> None:
    """Restores a leaf: whether it requires gradients, and its gradient."""
    if not tensor.is_leaf:  # a write in place has made it a result
        tensor.detach_()
    if tensor.requires_grad != required:
        tensor.requires_grad_(required)
    tensor.grad = gradient


def _set_class(found: Any, kind: type) -> None:
    if type(found) is not kind:
        found.__class__ = kind


def _set_lazy(tensor: Any, kind: type, data: Tensor) -> None:
    """Makes a parameter that has got its shape a lazy one again."""
    if type(tensor) is not kind:
        tensor.data = data
        tensor.__class__ = kind


def _set_memory(tensor: Tensor, alias: Tensor) -> None:
    """Gives a tensor its old memory again, if `.data`, `set_` or `resize_` gave it another."""
    if (tensor.data_ptr(), tensor.shape, tensor.stride()) != (alias.data_ptr(), alias.shape, alias.stride()):
        tensor.data = alias


def _write_array(array: "np.ndarray[Any, Any]", values: "np.ndarray[Any, Any]") -> None:
    if array.flags.writeable:
        array[...] = values


def _as_names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _set_slot(found: Any, name: str, value: object) -> None:
    if getattr(found, name, None) is not value:
        object.__setattr__(found, name, value)
