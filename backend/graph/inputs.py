"""Finds the static inputs of a graph, their names, and their zeros.

Dynamo passes real tensors to the backend. AOTAutograd then traces with fake ones. So this file reads the real values before
tracing. Afterwards it finds the placeholder of each in the traced graph by AOTAutograd's input descriptors. If Dynamo splits a
graph (DistributedDataParallel), the backend gets fake tensors, and Dynamo's notes on the placeholders have the real ones.
"""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.names import Names, user_name
from gossamer.backend.graph.nodes import in_training
from gossamer.backend.report.compilation import variables_of_calls
from gossamer.backend.report.options import Verify
from gossamer.runtime.foreseen import foreseen
from gossamer.runtime.packers.nonzeros import count_nonzeros
from gossamer.runtime.torch_internals import (
    AOTInput,
    BufferAOTInput,
    GlobalSource,
    LocalSource,
    ParamAOTInput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    is_fake,
    is_traceable_wrapper_subclass,
)

_ARRAY = re.compile(r"_(stored|positions\d+|coordinates\d+)")
"""Names of the arrays of a SparseTensor."""


class Unmatched(Exception):
    """The real inputs do not match a graph. The message says why."""


@dataclass(frozen=True)
class Static:
    """A tensor that is the same object at every call: a parameter, a buffer, an attribute, a captured variable that was made
    before the call.

    tensor  the tensor to plan for: mostly the input itself, or its values after training (see `foreseen`)
    """

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Inputs:
    """The inputs of a Dynamo graph, and which of them are static.

    values   the input values: real tensors, except values that flow between the parts of a split graph
    statics  the static inputs, by the number of the input; all are real tensors
    unknown  names and shapes of static tensors whose real values are not known
    names    the users' names of inputs, by the number of the input
    """

    module: fx.GraphModule
    values: Sequence[Any]
    statics: dict[int, Static]
    unknown: Sequence[tuple[str, tuple[int, ...]]] = ()
    names: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, module: fx.GraphModule, values: Sequence[Any]) -> "Inputs":
        """Returns the inputs of a module. `values` are Dynamo's example inputs, one for each placeholder."""
        statics, unknown, found = dict[int, Static](), list[tuple[str, tuple[int, ...]]](), list(values)
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        namer, names, of_calls = Names(), dict[int, str](), variables_of_calls()
        for index, (node, given) in enumerate(zip(placeholders, values, strict=False)):
            value = found[index] = _real(given, node)
            source = getattr(node.meta.get("grapharg"), "source", None)
            if not isinstance(value, torch.Tensor):
                continue
            name = names[index] = namer.of(source, value) if source else user_name(node.name)
            if not _is_static(source, value, of_calls):
                continue
            if is_fake(value):
                unknown.append((name, tuple(value.shape)))
            else:
                statics[index] = Static(name, foreseen(value))
        return cls(module, found, statics, unknown, names)

    def is_whole(self, graph: fx.Graph) -> bool:
        """Whether `graph` is the whole traced graph. The bodies of branches and loops have no descriptors."""
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        return not placeholders or any(isinstance(n.meta.get("desc"), AOTInput) for n in placeholders)

    def match(self, graph: fx.Graph) -> dict[fx.Node, Static]:
        """Returns the static placeholders of an inference or joint graph, without those that a joint graph writes to.

        Raises Unmatched if the graph has other inputs.
        """
        found: dict[fx.Node, Static] = {}
        written = overwritten(graph)
        for node in (n for n in graph.nodes if n.op == "placeholder"):
            static, value = self._resolve(node.meta.get("desc"))
            if not isinstance(value, torch.Tensor):
                continue
            expected = node.meta.get("val")
            if not isinstance(expected, torch.Tensor) or not _agrees(expected, value):
                raise Unmatched(f"input {node.name} is not the {tuple(value.shape)} {value.dtype} tensor it was compiled for")
            if static is not None and node not in written:
                found[node] = static
        return found

    def overwritten(self, graph: fx.Graph) -> list[Static]:
        """Returns the parameters that a joint graph writes to. `match` leaves them out."""
        written = overwritten(graph)
        found = [self._resolve(node.meta.get("desc"))[0] for node in graph.nodes if node in written]
        return [each for each in found if each is not None and isinstance(each.tensor, torch.nn.Parameter)]

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """Returns the real tensor of a placeholder in a traced graph, or None if it is not one of the inputs."""
        return self.given(node.meta.get("desc"))

    def given(self, desc: object) -> torch.Tensor | None:
        """Returns the real tensor of an AOTAutograd descriptor, or None if it is not one of the inputs."""
        value = self._resolve(desc)[1]
        return value if isinstance(value, torch.Tensor) and not is_fake(value) else None

    def given_now(
        self, leaves: Sequence[fx.Node], numbers: Sequence[fx.Node], sized: Sequence[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        """Returns the real tensors of the placeholders `leaves`.

        Returns None if one is not known, if there are `numbers`, or if a tensor in `sized` has a symbolic size."""
        found = [value for leaf in leaves if (value := self.value(leaf)) is not None]
        fixed = not numbers and all(isinstance(n, int) for x in sized for n in x.shape)
        return found if fixed and len(found) == len(leaves) else None

    def name(self, node: fx.Node) -> str:
        """Returns the user's name of the input behind a placeholder of a traced graph."""
        desc = node.meta.get("desc")
        while isinstance(desc, SubclassGetAttrAOTInput):
            desc = desc.base
        if isinstance(desc, ParamAOTInput | BufferAOTInput):
            return user_name(desc.target)
        return self.names.get(desc.idx, node.name) if isinstance(desc, PlainAOTInput) else node.name

    def _resolve(self, desc: object) -> tuple[Static | None, object]:
        """Returns the static input (or None) and the real value of an AOTAutograd descriptor."""
        if isinstance(desc, PlainAOTInput):
            if desc.idx >= len(self.values):
                raise Unmatched(f"it has an input {desc.idx}, only {len(self.values)} were given")
            return self.statics.get(desc.idx), self.values[desc.idx]
        if isinstance(desc, ParamAOTInput | BufferAOTInput):
            value = attrgetter(desc.target)(self.module)
            return Static(user_name(desc.target), foreseen(value)), value
        if isinstance(desc, SubclassGetAttrAOTInput):
            static, outer = self._resolve(desc.base)
            inner = getattr(outer, desc.attr, None)
            if static is None or not isinstance(inner, torch.Tensor):
                return None, inner
            name = static.name if desc.attr == "_stored" else f"{static.name}.{desc.attr}"
            return Static(name, getattr(static.tensor, desc.attr)), inner
        return None, None


def noticed(leaves: Sequence[fx.Node], verify: Verify) -> Verify:
    """Returns how to notice changes of these placeholders, if the user asked for `verify`.

    Torch does not count writes to the tensors inside a wrapper subclass, such as DTensor. So their values are compared.
    Gossamer itself counts writes to the arrays of a SparseTensor.
    """
    return "full" if any(_is_within_another(leaf.meta.get("desc")) for leaf in leaves) else verify


def _is_within_another(desc: object) -> bool:
    return isinstance(desc, SubclassGetAttrAOTInput) and not _ARRAY.fullmatch(desc.attr)


def density(tensor: torch.Tensor) -> float:
    """Returns the share of elements that are not zero; 1 for an empty tensor. A NaN is a nonzero."""
    return count_nonzeros(tensor) / tensor.numel() if tensor.numel() else 1.0


def zero_heavy(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether the report should have a line about this tensor: at least two dimensions of floats or `dtype`, and at least 256
    elements, of which at least a tenth are zeros."""
    return (
        tensor.layout is torch.strided
        and not is_traceable_wrapper_subclass(tensor)  # they may have no elements
        and (tensor.is_floating_point() or tensor.dtype is dtype)
        and not tensor.is_meta
        and tensor.dim() >= 2
        and tensor.numel() >= 256
        and density(tensor) <= 0.9
    )


def _real(value: Any, placeholder: fx.Node) -> Any:
    """Returns the real tensor that Dynamo noted with the placeholder of a fake one. Without a note, returns `value`."""
    noted = getattr(placeholder.meta.get("grapharg"), "example", None) if is_fake(value) else None
    return noted if isinstance(noted, torch.Tensor) else value


def overwritten(graph: fx.Graph) -> set[fx.Node]:
    """Returns the placeholders that a joint graph writes to; for an inference graph, none.

    Values that are computed from them differ between the forward and the backward pass.
    """
    return written_by(graph) if in_training(graph) else set()


def constants(graph: fx.Graph) -> dict[fx.Node, torch.Tensor]:
    """Returns the tensors that tracing has put into a graph as constants, by their nodes."""
    found = {n: attrgetter(n.target)(graph.owning_module) for n in graph.nodes if n.op == "get_attr"}
    return {node: value for node, value in found.items() if type(value) is torch.Tensor}


def known_values(
    graph: fx.Graph, statics: Mapping[fx.Node, Static], held: bool
) -> tuple[dict[fx.Node, torch.Tensor], dict[fx.Node, str]]:
    """Returns the tensors of a graph's static inputs and constants, and their names, by their nodes.

    held  whether to include the constants
    """
    values = {node: static.tensor for node, static in statics.items()} | (constants(graph) if held else {})
    return values, {node: statics[node].name if node in statics else str(node.target) for node in values}


def written_by(graph: fx.Graph) -> set[fx.Node]:
    """Returns the placeholders that a graph writes to, by `copy_` or by returning new values for them."""
    named = {node.meta["desc"]: node for node in graph.nodes if node.op == "placeholder" and "desc" in node.meta}
    into = [getattr(desc, "mutated_input", None) for desc in graph.output_node().meta.get("desc", ())]
    copied = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return {named[desc] for desc in into if desc in named} | {node.args[0] for node in copied}


def _is_static(source: Any, tensor: torch.Tensor, of_calls: Container[str]) -> bool:
    """`of_calls` are the names of captured variables that each call has anew."""
    if isinstance(tensor, torch.nn.Parameter) or getattr(tensor, "_dynamo_static_input_type", None):
        return True
    containers = ("GetItemSource", "DictGetItemSource", "ListGetItemSource", "DictSubclassGetItemSource")
    while hasattr(source, "base"):
        if type(source).__name__ not in containers:
            return True
        source = source.base
    # The remaining sources are captured variables, globals, and arguments or elements of containers in arguments.
    captured = isinstance(source, LocalSource) and source.is_derefed_cell_contents and not source.is_input
    return (captured and source.local_name not in of_calls) or isinstance(source, GlobalSource)


def _agrees(expected: torch.Tensor, value: torch.Tensor) -> bool:
    same_sizes = all(not isinstance(e, int) or e == v for e, v in zip(expected.shape, value.shape, strict=False))
    return expected.dtype == value.dtype and expected.dim() == value.dim() and same_sizes
