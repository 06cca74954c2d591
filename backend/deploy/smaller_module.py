"""Removes rows and columns of zeros from a graph of torch.export, and replaces structured weights by factors, before our
passes.

    model(x) with weights w1 [256, 64], w2 [64, 256]    →    a module of their 32 rows and columns that are not zeros

torch.compile does the same with Dynamo's graph (see compile_module.py). Exported weights never change, so nothing checks them
later. The new module goes through torch.export in place of the model.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from gossamer.backend.graph.inputs import Inputs, Static
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import Decision, collect, log
from gossamer.backend.smaller import plan as smaller_layers
from gossamer.backend.smaller.plan import Plan
from gossamer.backend.structures import kronecker_weights
from gossamer.backend.structures.rewrite import use_factors
from gossamer.runtime.torch_internals import detect_fake_mode, export_to_torch_ir


def smaller_module(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, options: Options
) -> tuple[nn.Module, Sequence[Decision]]:
    """Returns a module with the model's results and smaller products, and decisions to record; the model if nothing gets
    smaller.

    args, kwargs, dynamic_shapes  as torch.export.export takes them
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of things that a graph leaves out; this one never runs
            traced = export_to_torch_ir(model, args, kwargs, dynamic_shapes=dynamic_shapes)
    except Exception as problem:  # torch.export may not need Dynamo later
        log.debug("Dynamo cannot trace the model, which is exported with all rows and columns: %s", problem, exc_info=True)
        return model, []
    given = _Graph.of(traced)
    graph = given.planned(kronecker_weights.plan, options)
    graph = graph.with_factors(options).planned(smaller_layers.plan, options)
    return (graph.module(), graph.decisions) if graph is not given else (model, [])


@dataclass(frozen=True, eq=False)
class _Graph:
    """A Dynamo graph whose weights are placeholders, after the placeholders of the model's inputs.

    traced     the module of Dynamo's graph, which has the signature, and the graphs of branches (torch.cond)
    inputs     for each input of the model, its node in the traced graph, and its placeholder here; None if nothing reads it
    weights    for each placeholder of a weight, its name for torch.export and its value
    """

    traced: fx.GraphModule
    graph: fx.Graph
    inputs: Sequence[tuple[fx.Node, fx.Node | None]]
    weights: Mapping[fx.Node, tuple[str, Tensor]]
    decisions: Sequence[Decision] = ()

    @classmethod
    def of(cls, traced: fx.GraphModule) -> "_Graph":
        """Returns a copy of the graph of a traced module."""
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        weights, by_name = dict[fx.Node, tuple[str, Tensor]](), dict[str, fx.Node]()
        inputs = traced.graph.find_nodes(op="placeholder")
        for node in inputs:
            env[node] = graph.node_copy(node)
        for node in traced.graph.find_nodes(op="get_attr"):
            name, value = str(node.target), _attribute(traced, str(node.target))
            if not isinstance(value, Tensor):
                continue
            if name not in by_name:
                by_name[name] = graph.placeholder(node.name)
                by_name[name].meta = dict(node.meta)
                weights[by_name[name]] = name, value
            env[node] = by_name[name]
        for node in traced.graph.nodes:
            if node not in env:
                env[node] = graph.node_copy(node, env.__getitem__)
        return cls(traced, graph, [(node, env[node]) for node in inputs], weights)

    def planned(self, plan: Callable[..., Plan | None], options: Options) -> "_Graph":
        """Returns the smaller graph that a planner makes; itself if it makes none."""
        old = self.graph.find_nodes(op="placeholder")
        statics = {number: self.weights[node][0] for number, node in enumerate(old) if node in self.weights}
        values = [self.weights[node][1] if node in self.weights else node.meta.get("example_value") for node in old]
        found = plan(self.graph, statics, values, options)
        if found is None:
            return self
        smaller = found.smaller
        new = smaller.graph.find_nodes(op="placeholder")
        stays = dict(zip((old[number] for number in smaller.taken), new, strict=False))
        weights = {stays[node]: named for node, named in self.weights.items() if node in stays}
        mode = detect_fake_mode([node.meta.get("example_value") for node in old])
        for value, node, _ in smaller.inputs:
            value = value.detach()
            node.meta["example_value"] = mode.from_tensor(value, static_shapes=True)
            weights[node] = node.name, value
        inputs = [(node, None if now is None else stays.get(now)) for node, now in self.inputs]
        return _Graph(self.traced, smaller.graph, inputs, weights, [*self.decisions, *found.decisions])

    def with_factors(self, options: Options) -> "_Graph":
        """Returns the graph with factors in place of structured matrices; itself if it has no such products."""
        old = self.graph.find_nodes(op="placeholder")
        named = {number: self.weights[node] for number, node in enumerate(old) if node in self.weights}
        statics = {number: Static(name, value) for number, (name, value) in named.items()}
        values = [self.weights[node][1] if node in self.weights else node.meta.get("example_value") for node in old]
        names = {number: name for number, (name, _) in named.items()}
        module = fx.GraphModule(self.traced, self.graph)
        with collect() as found:
            use_factors(module, Inputs(module, values, statics, (), names), options)
        if not any(decision.format == "factors" for decision in found.decisions):
            return self
        places = dict(zip(old, module.graph.find_nodes(op="placeholder"), strict=True))
        inputs = [(node, None if now is None else places[now]) for node, now in self.inputs]
        weights = {places[node]: named for node, named in self.weights.items()}
        return _Graph(self.traced, module.graph, inputs, weights, self.decisions)

    def module(self) -> fx.GraphModule:
        """Returns a module with the signature of the traced one."""
        graph, env, root = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, Any]()
        for node, now in self.inputs:
            made = graph.node_copy(node)
            if now is not None:
                env[now] = made
        for node, (name, value) in self.weights.items():
            if node.users:
                env[node], root[name] = graph.get_attr(name), value
        for node in self.graph.nodes:
            if node.op == "get_attr":
                root[str(node.target)] = _attribute(self.traced, str(node.target))
            if node.op != "placeholder":
                env[node] = graph.node_copy(node, env.__getitem__)
        graph.set_codegen(self.traced.graph._codegen)
        return fx.GraphModule(root, graph)


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value
