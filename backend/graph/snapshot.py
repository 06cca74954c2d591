"""A graph as it was, to go back to."""

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A copy of a graph. Its nodes are other ones, their `meta` holds the same values."""

    graph: fx.Graph

    @classmethod
    def of(cls, graph: fx.Graph) -> "Snapshot":
        """The graph as it is now."""
        return cls(_copied(graph, fx.Graph()))

    def restore(self, graph: fx.Graph) -> None:
        """Makes a graph that was rewritten what it was again, with new nodes."""
        for node in reversed(graph.nodes):
            graph.erase_node(node)
        _copied(self.graph, graph)


def _copied(source: fx.Graph, to: fx.Graph) -> fx.Graph:
    """All nodes of a graph, in one that has none."""
    found = to.graph_copy(source, {}, return_output_node=True)
    assert isinstance(found, tuple)  # a value, and the output that returned it
    value, output = found
    to.output(value).meta = dict(output.meta)
    return to
