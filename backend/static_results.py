"""Takes results that depend only on parameters and buffers out of a graph. They are computed when these change, not at every
call.

    def hook(layer, inputs):                            torch.nn.utils.prune, and the older weight_norm, work like this
        layer.weight = layer.weight_orig * layer.mask

Dynamo keeps the hook's write to the module. So the graph returns each masked weight, and must compute it even if only sparse
kernels read it. Without these results, the graph is the same as without hooks.

    def graph(x, orig, mask):               def graph(x, orig, mask):              beside it, for as long as `orig` and
        weight = mask.to(float) * orig  →       return linear(x, mask * orig)      `mask` do not change:
        return linear(x, weight), weight                                           weight = mask.to(float) * orig
"""

import operator
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.modes import Modes
from gossamer.backend.graph.nodes import ancestors
from gossamer.backend.graph.writes import sharing, written
from gossamer.backend.run.recomputed import Recomputed
from gossamer.runtime.remembered import Made
from gossamer.runtime.torch_internals import is_fake, is_traceable_wrapper_subclass, weight_norm
from gossamer.runtime.uncounted import counts_writes

_NEW: set[Any] = {
    operator.mul, operator.truediv, operator.add, operator.sub, torch.mul, torch.div, torch.where, weight_norm,
}  # fmt: skip
"""Functions that return new memory, never a view."""

_FUNCTIONS = _NEW | {torch.mv, torch.dot, torch.norm}
_METHODS = {"to", "type_as", "float", "mul", "div", "view", "reshape", "permute", "expand", "expand_as", "unsqueeze"}
"""Functions and methods that may compute such results. None writes to its arguments or draws random numbers."""

_LARGE = 1 << 18
"""Size of a result, in bytes, from which the system hands out fresh pages."""

_SPARSE = 0.3
"""Share of kept entries above which multiplying by the mask is faster than writing the kept entries between zeros."""


_Results = Made[tuple[list[torch.Tensor], list[int]]]
"""Results, and their counts of writes (see `_writes`)."""

_MOST = 8
"""Results are kept for at most so many models of one class, which share the graph."""


