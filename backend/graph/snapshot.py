"""Copies a graph, so that `compile_graph` can restore it if a pass fails."""

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A copy of a graph. It has its own nodes, whose `meta` has the same values."""

    graph: fx.Graph

    @classmethod
    def of(cls, graph: fx.Graph) -> "Snapshot":
        """Copies the current graph."""
        return cls(_copied(graph, fx.Graph()))

    def restore(self, graph: fx.Graph) -> None:
        """Restores a rewritten graph in place. Its nodes are new."""
        for node in reversed(graph.nodes):
            graph.erase_node(node)
        _copied(self.graph, graph)


def _copied(source: fx.Graph, to: fx.Graph) -> fx.Graph:
    """Copies all nodes of a graph into an empty one."""
    found = to.graph_copy(source, {}, return_output_node=True)
    assert isinstance(found, tuple)  # the returned value, and the output node
    value, output = found
    to.output(value).meta = dict(output.meta)
    return to
