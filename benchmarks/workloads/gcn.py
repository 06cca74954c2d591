"""A graph convolutional network of two layers (Kipf and Welling, 2017), forward; with dense features or a bag of words."""

from __future__ import annotations

from argparse import Namespace, _ActionsContainer
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import graphs
from benchmarks.arguments import add_list, some_of
from benchmarks.operations import Operation, workload
from benchmarks.registry import Case

GRAPHS = ("cora", "cora-words", "pubmed", "arxiv", "wordnet")
WORDS = "-words"  # features are a bag of words, sparse


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--graphs", some_of(*GRAPHS), ",".join(GRAPHS), "which; -words: sparse features")


def exact(a: Any, x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    return a @ (np.maximum(a @ (x @ w1) + b1, 0) @ w2) + b2


def build(name: str) -> Operation:
    graph = name.removesuffix(WORDS)
    a, sizes = graphs.normalised(graphs.matrix(graph)), graphs.sizes(graph)
    generator = torch.Generator().manual_seed(0)
    random = partial(torch.randn, generator=generator)
    x = graphs.bag_of_words(sizes.nodes, sizes.features) if name.endswith(WORDS) else random(sizes.nodes, sizes.features)
    parameters = (
        random(sizes.features, sizes.hidden) / sizes.features**0.5,
        random(sizes.hidden),
        random(sizes.hidden, sizes.classes) / sizes.hidden**0.5,
        random(sizes.classes),
    )
    moved = 4 * sizes.nodes * (sizes.features + 4 * sizes.hidden + 3 * sizes.classes)
    return Operation("gcn", a, (x, *parameters), exact, 1e9 * gflop(graph), moved)


def gflop(graph: str) -> float:
    """Of the products, with dense features."""
    sizes = graphs.sizes(graph)
    dense = sizes.nodes * sizes.hidden * (sizes.features + sizes.classes)
    return 2e-9 * (dense + graphs.ENTRIES[graph] * (sizes.hidden + sizes.classes))


def cases(args: Namespace) -> list[Case]:
    return [
        Case(name, {"graph": name}, partial(build, name), gflop(name.removesuffix(WORDS)) / 4)  # most of it is dense
        for name in args.graphs
    ]


WORKLOAD = workload("gcn", "a GCN of two layers", add_arguments, cases)
