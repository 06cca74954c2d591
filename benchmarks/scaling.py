"""python -m benchmarks.scaling: the tables of docs/scaling.md, what 1 to 1024 processes send and hold, by counting.

Nothing is timed, and no process is started: what `gossamer.distributed.ShardedRows` fetches follows from the matrix. A test
compares it with what two and four processes did.
"""

from collections.abc import Sequence

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.spatial import Delaunay

import gossamer
from gossamer import SparseTensor
from gossamer.dialects.command_line import ends_with_its_reader

RANKS = (1, 2, 4, 16, 64, 256, 1024)


def fetched_rows(matrix: csr_array, ranks: int) -> list[int]:
    """How many rows of x each process fetches for a product, rows and columns dealt as by DTensor's Shard(0)."""
    rows, columns = (max(1, -(-size // ranks)) for size in matrix.shape)
    found = []
    for rank in range(ranks):
        own = np.unique(matrix[rank * rows : (rank + 1) * rows].indices)
        found.append(int(np.count_nonzero((own < rank * columns) | (own >= (rank + 1) * columns))))
    return found


def mesh(points: int, seed: int = 0) -> SparseTensor:
    """The edges of a Delaunay triangulation of random points in the plane, in random order, both ways, f32."""
    triangles = Delaunay(np.random.default_rng(seed).random((points, 2))).simplices
    edges = np.concatenate([triangles[:, pair] for pair in ((0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2))])
    edges = np.unique(edges, axis=0)
    ones = np.ones(len(edges), np.float32)
    return SparseTensor.from_scipy(csr_array((ones, (edges[:, 0], edges[:, 1])), shape=(points, points)))


def graph_table(points: int, features: int, ranks: Sequence[int] = RANKS) -> str:
    """Markdown: a product of a mesh with [points, features] f32, in the order as it comes and reordered."""
    given = mesh(points)
    ordered, _ = gossamer.reorder(given)
    matrices = given.to_scipy(), ordered.to_scipy()
    lines = [
        "| processes | graph a process | own rows of x | all-gather | fetched, shuffled | fetched, reordered |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    row = features * 4
    for count in ranks:
        share = -(-points // count)
        stored = 8 * given.nnz / count + 4 * (share + 1)
        worst = [max(fetched_rows(matrix, count)) for matrix in matrices]
        cells = [stored, share * row, (points - share) * row, *(each * row for each in worst)]
        lines.append(f"| {count} | " + " | ".join(_bytes(each) for each in cells) + " |")
    return "\n".join(lines)


def training_table(parameters: int, density: float, ranks: Sequence[int] = RANKS) -> str:
    """Markdown: what a process sends in a step, and holds, weights, gradients and AdamW's state, f32, by a ring."""
    sent, held = "DDP, dense or masked | `data_parallel`, stored | FSDP2, masked", "held: DDP | held: stored | held: FSDP2"
    lines = [f"| processes | {sent} | {held} |", "|--:|--:|--:|--:|--:|--:|--:|"]
    dense, kept = 4 * parameters, 4 * parameters * density
    for count in ranks:
        ring = (count - 1) / count
        cells = [
            2 * ring * dense, 2 * ring * kept, 3 * ring * dense,
            4 * dense, 5 * kept, 4 * dense / count + (dense / 12 if count > 1 else 0),
        ]  # fmt: skip
        lines.append(f"| {count} | " + " | ".join(_bytes(each) for each in cells) + " |")
    return "\n".join(lines)


def _bytes(count: float) -> str:
    units = iter(("B", "KB", "MB", "GB"))
    unit = next(units)
    while count >= 1000:
        count, unit = count / 1000, next(units)
    return f"{count:.3g} {unit}" if count else "0"


@ends_with_its_reader
def main() -> None:
    """Prints both tables."""
    torch.manual_seed(0)
    print(graph_table(1_000_000, 64), "", training_table(1_100_000_000, 0.1), sep="\n")


if __name__ == "__main__":
    main()
