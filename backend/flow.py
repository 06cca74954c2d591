"""How the calls of a rewritten graph lead to each other, for the page: each sparse call is a part, and so is what lies between.

%e = embedding(%w, %tokens)                 0  input
%a = add(%e, %p)                            1  dense   embedding, add          from 0
%r = gossamer::region([%a, …], "3f2a…")     2  sparse  encoder.layer.0 …       from 1
%t = tanh(%r)                               3  dense   tanh                    from 2
return (%r, %t)                             4  output                          from 2, 3
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from torch import fx

from gossamer.backend.graph.names import module_path
from gossamer.backend.graph.nodes import is_backward, is_ours
from gossamer.backend.run.labels import operations_of

_MOVED = {
    "view", "reshape", "_unsafe_view", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "slice", "select",
    "alias", "detach", "getitem",
}  # fmt: skip
"""What changes no value: it belongs to the part whose result it takes."""


def flow_of(graph: fx.Graph, names: Mapping[fx.Node, str], regions: Mapping[str, object]) -> list[dict[str, Any]]:
    """The parts of a graph in an order in which they can run: what each computes, its weights, and whose results it takes.

    names    of the placeholders of weights, in the model
    regions  what the calls of the graph run, by their keys
    """
    weights: dict[fx.Node, tuple[str, ...]] = {node: (name,) for node, name in names.items()}
    parts = _Parts()
    for node in (each for each in graph.nodes if each.op.startswith("call")):
        given = node.all_input_nodes
        if given and all(each in weights for each in given):  # a weight in another shape
            weights[node] = tuple(dict.fromkeys(name for each in given for name in weights[each]))
        else:
            parts.add(node)
    members = parts.members()
    numbers = {leader: at for at, leader in enumerate(members, 1)}

    def sources(nodes: Sequence[fx.Node], own: int | None = None) -> list[int]:
        taken = {
            numbers[parts.leader(each)] if each in parts else 0
            for node in nodes
            for each in node.all_input_nodes
            if each not in weights
        }
        return sorted(taken - {own})

    found: list[dict[str, Any]] = [_part("input")]
    for leader, nodes in members.items():
        named = dict.fromkeys(name for node in nodes for each in node.all_input_nodes for name in weights.get(each, ()))
        called = next((regions[each] for each in leader.args if isinstance(each, str) and each in regions), None)
        about = str(getattr(called, "about", "")) or operations_of(nodes) or "arithmetic"
        kind = "sparse" if is_ours(leader) else "dense"
        found.append(_part(kind, sources(nodes, numbers[leader]), named, about, _module(nodes), is_backward(leader)))
    return [*found, _part("output", sources(graph.find_nodes(op="output")))]


def _part(
    kind: str,
    sources: Sequence[int] = (),
    weights: Iterable[str] = (),
    about: str = "",
    module: str = "",
    backward: bool = False,
) -> dict[str, Any]:
    return {"kind": kind, "from": [*sources], "weights": [*weights], "about": about, "module": module, "backward": backward}


class _Parts:
    """Nodes in parts, each with the node that leads it.

    A part has a level: the most sparse calls on a way to it. What is dense and connected on one level is a part, so that no
    part needs a result of one that needs its own.
    """

    def __init__(self) -> None:
        self._leaders = dict[fx.Node, fx.Node]()
        self._levels = dict[fx.Node, int]()

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._leaders

    def leader(self, node: fx.Node) -> fx.Node:
        while (leader := self._leaders[node]) is not node:
            node = leader
        return node

    def add(self, node: fx.Node) -> None:
        """Adds a node after those whose results it takes."""
        given = list(dict.fromkeys(self.leader(each) for each in node.all_input_nodes if each in self))
        if _name(node) in _MOVED and len(given) == 1:
            self._leaders[node] = given[0]
            return
        self._leaders[node] = node
        level = self._levels[node] = max((self._levels[each] + is_ours(each) for each in given), default=0)
        beside = [each for each in given if self._levels[each] == level and _are_dense(each, node)]
        if beside:
            self._leaders |= dict.fromkeys((node, *beside[1:]), beside[0])

    def members(self) -> dict[fx.Node, list[fx.Node]]:
        """The nodes of each part, by its leader, in an order in which the parts can run."""
        found = dict[fx.Node, list[fx.Node]]()
        for node in self._leaders:
            found.setdefault(self.leader(node), []).append(node)
        return dict(sorted(found.items(), key=lambda item: (self._levels[item[0]], is_ours(item[0]))))


def _are_dense(a: fx.Node, b: fx.Node) -> bool:
    """Whether they may be of one part: both dense, and both forward or both backward."""
    return not is_ours(a) and not is_ours(b) and is_backward(a) == is_backward(b)


def _name(node: fx.Node) -> str:
    return str(getattr(getattr(node.target, "overloadpacket", node.target), "__name__", ""))


def _module(nodes: Sequence[fx.Node]) -> str:
    """The innermost module that all nodes belong to."""
    paths = dict.fromkeys(module_path(node) for node in nodes if _name(node) not in _MOVED)
    steps = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(step[0] for step in takewhile(lambda each: len(set(each)) == 1, steps))
