"""Embedding bags of many tables of 64 columns: the forward pass, and a step of training with Adagrad.

forward   tables x rows, a batch of bags for each
training  forward, backward for gradients of the bags that are given, and Adagrad; the result is what the first step makes of
          the rows that it touches

Eager PyTorch has dense gradients, or with `sparse=True` sparse ones; Inductor compiles the former alone. `one-by-one` is
Gossamer with a graph for each table. FBGEMM is `fbgemm-gpu-cpu`, whose training step has the optimizer in it.
"""

from __future__ import annotations

from argparse import Namespace, _ActionsContainer
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.arguments import add_list, sizes, some_of
from benchmarks.contenders.sparse import missing
from benchmarks.models import largest_error
from benchmarks.registry import Case, Contender, Prepared, Work, Workload

_COLUMNS, _RATE, _EPSILON = 64, 0.01, 1e-8
_PASSES = ("forward", "training")


@dataclass(frozen=True, eq=False)
class Tables:
    """tables f32 [rows, 64] each, indices int64 [batch, bag] each."""

    tables: list[Tensor]
    indices: list[Tensor]
    training: bool
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"f32": 1e-4})
    precision: str = "f32"

    @cached_property
    def gradients(self) -> list[Tensor]:
        """Those of the bags."""
        random = torch.Generator().manual_seed(2)
        return [torch.randn(len(each), _COLUMNS, generator=random) for each in self.indices]

    @cached_property
    def offsets(self) -> list[Tensor]:
        return [torch.arange(0, each.numel(), each.shape[1]) for each in self.indices]

    @cached_property
    def touched(self) -> list[Tensor]:
        """The rows that have an index."""
        return [each.unique() for each in self.indices]

    def reference(self) -> tuple[Tensor, Work]:
        entries = sum(each.numel() for each in self.indices)
        read = 4 * _COLUMNS * entries
        work = Work(2.0 * _COLUMNS * entries, 2.0 * _COLUMNS * entries, read, read // self.indices[0].shape[1])
        if not self.training:
            sums = [table[each].double().sum(1) for table, each in zip(self.tables, self.indices, strict=True)]
            return torch.cat(sums), work
        stepped = []
        for table, each, rows, given in zip(self.tables, self.indices, self.touched, self.gradients, strict=True):
            place = torch.searchsorted(rows, each.flatten())
            repeated = given.double().repeat_interleave(each.shape[1], 0)
            total = torch.zeros(len(rows), _COLUMNS, dtype=torch.float64).index_add_(0, place, repeated)
            stepped.append(table[rows].double() - _RATE * total / (total.abs() + _EPSILON))
        return torch.cat(stepped), work

    def error(self, result: Tensor, expected: Tensor) -> float:
        return largest_error(result, expected)


class Model(nn.Module):
    """An EmbeddingBag for each table; in training of its own."""

    def __init__(self, problem: Tables, sparse: bool) -> None:
        super().__init__()
        tables = [table.clone() if problem.training else table for table in problem.tables]
        self.bags = nn.ModuleList([nn.EmbeddingBag.from_pretrained(t, False, mode="sum", sparse=sparse) for t in tables])

    def forward(self, indices: list[Tensor], offsets: list[Tensor]) -> list[Tensor]:
        return [bag(i.view(-1), o) for bag, i, o in zip(self.bags, indices, offsets, strict=True)]


def ran(problem: Tables, sparse: bool, compiled: Callable[[Model], Callable[..., Any]], watched: bool = False) -> Prepared:
    """A call of a model; in training with gradients and a step."""
    from gossamer.sparsity.bags.steps import unwatched, watch_optimizers

    model = Model(problem, sparse)
    call, given = compiled(model), (problem.indices, problem.offsets)
    if not problem.training:
        return Prepared(lambda: torch.cat(call(*given)))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=_RATE, eps=_EPSILON)
    if watched:
        watch_optimizers()

    def step() -> None:
        with torch.enable_grad():
            torch.autograd.backward(call(*given), problem.gradients)
        if watched:
            optimizer.step()
        else:
            with unwatched():
                optimizer.step()
        optimizer.zero_grad()

    step()
    first = torch.cat([bag.weight.detach()[rows] for bag, rows in zip(model.bags, problem.touched, strict=True)])  # type: ignore[operator]

    def stepped() -> Tensor:
        step()
        return first

    return Prepared(stepped)


