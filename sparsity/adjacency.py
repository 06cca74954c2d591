"""Replaces torch.sparse tensors in models and in their arguments by SparseTensors. `prepare` calls it.

model.adjacency = torch.sparse_csr_tensor(…)     parameters, buffers, attributes, in lists and dictionaries too
model(x, torch.sparse_csr_tensor(…))             arguments, converted before Dynamo sees them
GCNConv(…)(x, gossamer.SparseTensor(…))          layers that take an `edge_index` take an adjacency
"""

import functools
import inspect
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gossamer.runtime.operations import one_node, traced_below, untraced
from gossamer.sparsity.arrays.stored_entries import coordinates, stores_fill, within
from gossamer.sparsity.tensor.interchange import coo_format
from gossamer.sparsity.tensor.layouts import is_torch_sparse
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, values_of


def take_sparse(model: nn.Module) -> None:
    """Replaces a model's torch.sparse tensors by SparseTensors in place, and makes its calls convert such arguments."""
    for module in model.modules():
        if _convert_held(module):
            module.register_load_state_dict_pre_hook(_convert_loaded)
        hook = _edge_index_of(module)
        if hook is not None and not any(isinstance(other, _EdgeIndex) for other in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(hook, with_kwargs=True)
    if not isinstance(model, _TakesSparse):
        model.__class__ = _taking(type(model))  # type: ignore[arg-type]


def leave_sparse(model: nn.Module) -> None:
    """Makes a model take the same arguments as before `take_sparse`. Its SparseTensors stay."""
    for module in model.modules():
        if isinstance(module, _TakesSparse):
            module.__class__ = type(module).__mro__[2]
        for hook_id, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, _EdgeIndex):
                del module._forward_pre_hooks[hook_id], module._forward_pre_hooks_with_kwargs[hook_id]


@untraced
def _converted(value: Any) -> Any:
    """Returns the value with SparseTensors for torch.sparse tensors, also in lists and dictionaries; itself if it has none."""
    if is_torch_sparse(value):
        return _remembered(value)
    if type(value) in (list, tuple):
        found = [_converted(each) for each in value]
        return value if all(a is b for a, b in zip(found, value, strict=True)) else type(value)(found)
    if type(value) is dict:
        by_key = {key: _converted(each) for key, each in value.items()}
        return value if all(by_key[key] is value[key] for key in value) else by_key
    return value


_known: MutableMapping[Tensor, tuple[tuple[int, ...], SparseTensor]] = WeakIdKeyDictionary()
"""Arguments that an earlier call has converted and checked: the versions of their parts, and the SparseTensor."""


def _remembered(tensor: Tensor) -> SparseTensor:
    if tensor.requires_grad:
        return SparseTensor.from_torch(tensor)
    versions = () if tensor.is_inference() else tuple(part._version for part in _parts(tensor))
    found = _known.get(tensor)
    if found is None or found[0] != versions:
        with torch.inference_mode(tensor.is_inference()):  # so that later calls can use it, in inference mode or not
            found = _known[tensor] = versions, SparseTensor.from_torch(tensor)
    return found[1]


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout == torch.sparse_coo:
        return tensor, tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor, tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor, tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def _convert_held(module: nn.Module) -> bool:
    """Converts the tensors that a module holds. Returns whether a parameter or buffer was one of torch.sparse."""
    changed = False
    for name, parameter in list(module._parameters.items()):
        if is_torch_sparse(parameter):
            assert parameter is not None
            tensor = SparseTensor.from_torch(parameter.detach())
            module._parameters[name] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            changed = True
    for name, buffer in list(module._buffers.items()):
        if is_torch_sparse(buffer):
            module._buffers[name] = _converted(buffer)
            changed = True
    for name, value in list(vars(module).items()):
        if not name.startswith("_") and (new := _converted(value)) is not value:
            setattr(module, name, new)
    return changed


