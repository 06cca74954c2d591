"""A recommender on WordNet: which synset does a pointer of another lead to? Trained and compared with eager PyTorch.

The model is a small DLRM (Naumov and others, 2019): tables of synsets, of the words of their glosses and of their classes,
the products of all pairs of looked-up vectors, and a perceptron. The tables have sparse gradients, and Adagrad. One model is
trained eagerly, its twin with `torch.compile(model, backend="sparse")`; then tables are stored in 16, 8 and 4 bits.

    pip install '.[examples]'
    python examples/recommender.py
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

try:
    import torch
    import torch.nn.functional as F
    from sources import wordnet  # type: ignore[import-not-found]
    from torch import Tensor, nn

    import gossamer
    from gossamer.sparsity.bags.steps import unwatched
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs the package '{missing.name}': pip install '.[examples]' in the repository")

_LENGTH = 16  # words of a gloss, at most; the rest is padding


@dataclass(frozen=True)
class Links:
    """Pointers between synsets, for training and for tests, and what is known of synsets.

    train, test  [2, pointers]
    words        [synsets, 16], 0 for no word
    classes      [synsets]
    """

    train: Tensor
    test: Tensor
    words: Tensor
    classes: Tensor
    vocabulary: int


def links(graph: wordnet.WordNet, vocabulary: int) -> Links:
    """A tenth of the pointers is for tests; the most frequent words of glosses have numbers from 1 on."""
    split = [[word.strip("();,.\"'").lower() for word in gloss.split()] for gloss in graph.glosses]
    frequent = Counter(word for words in split for word in words).most_common(vocabulary - 1)
    numbers = {word: number for number, (word, _) in enumerate(frequent, 1)}
    rows = [[numbers[word] for word in words if word in numbers][:_LENGTH] for words in split]
    words = torch.tensor([row + [0] * (_LENGTH - len(row)) for row in rows])
    order = torch.randperm(graph.edge_index.shape[1], generator=torch.Generator().manual_seed(0))
    test = order[: len(order) // 10]
    return Links(graph.edge_index[:, order[len(test) :]], graph.edge_index[:, test], words, graph.classes, vocabulary)


class Recommender(nn.Module):
    """Pairs of synsets → how likely a pointer is, as logits."""

    pairs: Tensor

    def __init__(self, data: Links, columns: int = 32) -> None:
        super().__init__()
        sizes = {"synsets": len(data.classes), "words": data.vocabulary, "classes": wordnet.CLASSES}
        self.tables: Any = nn.ModuleDict(
            {
                f"{name}_{side}": nn.EmbeddingBag(
                    size, columns, mode="mean" if name == "words" else "sum", padding_idx=0 if name == "words" else None,
                    sparse=True,
                )
                for side in ("from", "to")
                for name, size in sizes.items()
            }
        )  # fmt: skip
        for table in self.tables.values():
            nn.init.normal_(table.weight, std=0.1)  # type: ignore[arg-type]
        self.top = nn.Sequential(nn.Linear(15 + 6 * columns, 64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("pairs", torch.tensor([(i, j) for i in range(6) for j in range(i)]).t(), persistent=False)

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        found = torch.stack([table(features[name]) for name, table in self.tables.items()], 1)
        products = (found @ found.mT)[:, self.pairs[0], self.pairs[1]]
        result: Tensor = self.top(torch.cat([products, found.flatten(1)], 1))[:, 0]
        return result


def features(data: Links, ends: Tensor) -> dict[str, Tensor]:
    """What the model is told of pairs [2, pairs]."""
    found = {}
    for side, synsets in zip(("from", "to"), ends, strict=True):
        found[f"synsets_{side}"], found[f"classes_{side}"] = synsets[:, None], data.classes[synsets][:, None]
        found[f"words_{side}"] = data.words[synsets]
    return found


def batches(data: Links, ends: Tensor, size: int, seed: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Pointers, and as many pairs of which one end is drawn at random."""
    random = torch.Generator().manual_seed(seed)
    for chosen in torch.randperm(ends.shape[1], generator=random).split(size // 2):
        real = ends[:, chosen]
        drawn = torch.stack([real[0], torch.randint(0, len(data.classes), (len(chosen),), generator=random)])
        yield features(data, torch.cat([real, drawn], 1)), torch.cat([torch.ones(len(chosen)), torch.zeros(len(chosen))])


def train(
    model: Recommender, call: Callable[..., Tensor], data: Links, steps: int, size: int, eager: bool = False
) -> tuple[float, float]:
    """Milliseconds of a step, at the median, and the last losses' mean."""
    tables: list[Any] = [table.weight for table in model.tables.values()]
    optimizers: list[Any] = [torch.optim.Adagrad(tables, lr=0.05), torch.optim.Adam(model.top.parameters(), lr=1e-3)]
    times, losses, done = list[float](), list[float](), 0
    for epoch in range(steps):
        for given, target in batches(data, data.train, size, epoch):
            start = time.perf_counter()
            loss = F.binary_cross_entropy_with_logits(call(given), target)
            loss.backward()
            for optimizer in optimizers:
                if eager:
                    with unwatched():
                        optimizer.step()
                else:
                    optimizer.step()
                optimizer.zero_grad()
            times.append(1e3 * (time.perf_counter() - start))
            losses.append(float(loss.detach()))
            done += 1
            if done == steps:
                return median(times), sum(losses[-10:]) / len(losses[-10:])
    raise AssertionError("there are no pointers")


@torch.no_grad()
def area(call: Callable[..., Tensor], data: Links, size: int) -> float:
    """The share of pairs of a pointer and a random pair that are in the right order: the area under the ROC curve."""
    scores, targets = [], []
    for given, target in batches(data, data.test[:, : 10 * size], size, 1):
        scores.append(call(given))
        targets.append(target)
    order = torch.cat(scores).argsort()
    positive = torch.cat(targets)[order]
    below = (1 - positive).cumsum(0)
    return float((below * positive).sum() / (positive.sum() * (1 - positive).sum()))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=150, help="of training")
    options.add_argument("--batch", type=int, default=2048, help="pairs of a step")
    options.add_argument("--vocabulary", type=int, default=20_000, help="words that glosses are known by")
    options.add_argument("--threads", type=int, default=1)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    data = links(wordnet.load(), given.vocabulary)
    torch.manual_seed(0)
    plain = Recommender(data)
    model = copy.deepcopy(plain)
    compiled = torch.compile(model, backend="sparse", fullgraph=True)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's default, which it warns of
    print(f"WordNet has {data.train.shape[1]:,} pointers between {len(data.classes):,} synsets, such as 'is a kind of'.")
    print(f"Twin models learn to tell them from random pairs, in {given.steps} steps of {given.batch} pairs.")
    eager_ms, eager_loss = train(plain, plain, data, given.steps, given.batch, eager=True)
    ours_ms, ours_loss = train(model, compiled, data, given.steps, given.batch)
    print(f"\n{'training':16} {'ms a step':>10} {'speed-up':>9} {'loss':>8} {'AUC':>8}")
    plain.eval(), model.eval()
    of_eager, of_ours = area(plain, data, given.batch), area(compiled, data, given.batch)
    print(f"{'PyTorch, eager':16} {eager_ms:10.1f} {'':9} {eager_loss:8.4f} {of_eager:8.4f}")
    print(f"{'Gossamer':16} {ours_ms:10.1f} {eager_ms / ours_ms:8.2f}x {ours_loss:8.4f} {of_ours:8.4f}")
    print("\nAUC is the share of pointers that score higher than a random pair: 0.5 is guessing, 1 is the most.")
    print(f"\n{'trained tables as':16} {'MB':>10} {'AUC':>8}")
    floats = sum(table.weight.nbytes for table in model.tables.values())
    print(f"{'float32':16} {floats / 1e6:11.1f} {of_ours:8.4f}")
    for bits in ("float16", "int8", "int4"):
        small = gossamer.quantize(copy.deepcopy(model), weights=bits, only=nn.EmbeddingBag)
        size = sum(buffer.nbytes for name, buffer in small.named_buffers() if "weight" in name)
        print(f"{bits:16} {size / 1e6:11.1f} {area(small, data, given.batch):8.4f}")


if __name__ == "__main__":
    main()