def ours(model: Model) -> Callable[..., Any]:
    return torch.compile(model, backend="sparse", fullgraph=True)


def one_by_one(model: Model) -> Callable[..., Any]:
    calls = [torch.compile(bag, backend="sparse", fullgraph=True) for bag in model.bags]
    return lambda indices, offsets: [call(i.view(-1), o) for call, i, o in zip(calls, indices, offsets, strict=True)]


def fbgemm(problem: Tables) -> Prepared:
    """All tables in one module, which has the optimizer."""
    import fbgemm_gpu.split_table_batched_embeddings_ops_training as tbe
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    rows = [len(table) for table in problem.tables]
    specs = [(n, _COLUMNS, tbe.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU) for n in rows]
    layer = tbe.SplitTableBatchedEmbeddingBagsCodegen(
        specs, optimizer=EmbOptimType.EXACT_ADAGRAD, learning_rate=_RATE, eps=_EPSILON
    )
    for weights, table in zip(layer.split_embedding_weights(), problem.tables, strict=True):
        weights.copy_(table)
    indices = torch.cat([each.flatten() for each in problem.indices])
    counts = torch.tensor([each.shape[1] for each in problem.indices for _ in range(len(each))])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    gradient = torch.cat(problem.gradients, 1)

    def forward() -> Tensor:
        found: Tensor = layer(indices, offsets)
        return found

    if not problem.training:
        return Prepared(lambda: torch.cat(forward().split(_COLUMNS, 1)))

    def step() -> None:
        with torch.enable_grad():
            forward().backward(gradient)

    step()
    first = torch.cat([w.detach()[r] for w, r in zip(layer.split_embedding_weights(), problem.touched, strict=True)])

    def stepped() -> Tensor:
        step()
        return first

    return Prepared(stepped)


def without_fbgemm() -> str | None:
    return None if find_spec("fbgemm_gpu") else "fbgemm_gpu is not installed: pip install fbgemm-gpu-cpu"


def build(tables: int, rows: int, batch: int, bag: int, which: str) -> Tables:
    random = torch.Generator().manual_seed(0)
    made = [torch.randn(rows, _COLUMNS, generator=random) for _ in range(tables)]
    return Tables(made, [torch.randint(0, rows, (batch, bag), generator=random) for _ in range(tables)], which == "training")


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--passes", some_of(*_PASSES), ",".join(_PASSES), "what is timed")
    add_list(parser, "--tables", sizes, "8,26", "how many")
    add_list(parser, "--rows", sizes, "100000", "of a table")
    add_list(parser, "--batches", sizes, "2048", "bags of a table in a call")
    add_list(parser, "--bags", sizes, "20", "indices of a bag")


def cases(args: Namespace) -> list[Case]:
    return [
        Case(
            f"{which}, {tables} x {rows:,} rows, {batch} bags of {bag}",
            {"pass": which, "tables": tables, "rows": rows, "batch": batch, "bag": bag},
            partial(build, tables, rows, batch, bag, which),
            tables * batch * bag * _COLUMNS * 1e-9,
        )
        for which in args.passes
        for tables in args.tables
        for rows in args.rows
        for batch in args.batches
        for bag in args.bags
    ]


def contenders() -> dict[str, Contender]:
    def as_it_is(model: Model) -> Callable[..., Any]:
        return model

    return {
        "eager": Contender("PyTorch, dense gradients", lambda problem: ran(problem, False, as_it_is)),
        "eager-sparse": Contender("PyTorch, sparse=True", lambda problem: ran(problem, True, as_it_is)),
        "inductor": Contender("Inductor, dense gradients", lambda problem: ran(problem, False, torch.compile)),
        "sparse": Contender("Gossamer, sparse=True", lambda problem: ran(problem, True, ours, True), missing=missing),
        "sparse-one-by-one": Contender(
            "Gossamer, table by table", lambda problem: ran(problem, True, one_by_one, True), missing=missing
        ),
        "sparse-dense": Contender(
            "Gossamer, dense gradients", lambda problem: ran(problem, False, ours, True), missing=missing
        ),
        "fbgemm": Contender("FBGEMM, CPU build", fbgemm, missing=without_fbgemm),
    }


WORKLOAD = Workload(
    "embedding bags of many tables, forward and in training",
    add_arguments,
    cases,
    contenders=contenders,
    baselines=("eager", "eager-sparse"),
    preparing=3,
    gflops=2.0,
)
