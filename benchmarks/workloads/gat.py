"""A layer of graph attention with 8 heads of 8 features (Veličković et al., 2018), forward."""

from __future__ import annotations

from argparse import Namespace, _ActionsContainer
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import graphs
from benchmarks.arguments import add_list, some_of
from benchmarks.operations import Operation, rows_of, workload
from benchmarks.registry import Case

HEADS, WIDTH = 8, 8
GRAPHS = ("cora", "cora-hidden", "pubmed", "arxiv", "wordnet", "wordnet-hidden")
HIDDEN = "-hidden"  # as a further layer, on the features of one before: the first is mostly a dense product
SLOPE = 0.2  # of the leaky ReLU


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--graphs", some_of(*GRAPHS), "cora,cora-hidden,wordnet,wordnet-hidden", "which; -hidden: a further layer")


def exact(a: Any, x: Any, w: Any, to: Any, source: Any) -> Any:
    """Every node is its own neighbour, so that no row is empty."""
    h = (x @ w).reshape(-1, *to.shape)
    rows, starts = rows_of(a).numpy(), a.indptr[:-1]
    scores = (h * to).sum(-1)[rows] + (h * source).sum(-1)[a.indices]
    scores = np.where(scores > 0, scores, SLOPE * scores)
    shares = np.exp(scores - np.maximum.reduceat(scores, starts)[rows])
    shares /= np.add.reduceat(shares, starts)[rows]
    messages = shares[:, :, None] * h[a.indices]
    return np.add.reduceat(messages, starts).reshape(a.shape[0], -1)


def build(name: str) -> Operation:
    a, features = graphs.with_loops(graphs.matrix(name.removesuffix(HIDDEN))), width(name)
    random = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, w = random(a.shape[0], features), random(features, HEADS * WIDTH) / features**0.5
    moved = 4 * a.shape[0] * (features + 2 * HEADS * WIDTH)
    return Operation("gat", a, (x, w, random(HEADS, WIDTH), random(HEADS, WIDTH)), exact, 1e9 * gflop(name), moved)


def width(name: str) -> int:
    """The features of each node."""
    return HEADS * WIDTH if name.endswith(HIDDEN) else graphs.sizes(name).features


def gflop(name: str) -> float:
    graph = name.removesuffix(HIDDEN)
    return 2e-9 * HEADS * WIDTH * (graphs.sizes(graph).nodes * (width(name) + 2) + graphs.ENTRIES[graph])


def cases(args: Namespace) -> list[Case]:
    return [Case(name, {"graph": name}, partial(build, name), gflop(name) / 4) for name in args.graphs]


WORKLOAD = workload("gat", "a layer of graph attention, 8 heads", add_arguments, cases)