@dataclass
class StaticResults:
    """The results of a graph that depend only on static inputs.

    places   their indices among all results, ascending
    constant the indices, among them, of results without gradients
    inputs   the indices of the inputs that they depend on
    compute  computes them from these inputs
    """

    places: Sequence[int]
    constant: Sequence[int]
    inputs: Sequence[int]
    compute: Callable[..., Sequence[torch.Tensor]]
    _made: list[_Results] = field(default_factory=list, init=False)  # of each model

    def remembered(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Returns the results for these inputs, without gradients. Takes those of an earlier call if nobody has written to the
        inputs or results since."""
        made = next((each for each in self._made if each.is_of(inputs)), None)
        if made is None or not made.is_current(inputs) or made.value[1] != _writes(made.value[0]):
            begun: _Results = Made(inputs, "uncounted", self._forget)
            with torch.inference_mode(False), torch.no_grad():  # torch counts no writes to tensors made in inference mode
                results = list(self.compute(*inputs))
            begun.value = results, _writes(results)
            self._made = [*[each for each in self._made if each is not made][1 - _MOST :], begun]
            made = begun
        return made.value[0]

    def _forget(self, _: object) -> None:
        self._made = [each for each in self._made if not each.is_gone]

    def beside(self, compiled: Callable[..., Sequence[Any]], twice: bool) -> Callable[..., Sequence[Any]]:
        """Returns a function that returns all results of the graph.

        compiled  a function of the graph's inputs that returns the other results
        twice     whether gradients are enabled, but callers rarely ask for them (see `Recomputed`)
        """
        needed, values = self.inputs, self._function(twice)

        def with_static_results(*inputs: Any) -> list[Any]:
            results = list(compiled(*inputs))
            for place, value in zip(self.places, values(*[inputs[n] for n in needed]), strict=True):
                results.insert(place, value)
            return results

        return with_static_results

    def _function(self, twice: bool) -> Callable[..., Sequence[torch.Tensor]]:
        if not torch.is_grad_enabled() or len(self.constant) == len(self.places):
            return self.remembered
        if not twice:
            return self.compute
        return Recomputed(
            inference=lambda *inputs: [value.detach() for value in self.remembered(*inputs)],
            training=self.compute,
            plain=self.compute,
            constant=self.constant,
            static=range(len(self.inputs)),
            moving=(),
            numbers=(),
            context=torch.enable_grad,
        )


def split_static_results(module: fx.GraphModule, inputs: Inputs) -> StaticResults | None:
    """Takes the results that depend only on static inputs out of a Dynamo graph, in place. Returns None if there are none."""
    placeholders = module.graph.find_nodes(op="placeholder")
    memory, modes = sharing(module.graph), Modes.of(module.graph)
    changed = written(module.graph, memory)
    static = {placeholders[n]: n for n in inputs.statics if _is_plain(inputs.values[n]) and placeholders[n] not in changed}
    computed = set(static)
    for node in module.graph.nodes:
        functions = _NEW if node in modes.cast else _FUNCTIONS
        allowed = node.target in (functions if node.op == "call_function" else _METHODS if node.op == "call_method" else ())
        if allowed and node.all_input_nodes and computed.issuperset(node.all_input_nodes) and node not in changed:
            computed.add(node)
    output = module.graph.output_node()
    returned: Any = output.args[0]
    alone = {node for node in computed & set(returned) if len(set(returned).intersection(memory[node])) == 1}
    places = [n for n, node in enumerate(returned) if node in alone and node.op == "call_function" and node.target in _NEW]
    if not places or len(set(returned)) < len(returned) or modes.with_gradients:
        return None
    constant = [n for n, place in enumerate(places) if not returned[place].meta["example_value"].requires_grad]
    compute, needed = _apart(module, [returned[n] for n in places], static, modes.without_gradients)
    output.args = (tuple(node for n, node in enumerate(returned) if n not in places),)
    module.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or node not in computed)
    module.recompile()
    return StaticResults(places, constant, needed, compute)


def _apart(
    module: fx.GraphModule, results: Sequence[fx.Node], static: dict[fx.Node, int], constant: Container[fx.Node]
) -> tuple[Callable[..., Any], list[int]]:
    """Returns a function that computes only these nodes, and the indices of the inputs that it takes.

    constant  nodes that have no gradients
    """
    needed = set(ancestors(results))
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta.pop("grapharg", None)  # Dynamo's note refers to the tensor, which torch then cannot swap
            if node.target in (operator.mul, torch.mul):
                copies[node].target = _times
            if node in constant and node.op != "placeholder":
                copies[node] = graph.call_method("detach", (copies[node],))
    graph.output([copies[node] for node in results])
    return fx.GraphModule(module, graph).forward, [static[node] for node in copies if node in static]


class _Masked(torch.autograd.Function):
    """A weight times a mask, in memory that is already mapped. In fresh pages the product takes several times as long."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        from gossamer.runtime.memory.warm_memory import empty  # only models with hooks need these imports
        from gossamer.sparsity.compiler.kept_entries import KeptEntries

        ctx.save_for_backward(mask)
        kept = KeptEntries.known(mask) if counts_writes(weight) else None
        if kept is None or kept.coordinates.numel() > _SPARSE * mask.numel():
            return torch.mul(weight, mask, out=empty(weight.shape, weight.dtype))
        # Sparse kernels share these values. Writing them between zeros takes half as long as multiplying by the mask.
        values = kept.shared_values(weight, mask)
        return kept.spread(values, weight.shape[-1]).view(weight.shape)

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient[0] * ctx.saved_tensors[0], None


def _times(a: Any, b: Any) -> Any:
    tensors = [each for each in (a, b) if isinstance(each, torch.Tensor)]
    alike = len(tensors) == 2 and a.shape == b.shape and a.dtype == b.dtype and a.nbytes >= _LARGE
    if alike and all(each.is_cpu and each.is_contiguous() for each in tensors) and not (a.requires_grad and b.requires_grad):
        return _Masked.apply(b, a) if b.requires_grad else _Masked.apply(a, b)
    return a * b


def _writes(results: Sequence[torch.Tensor]) -> list[int]:
    """Returns numbers that change if somebody writes to a result."""
    return [each._version for each in results]


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_fake(value) and not is_traceable_wrapper_subclass(value)
