"""Multiply sparse matrices on a mesh: assemble a Laplacian from its incidence matrix, and coarsen it, all results sparse.

The mesh is made here: tetrahedra between random points of a cube (Delaunay). With the incidence matrix B [edges, nodes] and
conductances C, the Laplacian is Bᵀ C B; with an aggregation P [nodes, aggregates], the next coarser one is Pᵀ L P: the
Galerkin product of multigrid (Vaněk, Mandel, Brezina, 1996). Results are compared with SciPy's.

    pip install '.[examples]'
    python examples/spgemm_mesh.py --nodes 20000
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

try:
    import numpy as np
    import torch
    from scipy.sparse import coo_array
    from scipy.spatial import Delaunay

    from gossamer import SparseTensor
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs the package '{missing.name}': pip install '.[examples]' in the repository")


def incidence(points: Any) -> tuple[Any, Any]:
    """B [edges, nodes] with -1 and 1 where an edge starts and ends, and the reciprocal length of each edge."""
    cells = Delaunay(points).simplices
    pairs = np.concatenate([cells[:, [i, j]] for i in range(4) for j in range(i)])
    edges = np.unique(np.sort(pairs, 1), axis=0)
    rows = np.repeat(np.arange(len(edges)), 2)
    values = np.tile([-1.0, 1.0], len(edges))
    matrix = coo_array((values, (rows, edges.flatten())), shape=(len(edges), len(points))).tocsr()
    return matrix, 1 / np.linalg.norm(points[edges[:, 0]] - points[edges[:, 1]], axis=1)


def aggregation(points: Any, size: int) -> Any:
    """P [nodes, boxes]: each node belongs to one of size³ boxes of the cube."""
    boxes = (np.minimum(points * size, size - 1).astype(np.int64) * [size * size, size, 1]).sum(1)
    _, boxes = np.unique(boxes, return_inverse=True)
    return coo_array((np.ones(len(points)), (np.arange(len(points)), boxes))).tocsr()


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the least milliseconds of five calls after one that compiles."""
    result, best = function(), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        result = function()
        best = min(best, 1e3 * (time.perf_counter() - start))
    return result, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=20_000, help="points of the mesh (default 20000)")
    parser.add_argument("--boxes", type=int, default=12, help="aggregates along each side (default 12)")
    args = parser.parse_args()

    points = np.random.default_rng(0).random((args.nodes, 3))
    b, conductance = incidence(points)
    p = aggregation(points, args.boxes)
    weighted = (b * conductance[:, None]).tocsr()
    print(f"mesh: {args.nodes:,} nodes, {b.shape[0]:,} edges")

    def ours() -> tuple[Any, Any]:
        laplacian = transposed @ scaled
        return laplacian, restriction @ (laplacian @ prolongation)

    def scipys() -> tuple[Any, Any]:
        laplacian = b.T.tocsr() @ weighted
        return laplacian, p.T.tocsr() @ (laplacian @ p)

    transposed, scaled = SparseTensor.from_scipy(b.T.tocsr()), SparseTensor.from_scipy(weighted)
    restriction, prolongation = SparseTensor.from_scipy(p.T.tocsr()), SparseTensor.from_scipy(p)
    (found, milliseconds), (expected, peer) = timed(ours), timed(scipys)
    for name, mine, theirs in zip(("L = Bᵀ C B", "Pᵀ L P"), found, expected, strict=True):
        error = abs(mine.to_scipy() - theirs).max() / abs(theirs).max()
        print(f"  {name:<11} {mine.shape[0]:,} x {mine.shape[1]:,}, {mine.nnz:,} entries, differs by {error:.1e}")
        if not error < 1e-12:
            sys.exit("the results differ from SciPy's")
    constant = (found[0] @ torch.ones(args.nodes, dtype=torch.float64)).abs().max()
    print(f"  L applied to a constant field: {constant:.1e} (0 on paper)")
    print(f"  Gossamer {milliseconds:.1f} ms, SciPy {peer:.1f} ms")


if __name__ == "__main__":
    main()
