"""Train graph networks on WordNet with one line: `torch.compile(network, backend="sparse", fullgraph=True)`.

Each of 117,791 synsets (word senses) is classified into one of WordNet's 45 lexicographer files (noun.animal, verb.motion, …)
by the words of its gloss and by its neighbours. The network is PyTorch Geometric's, with a plain `edge_index`; it is trained
twice from the same start, compiled and as it is, and both losses, accuracies and times are shown.

    pip install '.[examples]'
    python examples/graph_networks.py --layer gcn --epochs 20 --threads 2
    python examples/graph_networks.py --layer gat
"""

from __future__ import annotations

import argparse
import copy
import re
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs the package '{missing.name}': pip install '.[examples]' in the repository")

from sources import wordnet  # type: ignore[import-not-found]

TRAINED = 0.8  # share of the synsets whose classes are shown in training


class Network(nn.Module):
    """Features [nodes, features] and edge_index [2, edges] → scores [nodes, classes], by two layers of message passing."""

    def __init__(self, layer: str, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        make: dict[str, Callable[[int, int], nn.Module]] = {
            "gcn": GCNConv,
            "sage": SAGEConv,
            "gat": lambda n, m: GATConv(n, m // 8, heads=8) if m == hidden else GATConv(n, m),
        }
        self.first, self.second = make[layer](features, hidden), make[layer](hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x, edge_index)), edge_index)


@dataclass(frozen=True)
class Data:
    """Features [nodes, features], edge_index [2, edges] (every edge both ways), classes [nodes], who is trained on [nodes]."""

    x: Tensor
    edge_index: Tensor
    classes: Tensor
    shown: Tensor


def load(features: int) -> Data:
    """WordNet, its glosses as weighted bags of hashed words."""
    graph = wordnet.load()
    edge_index = torch.cat([graph.edge_index, graph.edge_index.flip(0)], 1).unique(dim=1)
    generator = torch.Generator().manual_seed(0)
    shown = torch.rand(len(graph.glosses), generator=generator) < TRAINED
    return Data(words(graph.glosses, features), edge_index, graph.classes, shown)


def words(texts: Sequence[str], features: int) -> Tensor:
    """A row a text: the sum of its words, each hashed to one feature and weighted by how rare that is; of one length."""
    found = [[zlib.crc32(word.encode()) % features for word in re.findall(r"[a-z]+", text.lower())] for text in texts]
    counts = torch.tensor([len(each) for each in found])
    rows = torch.arange(len(texts)).repeat_interleave(counts)
    columns = torch.tensor([column for each in found for column in each])
    bags = torch.zeros(len(texts), features).index_put((rows, columns), torch.ones(len(rows)), accumulate=True)
    return features**0.5 * F.normalize(bags * (len(texts) / (1 + (bags > 0).sum(0))).log(), dim=1)


@dataclass(frozen=True)
class Run:
    """What a training came to: seconds of the first epoch (which compiles) and of the others, loss and accuracy."""

    first: float
    epoch: float
    loss: float
    accuracy: float


def train(network: nn.Module, data: Data, epochs: int) -> Run:
    """Trains on the synsets that are shown, and is evaluated on the others."""
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    seconds = []
    for _ in range(epochs):
        start = time.perf_counter()
        loss = F.cross_entropy(network(data.x, data.edge_index)[data.shown], data.classes[data.shown])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    with torch.no_grad():
        predicted = network(data.x, data.edge_index).argmax(1)
    right = (predicted == data.classes)[~data.shown]
    return Run(seconds[0], statistics.median(seconds[1:]), float(loss.detach()), float(right.float().mean()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--layer", choices=("gcn", "sage", "gat"), default="gcn", help="what passes messages (default gcn)")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the whole graph, at least 2 (default 20)")
    parser.add_argument("--features", type=int, default=256, help="hashed words (default 256)")
    parser.add_argument("--hidden", type=int, default=64, help="features between the layers, a multiple of 8 (default 64)")
    threads = torch.get_num_threads()
    parser.add_argument("--threads", type=int, default=threads, help=f"CPU threads (default {threads})")
    args = parser.parse_args()
    if args.epochs < 2 or args.hidden % 8 or min(args.features, args.hidden, args.threads) < 1:
        parser.error("--epochs must be at least 2, --hidden a multiple of 8, --features and --threads at least 1")
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    data = load(args.features)
    classes = wordnet.CLASSES
    print(f"WordNet: {len(data.x):,} synsets, {data.edge_index.shape[1]:,} edges, {args.features} features, {classes} classes")

    network = Network(args.layer, args.features, args.hidden, classes)
    compiled: Any = torch.compile(copy.deepcopy(network), backend="sparse", fullgraph=True)
    runs = {"sparse": train(compiled, data, args.epochs), "PyTorch": train(network, data, args.epochs)}
    for name, run in runs.items():
        print(
            f"  {name:<9}{1e3 * run.epoch:8.0f} ms an epoch  {runs['PyTorch'].epoch / run.epoch:5.2f}x   "
            f"loss {run.loss:.4f}   accuracy {run.accuracy:.2%}   first epoch {run.first:.1f} s"
        )


if __name__ == "__main__":
    main()