def _convert_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Converts tensors of a checkpoint, so that a checkpoint of the model before `take_sparse` loads, too."""
    for name in (*module._parameters, *module._buffers):
        if is_torch_sparse(state.get(prefix + name)):
            state[prefix + name] = _converted(state[prefix + name])


class _TakesSparse(nn.Module):
    """A model whose arguments may be torch.sparse tensors, even if it is compiled in one graph.

    Dynamo refuses a frame with such an argument. So it skips the frame of this `__call__`, which converts the arguments, and
    compiles the frame below.
    """

    @traced_below
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # traced arguments are never torch.sparse tensors
            args, kwargs = _converted((args, kwargs))
        return super().__call__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (type(self).__mro__[2],), self.__dict__


@functools.cache
def _taking(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # torch.compile starts at __call__ only where forward is not torch's own.
        return kind.forward(self, *args, **kwargs)

    forward.__doc__ = kind.forward.__doc__
    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    return type(
        kind.__name__, (_TakesSparse, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__, "forward": forward}
    )


def _new(kind: type[nn.Module]) -> nn.Module:
    """Makes a model without its state. Copying and unpickling start with it."""
    made: Any = _taking(kind)  # type: ignore[arg-type]
    made_of: nn.Module = made.__new__(made)
    return made_of


@dataclass(frozen=True)
class _EdgeIndex:
    """A hook that replaces an adjacency (rows are targets) in a layer's arguments by an edge list, and weights if it takes any.

    An adjacency of more than two dimensions has features for each edge.

    positional  names of the parameters that can be given by position
    taken       names of all parameters
    """

    positional: tuple[str, ...]
    taken: tuple[str, ...]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        new: dict[str, Any] = {}
        for name, value in given.items():
            if "edge_index" not in name:
                continue
            if isinstance(value, SparseTensor):
                new[name], values = _edges(value)
                of_edges = "edge_weight" if value.dim() == 2 else "edge_attr"
                if name == "edge_index" and of_edges in self.taken and given.get(of_edges) is None:
                    new[of_edges] = values
            elif isinstance(value, dict) and any(isinstance(each, SparseTensor) for each in value.values()):
                new[name] = {key: _edges(each)[0] if isinstance(each, SparseTensor) else each for key, each in value.items()}
        if not new:
            return args, kwargs
        by_position = [new.pop(name, arg) for name, arg in zip(self.positional, args, strict=False)]
        return (*by_position, *args[len(by_position) :]), {**kwargs, **new}


@one_node
def _edges_with_features(adjacency: SparseTensor) -> tuple[Tensor, Tensor]:
    listed = adjacency.to_format(coo_format(adjacency.dim(), 2))
    _, target, source, _ = listed.components
    return torch.stack([source, target]), values_of(listed).view(target.shape[0], *adjacency.shape[2:])


def _edges(adjacency: SparseTensor) -> tuple[Tensor, Tensor]:
    """Returns the edges of an adjacency [2, edges], sources first, and their weights [edges] or features [edges, ...]."""
    if adjacency.dim() > 2:
        return _edges_with_features(adjacency)
    at, values = coordinates(adjacency.format, adjacency.shape, adjacency.components), values_of(adjacency)
    if stores_fill(adjacency.format):
        # `entries.set_places` asks for the fake mode, which Dynamo cannot trace here.
        edges = torch.ops.gossamer.set_places.default(within(adjacency.shape, at) & (values != 0))
        at, values = [crd.index_select(0, edges) for crd in at], values.index_select(0, edges)
    target, source = at
    return torch.stack([source, target]), values


def _edge_index_of(module: nn.Module) -> _EdgeIndex | None:
    """Returns the hook for a layer of PyTorch Geometric or one that is written like it, None for any other module."""
    passes_messages = hasattr(module, "propagate") and hasattr(module, "message")
    other_layer = type(module).__module__.startswith("torch_geometric.nn.conv.") and not any(module.children())
    if isinstance(module, _TakesSparse) or not (passes_messages or other_layer):
        return None
    taken = inspect.signature(module.forward).parameters
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = tuple(name for name, parameter in taken.items() if parameter.kind in by_position)
    return _EdgeIndex(positional, tuple(taken)) if any("edge_index" in name for name in taken) else None
