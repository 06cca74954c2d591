"""Which inputs of a graph are static, what they are called, and how many zeros they hold.

Dynamo hands the outer backend the real tensors; AOTAutograd then traces with fake ones. So the real values are read
here, before tracing, and tied to the placeholders of the traced graph by the input descriptors AOTAutograd leaves there.
Where Dynamo splits a graph before (DistributedDataParallel), the tensors are fake already, and its notes lead to the real ones.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.names import Names, user_name
from gossamer.backend.graph.nodes import in_training
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
"""Of a SparseTensor."""


class Unmatched(Exception):
    """The real inputs cannot be tied to a graph; the message says why."""


@dataclass(frozen=True)
class Static:
    """A tensor that stays the same object from call to call: a parameter, a buffer, an attribute, a captured variable.

    tensor  as plans are to be made for it; mostly itself, see `foreseen`
    """

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Inputs:
    """The inputs of a Dynamo graph, and which of them are static.

    values   real tensors where they can be had: between the parts of a split graph there are fake ones
    statics  by the number of the input; all of them are real
    unknown  names and shapes of static tensors whose content nobody knows
    names    what a user calls them, by the number of the input
    """

    module: fx.GraphModule
    values: Sequence[Any]
    statics: dict[int, Static]
    unknown: Sequence[tuple[str, tuple[int, ...]]] = ()
    names: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, module: fx.GraphModule, values: Sequence[Any]) -> "Inputs":
        """`values` are the example inputs that Dynamo passed with `module`, one for each placeholder."""
        statics, unknown, found = dict[int, Static](), list[tuple[str, tuple[int, ...]]](), list(values)
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        namer, names = Names(), dict[int, str]()
        for index, (node, given) in enumerate(zip(placeholders, values, strict=False)):
            value = found[index] = _real(given, node)
            source = getattr(node.meta.get("grapharg"), "source", None)
            if not isinstance(value, torch.Tensor):
                continue
            name = names[index] = namer.of(source, value) if source else user_name(node.name)
            if not _is_static(source, value):
                continue
            if is_fake(value):
                unknown.append((name, tuple(value.shape)))
            else:
                statics[index] = Static(name, foreseen(value))
        return cls(module, found, statics, unknown, names)

    def is_whole(self, graph: fx.Graph) -> bool:
        """Whether `graph` is the whole traced graph; the bodies of branches and loops carry no descriptors."""
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        return not placeholders or any(isinstance(n.meta.get("desc"), AOTInput) for n in placeholders)

    def match(self, graph: fx.Graph) -> dict[fx.Node, Static]:
        """The placeholders of an inference or joint graph that are static; of a joint one none that it writes to.

        Raises Unmatched where the graph's inputs are not these.
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

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """The real tensor that a placeholder of a traced graph stands for, if it is one of the inputs."""
        return self.given(node.meta.get("desc"))

    def given(self, desc: object) -> torch.Tensor | None:
        """The real tensor that a descriptor of AOTAutograd stands for, if it is one of the inputs."""
        value = self._resolve(desc)[1]
        return value if isinstance(value, torch.Tensor) and not is_fake(value) else None

    def given_now(
        self, leaves: Sequence[fx.Node], numbers: Sequence[fx.Node], sized: Sequence[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        """The real tensors of some placeholders; None if one is not to be had, or sizes are open, of `numbers` or tensors."""
        found = [value for leaf in leaves if (value := self.value(leaf)) is not None]
        fixed = not numbers and all(isinstance(n, int) for x in sized for n in x.shape)
        return found if fixed and len(found) == len(leaves) else None

    def name(self, node: fx.Node) -> str:
        """What a user calls the input behind a placeholder of a traced graph."""
        desc = node.meta.get("desc")
        while isinstance(desc, SubclassGetAttrAOTInput):
            desc = desc.base
        if isinstance(desc, ParamAOTInput | BufferAOTInput):
            return user_name(desc.target)
        return self.names.get(desc.idx, node.name) if isinstance(desc, PlainAOTInput) else node.name

    def _resolve(self, desc: object) -> tuple[Static | None, object]:
        """The static (if it is one) and the real value that a descriptor of AOTAutograd stands for."""
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
    """How a change of these placeholders is noticed, if `verify` is what a user asked for.

    Torch counts no writes to what a wrapper subclass (a DTensor) is over; those to the arrays of a SparseTensor we count.
    """
    return "full" if any(_is_within_another(leaf.meta.get("desc")) for leaf in leaves) else verify


def _is_within_another(desc: object) -> bool:
    return isinstance(desc, SubclassGetAttrAOTInput) and not _ARRAY.fullmatch(desc.attr)


def density(tensor: torch.Tensor) -> float:
    """Share of the elements that are not zero; 1 for an empty tensor. A NaN is a nonzero."""
    return count_nonzeros(tensor) / tensor.numel() if tensor.numel() else 1.0


def zero_heavy(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether a user who pruned this tensor expects to hear about it: a matrix of floats or `dtype`, a tenth of it zeros."""
    return (
        tensor.layout is torch.strided
        and not is_traceable_wrapper_subclass(tensor)  # which may have no elements to look at
        and (tensor.is_floating_point() or tensor.dtype is dtype)
        and not tensor.is_meta
        and tensor.dim() >= 2
        and tensor.numel() >= 256
        and density(tensor) <= 0.9
    )


def _real(value: Any, placeholder: fx.Node) -> Any:
    """What a fake tensor stands for, as Dynamo noted with its placeholder; itself where nothing is noted."""
    noted = getattr(placeholder.meta.get("grapharg"), "example", None) if is_fake(value) else None
    return noted if isinstance(noted, torch.Tensor) else value


def overwritten(graph: fx.Graph) -> set[fx.Node]:
    """The placeholders that a joint graph writes to; of an inference graph none.

    What is computed from them has another value in the backward pass.
    """
    return written_by(graph) if in_training(graph) else set()


def constants(graph: fx.Graph) -> dict[fx.Node, torch.Tensor]:
    """The tensors that tracing has put into a graph itself."""
    found = {n: attrgetter(n.target)(graph.owning_module) for n in graph.nodes if n.op == "get_attr"}
    return {node: value for node, value in found.items() if type(value) is torch.Tensor}


def written_by(graph: fx.Graph) -> set[fx.Node]:
    """The placeholders that a graph writes to, in itself or by what it returns for them."""
    named = {node.meta["desc"]: node for node in graph.nodes if node.op == "placeholder" and "desc" in node.meta}
    into = [getattr(desc, "mutated_input", None) for desc in graph.output_node().meta.get("desc", ())]
    copied = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return {named[desc] for desc in into if desc in named} | {node.args[0] for node in copied}


def _is_static(source: Any, tensor: torch.Tensor) -> bool:
    if isinstance(tensor, torch.nn.Parameter) or getattr(tensor, "_dynamo_static_input_type", None):
        return True
    containers = ("GetItemSource", "DictGetItemSource", "ListGetItemSource", "DictSubclassGetItemSource")
    while hasattr(source, "base"):
        if type(source).__name__ not in containers:
            return True
        source = source.base
    # What is left is a captured variable, a global, or an argument (so is an element of an argument's containers).
    captured = isinstance(source, LocalSource) and source.is_derefed_cell_contents and not source.is_input
    return captured or isinstance(source, GlobalSource)


def _agrees(expected: torch.Tensor, value: torch.Tensor) -> bool:
    same_sizes = all(not isinstance(e, int) or e == v for e, v in zip(expected.shape, value.shape, strict=False))
    return expected.dtype == value.dtype and expected.dim() == value.dim() and same_sizes
