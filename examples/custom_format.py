"""A sparse format of your own: ELL, in which every row has as many entries as the longest, in nine lines.

Classifies real handwritten digits (scikit-learn's, 8x8 pixels) of which one in twenty is labelled, by letting the labels
spread over the graph of nearest neighbours: y = 0.9 * A y + 0.1 * labels (Zhou et al., 2003). A is in the format of this
file, and the products with it are eager, compiled, and checked against a dense matrix.

    python examples/custom_format.py --neighbours 8
"""

from __future__ import annotations

import argparse
import sys

try:
    import torch
    from sklearn.datasets import load_digits
    from sklearn.neighbors import kneighbors_graph
    from torch import Tensor

    import gossamer
    from gossamer import Format, SparseTensor
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs the package '{missing.name}': pip install '.[examples]' in the repository")


def fill_rows(format: Format, shape: tuple[int, ...], at: list[Tensor], values: Tensor) -> tuple[list[Tensor], Tensor]:
    """The entries, and zeros in every row that has fewer than the longest: at its first columns that have none."""
    counts = at[0].bincount(minlength=shape[0])
    free = torch.ones(shape, dtype=torch.bool)
    free[tuple(at)] = False
    added = free & (free.cumsum(1) <= (counts.max() - counts)[:, None])
    more = added.nonzero().unbind(1)
    return [torch.cat(both) for both in zip(at, more, strict=True)], torch.cat([values, values.new_zeros(more[0].numel())])


ELL = gossamer.register_format("ELL", "(i, j) -> (i : dense, j : loose_compressed)", pack=fill_rows)


def spread(adjacency: Tensor, labels: Tensor) -> Tensor:
    """Twenty steps of y = 0.9 * A y + 0.1 * labels."""
    scores = labels
    for _ in range(20):
        scores = 0.9 * (adjacency @ scores) + 0.1 * labels
    return scores


def main() -> None:
    """Make the graph, spread the labels, and say how it went."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--neighbours", type=int, default=8, help="of each digit in the graph")
    options = parser.parse_args()
    digits = load_digits()
    graph = kneighbors_graph(digits.data, options.neighbours)
    graph = graph.maximum(graph.T)  # neighbours of each other
    graph = SparseTensor.from_scipy((graph / graph.sum(1)).tocsr().astype("float32"))
    adjacency = graph.to_format(ELL)
    print(f"{graph}, in the format of this file {adjacency}")
    print(f"each row has {adjacency.nnz // len(adjacency)} entries: {adjacency.nnz / graph.nnz:.2f} times as many as in CSR")

    targets = torch.from_numpy(digits.target)
    known = torch.arange(targets.numel()) % 20 == 0
    labels = torch.nn.functional.one_hot(targets, 10).float() * known[:, None]
    eager = spread(adjacency, labels)
    compiled = torch.compile(spread, backend="sparse", fullgraph=True)(adjacency, labels)
    dense = spread(graph.to_dense(), labels)
    for name, result in (("eager", eager), ("compiled", compiled)):
        torch.testing.assert_close(result, dense, rtol=1e-4, atol=1e-6)
        print(f"{name}: differs from dense by {(result - dense).abs().max():.0e} at most")
    right = (compiled.argmax(1) == targets)[~known].float().mean()
    print(f"{int(known.sum())} labels spread to {int((~known).sum())} digits, {right:.1%} of them correctly")


if __name__ == "__main__":
    main()
