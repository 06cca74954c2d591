"""Divides a rewritten graph into parts, and finds which part reads whose results, for the report's page.

Each sparse call is a part. Connected dense calls between sparse calls are a part.

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
"""Operations that change no value. Each belongs to the part whose result it takes."""


def flow_of(graph: fx.Graph, names: Mapping[fx.Node, str], regions: Mapping[str, object]) -> list[dict[str, Any]]:
    """Returns the parts of a graph in an order in which they can run, as data of the page (see `_part`).

    names    the placeholders of weights, and their names in the model
    regions  the regions that the graph calls, by their keys
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
    """Returns one part: its kind, the numbers of the parts whose results it takes, its weights, and what it computes."""
    return {"kind": kind, "from": [*sources], "weights": [*weights], "about": about, "module": module, "backward": backward}


class _Parts:
    """Nodes in parts. One node of each part is its leader.

    A part has a level: the largest number of sparse calls on a path to it. Dense nodes that are connected and have the same
    level form a part. So there is no circle of parts that need each other's results.
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
        """Adds a node. The nodes whose results it takes must have been added before."""
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
        """Returns the nodes of each part by its leader. The parts are in an order in which they can run."""
        found = dict[fx.Node, list[fx.Node]]()
        for node in self._leaders:
            found.setdefault(self.leader(node), []).append(node)
        return dict(sorted(found.items(), key=lambda item: (self._levels[item[0]], is_ours(item[0]))))


def _are_dense(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes may be in one part: both are dense, and both are forward or both are backward."""
    return not is_ours(a) and not is_ours(b) and is_backward(a) == is_backward(b)


def _name(node: fx.Node) -> str:
    return str(getattr(getattr(node.target, "overloadpacket", node.target), "__name__", ""))


def _module(nodes: Sequence[fx.Node]) -> str:
    """Returns the innermost module that all nodes belong to."""
    paths = dict.fromkeys(module_path(node) for node in nodes if _name(node) not in _MOVED)
    steps = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(step[0] for step in takewhile(lambda each: len(set(each)) == 1, steps))
