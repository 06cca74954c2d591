"""Graphs and matrices to compute with, as csr_arrays of float32 with 32-bit indices: made from a seed, or real.

cora, pubmed, arxiv   as many nodes, edges, features and classes as these graphs are published with, degrees by a power law
wordnet               the real one: a node a synset, an edge each way a pointer
mesh, dual            tetrahedra between random points of a cube: its nodes, as many as METIS's copter2, and its cells, as mdual
poisson300            five-point stencil on a grid of 300 x 300
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from benchmarks.examples import example


@dataclass(frozen=True)
class Sizes:
    """Of a graph that is published: `edges` counts both directions."""

    nodes: int
    edges: int
    features: int
    classes: int
    hidden: int


SHAPED = {
    "cora": Sizes(2708, 10_556, 1433, 7, 16),
    "pubmed": Sizes(19_717, 88_648, 500, 3, 16),
    "arxiv": Sizes(169_343, 2_332_486, 128, 40, 256),
}
WORDNET = Sizes(117_791, 0, 128, 45, 64)  # its classes are the lexicographer files, its edges what those hold
MESH_NODES, DUAL_CELLS = 55_476, 258_569
_EXPONENT = 2.5  # of the number of nodes by degree


@cache
def matrix(name: str) -> Any:
    """The matrix of this name; ones for edges of graphs, random values for those of meshes."""
    return _MATRICES[name]()


def sizes(name: str) -> Sizes:
    return WORDNET if name == "wordnet" else SHAPED[name]


def normalised(adjacency: Any) -> Any:
    """D^-½ (A + I) D^-½, as GCN propagates (Kipf and Welling, 2017)."""
    from scipy.sparse import diags_array

    looped = with_loops(adjacency)
    scale = diags_array(looped.sum(1) ** -0.5)
    return canonical(scale @ looped @ scale)


def with_loops(adjacency: Any) -> Any:
    from scipy.sparse import eye_array

    return canonical(adjacency + eye_array(adjacency.shape[0], format="csr"))


def pattern(matrix: Any) -> Any:
    """The matrix with ones for values."""
    from scipy.sparse import csr_array

    return csr_array((np.ones_like(matrix.data), matrix.indices, matrix.indptr), shape=matrix.shape)


def canonical(matrix: Any) -> Any:
    from scipy.sparse import csr_array

    found = csr_array(matrix)
    found.sum_duplicates()
    found.sort_indices()
    parts = found.data.astype(np.float32), found.indices.astype(np.int32), found.indptr.astype(np.int32)
    return csr_array(parts, shape=found.shape)


def power_law(nodes: int, edges: int, seed: int = 0) -> Any:
    """A symmetric graph without loops whose expected degrees follow a power law (Chung and Lu, 2002), numbered at random."""
    generator = np.random.default_rng(seed)
    share = np.arange(1, nodes + 1) ** (-1 / (_EXPONENT - 1))
    share = generator.permutation(share / share.sum())
    found = np.empty(0, np.int64)
    while len(found) < edges // 2:
        ends = generator.choice(nodes, (2, edges), p=share)
        ends = np.sort(ends[:, ends[0] != ends[1]], axis=0)
        found = np.unique(np.concatenate([found, ends[0] * nodes + ends[1]]))
    found = generator.choice(found, edges // 2, replace=False)
    return symmetric(found // nodes, found % nodes, nodes)


def symmetric(one: Any, other: Any, nodes: int) -> Any:
    """The graph with an edge each way between these nodes, each once."""
    from scipy.sparse import csr_array

    ends = np.concatenate([one, other]), np.concatenate([other, one])
    found = csr_array((np.ones(len(ends[0]), np.float32), ends), shape=(nodes, nodes))
    return pattern(canonical(found))


def tetrahedra(points: int) -> Any:
    from scipy.spatial import Delaunay

    return Delaunay(np.random.default_rng(0).random((points, 3)))


def mesh() -> Any:
    cells = tetrahedra(MESH_NODES).simplices
    pairs = np.concatenate([cells[:, pair] for pair in ([0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3])])
    return numbered(symmetric(pairs[:, 0], pairs[:, 1], MESH_NODES))


def dual() -> Any:
    """A node a cell, of as many points as give that many; an edge where two cells share a face."""
    neighbours = tetrahedra(DUAL_CELLS * 10 // 67).neighbors
    cell = np.repeat(np.arange(len(neighbours)), 4)
    inside = neighbours.ravel() >= 0
    return numbered(symmetric(cell[inside], neighbours.ravel()[inside], len(neighbours)))


def wordnet() -> Any:
    found = example("wordnet").load()
    source, target = found.edge_index.numpy()
    return symmetric(source, target, len(found.classes))


def numbered(graph: Any) -> Any:
    """The graph as meshes are numbered, neighbours near each other (reverse Cuthill-McKee), with random values."""
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    order = reverse_cuthill_mckee(graph, symmetric_mode=True)
    found = canonical(graph[order][:, order])
    found.data[:] = np.random.default_rng(1).standard_normal(found.nnz)
    return found


def poisson(side: int) -> Any:
    from scipy.sparse import diags_array, kronsum

    line = diags_array([-1.0, 2.0, -1.0], offsets=(-1, 0, 1), shape=(side, side))
    return canonical(kronsum(line, line))


def bag_of_words(nodes: int, features: int, words: int = 18, seed: int = 2) -> Any:
    """Ones at about so many random features of each node: as many as Cora's abstracts have."""
    from scipy.sparse import random_array

    density = words / features
    return pattern(canonical(random_array((nodes, features), density=density, rng=np.random.default_rng(seed))))


_MATRICES: dict[str, Callable[[], Any]] = {
    **{name: partial(power_law, found.nodes, found.edges) for name, found in SHAPED.items()},
    "wordnet": wordnet,
    "mesh": mesh,
    "dual": dual,
    "poisson300": partial(poisson, 300),
}
# Of each matrix, about: to foretell how long a run takes without making it.
ENTRIES = {
    **{name: found.edges for name, found in SHAPED.items()},
    "wordnet": 368_000,
    "mesh": 860_000,
    "dual": 1_030_000,
    "poisson300": 448_800,
}
