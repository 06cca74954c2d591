"""Looks up tables with sparse gradients (`sparse=True`) beside the compiled graph.

    def graph(i, table, w):                                   before(i)            computes the indices
        rows = F.embedding_bag(i % 100, table, sparse=True)   →   look_up(...)     all of these tables at once
        return rows @ w                                       rest(rows, w)        compiled, with the gradient of `rows`

A traced graph has no sparse gradients, and torch.compile's own compiler fails for them. So the look-up runs between two graphs,
where autograd works as in eager code.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.modes import changes_mode
from gossamer.backend.graph.writes import sharing, writes
from gossamer.backend.report.report import Decision, record
from gossamer.dialects.errors import CompileError
from gossamer.sparsity.bags.sparse_lookups import Lookup, look_up
from gossamer.sparsity.bags.steps import watch_optimizers

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
_PARAMETERS = {each: inspect.signature(each).parameters for each in (functional.embedding_bag, functional.embedding)}


@dataclass(frozen=True)
class _Call:
    """A look-up in a graph: its node, its kind, and its operands: table, indices, offsets and weights."""

    node: fx.Node
    lookup: Lookup
    operands: tuple[fx.Node | None, ...]


def compile_apart(
    module: fx.GraphModule, values: Sequence[Any], compile_: Compile, again: Compile
) -> Callable[..., Sequence[Any]] | None:
    """Returns a function that runs a Dynamo graph with its sparse look-ups beside the compiled parts; None if there are none.

    CompileError if a look-up cannot run before the compiled part.

    compile_  compiles the part that computes indices
    again     compiles the part after the look-ups, which may have more look-ups
    """
    if not torch.is_grad_enabled():
        return None
    calls = _calls(module.graph)
    if not calls:
        return None
    inner, placeholders = _needed(module.graph, calls), module.graph.find_nodes(op="placeholder")
    given = dict(zip(placeholders, values, strict=True))
    nodes = {call.node for call in calls}
    operands = [each for call in calls for each in call.operands if each is not None]
    outside = [node for node in module.graph.nodes if node not in inner and node not in nodes and node.op != "placeholder"]
    wanted = {each for node in outside for each in node.all_input_nodes}
    before = [node for node in module.graph.nodes if node in inner and (node in wanted or node in operands)]
    inputs = [node for node in placeholders if any(node in each.all_input_nodes for each in inner)]
    first = _part(module, inputs, [node for node in module.graph.nodes if node in inner], before) if before else None
    kept = [node for node in placeholders if node in wanted]
    made = [node for node in (*before, *(call.node for call in calls)) if node in wanted]
    rest = _part(module, [*kept, *made], outside, None)
    fakes = [_leaf(node) for node in made]
    for node in rest.graph.find_nodes(op="placeholder")[len(kept) :]:
        node.meta = {"example_value": _leaf(node), "grapharg": SimpleNamespace(source=None, example=None)}
        node._dynamo_source = None
    _record(module, values, calls)
    watch_optimizers()
    run_first: Callable[..., Sequence[Any]] | None = None
    if first is not None:
        computes = any(_is_floating(node) for node in inner)
        run_first = compile_(first, [given[node] for node in inputs]) if computes else first.forward
    run_rest = again(rest, [*(given[node] for node in kept), *fakes])
    return _Apart(placeholders, inputs, before, calls, kept, made, run_first, run_rest).__call__


class _Apart:
    """Runs the parts: indices, look-ups, then all else."""

    def __init__(
        self,
        placeholders: Sequence[fx.Node],
        inputs: Sequence[fx.Node],
        before: Sequence[fx.Node],
        calls: Sequence[_Call],
        kept: Sequence[fx.Node],
        made: Sequence[fx.Node],
        first: Callable[..., Sequence[Any]] | None,
        rest: Callable[..., Sequence[Any]],
    ) -> None:
        places = {node: n for n, node in enumerate((*placeholders, *before, *(call.node for call in calls)))}
        self._inputs, self._first, self._rest = [places[node] for node in inputs], first, rest
        self._lookups = [call.lookup for call in calls]
        self._operands = [[None if node is None else places[node] for node in call.operands] for call in calls]
        self._rest_inputs = [places[node] for node in (*kept, *made)]

    @torch.compiler.disable
    def __call__(self, *values: Any) -> Sequence[Any]:
        known = list(values)
        if self._first is not None:
            known += self._first(*(values[n] for n in self._inputs))
        operands = [[None if n is None else known[n] for n in four] for four in self._operands]
        known += look_up(self._lookups, operands)
        return self._rest(*(known[n] for n in self._rest_inputs))


def _calls(graph: fx.Graph) -> list[_Call]:
    """Returns the look-ups with sparse gradients that do not depend on another one."""
    found, after = list[_Call](), set[fx.Node]()
    for node in graph.nodes:
        if not after.isdisjoint(node.all_input_nodes):
            after.add(node)
        elif (call := _call(node)) is not None:
            found.append(call)
            after.add(node)
    return found


def _call(node: fx.Node) -> _Call | None:
    if node.op != "call_function" or node.target not in _PARAMETERS:
        return None
    names = _PARAMETERS[node.target]
    given = {name: each.default for name, each in names.items()}
    given |= dict(zip(names, node.args, strict=False)) | node.kwargs
    table, indices, weights = given["weight"], given["input"], given.get("per_sample_weights")
    refused = given["max_norm"] is not None or given["scale_grad_by_freq"] or not given["sparse"]
    if refused or table.op != "placeholder" or not table.meta["example_value"].requires_grad:
        return None
    if not node.meta["example_value"].requires_grad or indices.meta["example_value"].is_nested:
        return None
    rows, padding = table.meta["example_value"].shape[0], given["padding_idx"]
    if padding is None:
        padding = -1
    elif padding < 0:
        if not isinstance(rows, int):
            return None
        padding += rows
    if node.target is functional.embedding:
        return _Call(node, Lookup("rows", padding), (table, indices, None, None))
    lookup = Lookup(given["mode"], padding, bool(given["include_last_offset"]))
    return _Call(node, lookup, (table, indices, given["offsets"], weights))


def _needed(graph: fx.Graph, calls: Sequence[_Call]) -> set[fx.Node]:
    """Returns the nodes that compute the operands of look-ups, and the nodes that write to the memory of these operands.

    CompileError if they cannot move to the front of the graph.
    """
    order = {node: n for n, node in enumerate(graph.nodes)}
    early = list(graph.nodes)[: max(order[call.node] for call in calls)]
    changes = {node: changed for node in early if (changed := writes(node))}
    memory = sharing(graph) if changes else {}
    written = {node: {name for each in changed for name in memory[each]} for node, changed in changes.items()}
    touched, pending = set[fx.Node](), {each for call in calls for each in call.operands if each is not None}
    while pending:
        touched |= pending
        sources = {each for node in pending for each in node.all_input_nodes}
        pending = sources.union(node for node, names in written.items() if not names.isdisjoint(touched)) - touched
    found = {node for node in touched if node.op != "placeholder"}
    if any(map(_is_floating, found)) and any(map(changes_mode, early)):
        raise CompileError("a context, such as torch.no_grad(), comes before a look-up with sparse=True")
    fixed = {each for call in calls for each in (call.node, call.operands[0])}
    for node in found.intersection(written):
        left = (user for name in written[node] for user in name.users if user not in found and order[user] < order[node])
        if any(left) or not fixed.isdisjoint(written[node]):
            raise CompileError("operations in place change a table or an operand of a look-up with sparse=True after its use")
    if not fixed.isdisjoint(found):
        raise CompileError("an operand of a look-up with sparse=True is changed by the result of another one")
    return found


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.is_floating_point()


def _leaf(node: fx.Node) -> Any:
    """Returns the fake value of a node as an input of a graph."""
    value = node.meta.get("example_value")
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _part(
    module: fx.GraphModule, inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], results: Sequence[fx.Node] | None
) -> fx.GraphModule:
    """Returns a module with `nodes` of a graph. It takes `inputs`, and returns `results`, or the graph's results if None."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
        copies[node]._dynamo_source = getattr(node, "_dynamo_source", None)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    if results is not None:
        graph.output(tuple(copies[node] for node in results))
    part = fx.GraphModule(module, graph)
    part.meta = dict(module.meta)
    return part


def _record(module: fx.GraphModule, values: Sequence[Any], calls: Sequence[_Call]) -> None:
    names, placeholders = Inputs.of(module, values).names, module.graph.find_nodes(op="placeholder")
    decisions = []
    for call in calls:
        table = call.operands[0]
        assert table is not None
        n = placeholders.index(table)
        shape = tuple(int(size) for size in table.meta["example_value"].shape)
        op = "embedding" if call.lookup.kind == "rows" else f"embedding bag, {call.lookup.kind}"
        reason = f"one of {len(calls)} in a call, with a sparse gradient"
        decisions.append(Decision(names.get(n, table.name), op, shape, 1.0, "rows", "sum-bags", True, reason, None))
    record(decisions, [], {}, graphs=0)
