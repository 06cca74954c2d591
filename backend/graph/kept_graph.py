"""One of Dynamo's graphs, kept to be compiled again when Dynamo is through with its frame.

Dynamo's notes about inputs hold tensors, and it takes them away in the end. A kept graph holds none, and goes on without.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any

from torch import Tensor, fx

from gossamer.runtime.torch_internals import CompileContext, TracingContext, compile_context, is_fake, tracing


class KeptGraph:
    """A copy of a graph.

    module   it; its placeholders say where in the user's program inputs come from
    statics  the numbers of its static inputs
    """

    def __init__(self, module: fx.GraphModule, statics: Sequence[int]) -> None:
        self.module, self._statics = copied(module), statics
        self._tracing, self._compiling = TracingContext.try_get(), CompileContext.try_get()

    @property
    def shapes(self) -> Any:
        """What is known of the open sizes of inputs; None if nobody keeps it."""
        return getattr(getattr(self._tracing, "fake_mode", None), "shape_env", None)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """To be entered where something is compiled at a call, as Dynamo has it when it compiles."""
        with tracing(self._tracing), compile_context(self._compiling):
            yield

    @property
    def floats(self) -> list[int]:
        """The numbers of the inputs that are floats of the user's program. Dynamo passes them as tensors of one element."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        return [n for n, node in enumerate(placeholders) if _float(node.meta.get("example_value")) is not None]

    def again(self, args: Sequence[Any], fixed: Mapping[int, float] = MappingProxyType({})) -> tuple[fx.GraphModule, list[Any]]:
        """A copy to be compiled for these inputs, and what to compile it for: tensors without content, some of whose sizes are
        open, and floats, which are open unless they are `fixed` by their numbers."""
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
        """A float in the mode in which the backend compiles, which takes a tensor of Dynamo's for one without a number."""
        number, mode = _float(example), getattr(self._tracing, "fake_mode", None)
        if number is None or mode is None or example.fake_mode is mode:
            return example
        known = mode.from_tensor(example)
        known.item_memo = number
        return known

    def note(self, placeholders: Sequence[fx.Node | None], args: Sequence[Any]) -> None:
        """Has placeholders, one for each input or None, tell the real static inputs."""
        for n in self._statics:
            node = placeholders[n]
            if node is not None and isinstance(args[n], Tensor) and not is_fake(args[n]):
                node.meta["grapharg"] = SimpleNamespace(source=_source(node), example=args[n])


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A module that computes the same, since compiling changes a graph; its notes hold no tensors."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for old, new in zip(module.graph.find_nodes(op="placeholder"), graph.find_nodes(op="placeholder"), strict=True):
        new._dynamo_source = getattr(old, "_dynamo_source", None)
        new.meta["grapharg"] = SimpleNamespace(source=_source(old), example=None)
    return module_of(graph, module)


def module_of(graph: fx.Graph, like: fx.GraphModule) -> fx.GraphModule:
    """A module of a graph, with what Dynamo tells about this one."""
    module = fx.GraphModule(like, graph)
    module.meta = dict(like.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks", "_backend_id"):
        if hasattr(like, name):
            setattr(module, name, getattr(like, name))
    return module


def _float(example: Any) -> Any:
    """The symbol of a float that Dynamo passes as a tensor."""
    return getattr(example, "item_memo", None) if is_fake(example) else None


def _source(placeholder: fx.Node) -> Any:
    """Where Dynamo says an input comes from; None if it does not say."""
    return getattr(placeholder.meta.get("grapharg"), "source", None)
