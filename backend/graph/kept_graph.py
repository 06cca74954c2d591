"""Keeps one of Dynamo's graphs, to compile it again after Dynamo has finished its frame. `compile_eval.py` uses it.

Dynamo's notes about inputs hold tensors, and Dynamo deletes them after the compilation. A kept graph has notes without tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any

from torch import Tensor, fx

from gossamer.runtime.torch_internals import CompileContext, TracingContext, compile_context, is_fake, tracing


class KeptGraph:
    """A copy of a graph.

    module   the copy; its placeholders have the sources of inputs in the user's program
    statics  the indices of its static inputs
    """

    def __init__(self, module: fx.GraphModule, statics: Sequence[int]) -> None:
        self.module, self._statics = copied(module), statics
        self._tracing, self._compiling = TracingContext.try_get(), CompileContext.try_get()

    @property
    def shapes(self) -> Any:
        """The ShapeEnv of the symbolic sizes of inputs; None if there is none."""
        return getattr(getattr(self._tracing, "fake_mode", None), "shape_env", None)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Sets torch's compilation contexts as during Dynamo's compilation, to compile something at a call."""
        with tracing(self._tracing), compile_context(self._compiling):
            yield

    @property
    def floats(self) -> list[int]:
        """The indices of inputs that are floats in the user's program. Dynamo passes them as tensors of one element."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        return [n for n, node in enumerate(placeholders) if _float(node.meta.get("example_value")) is not None]

    def again(self, args: Sequence[Any], fixed: Mapping[int, float] = MappingProxyType({})) -> tuple[fx.GraphModule, list[Any]]:
        """Returns a copy to compile for these inputs, and example inputs: fake tensors with symbolic sizes, and floats.

        fixed  values of floats, by the index of the input; all other floats are symbolic
        """
        module = copied(self.module)
        placeholders = module.graph.find_nodes(op="placeholder")
        self.note(placeholders, args)
        for n, value in fixed.items():
            for item in [user for user in placeholders[n].users if user.target == "item"]:
                item.replace_all_uses_with(value)
                module.graph.erase_node(item)
        module.recompile()
        return module, [
            self._known(node.meta.get("example_value", value)) for node, value in zip(placeholders, args, strict=True)
        ]

    def _known(self, example: Any) -> Any:
        """Converts a float from Dynamo's fake mode to that of the backend, and keeps its symbol. Otherwise that mode would
        take it for a tensor without a symbol."""
        number, mode = _float(example), getattr(self._tracing, "fake_mode", None)
        if number is None or mode is None or example.fake_mode is mode:
            return example
        known = mode.from_tensor(example)
        known.item_memo = number
        return known

    def note(self, placeholders: Sequence[fx.Node | None], args: Sequence[Any]) -> None:
        """Adds notes with the real static inputs to placeholders: one for each input, or None."""
        for n in self._statics:
            node = placeholders[n]
            if node is not None and isinstance(args[n], Tensor) and not is_fake(args[n]):
                node.meta["grapharg"] = SimpleNamespace(source=_source(node), example=args[n])


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a module, because compilation changes its graph. The copy's notes hold no tensors."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for old, new in zip(module.graph.find_nodes(op="placeholder"), graph.find_nodes(op="placeholder"), strict=True):
        new._dynamo_source = getattr(old, "_dynamo_source", None)
        new.meta["grapharg"] = SimpleNamespace(source=_source(old), example=None)
    return module_of(graph, module)


def module_of(graph: fx.Graph, like: fx.GraphModule) -> fx.GraphModule:
    """Returns a module for a graph, with Dynamo's metadata of the module `like`."""
    module = fx.GraphModule(like, graph)
    module.meta = dict(like.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks", "_backend_id"):
        if hasattr(like, name):
            setattr(module, name, getattr(like, name))
    return module


def _float(example: Any) -> Any:
    """Returns the symbol of a float that Dynamo passes as a tensor, or None for other values."""
    return getattr(example, "item_memo", None) if is_fake(example) else None


def _source(placeholder: fx.Node) -> Any:
    """Returns the source of an input as noted by Dynamo, or None if there is no note."""
    return getattr(placeholder.meta.get("grapharg"), "source", None)
