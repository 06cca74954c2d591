"""Embedding bags of many tables of 64 columns: the forward pass, and steps of training.

forward    tables x rows, a batch of bags for each
training   forward, backward for gradients of the bags that are given, and a step of an optimizer: Adagrad if the case names
           no other; the result is what the first step makes of the rows that it touches

Eager PyTorch has dense gradients, or with `sparse=True` sparse ones; Inductor compiles the former alone. `one-by-one` is
Gossamer with a graph for each table; in the forward pass, which Gossamer leaves to PyTorch, it and `kernel` have Gossamer's
kernel all the same. FBGEMM is `fbgemm-gpu-cpu`, whose training step has the optimizer in it.
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

import gossamer
from benchmarks.arguments import add_list, sizes, some_of
from benchmarks.contenders.sparse import missing
from benchmarks.models import largest_error
from benchmarks.registry import Case, Contender, Prepared, Unsupported, Work, Workload

_COLUMNS, _RATE, _EPSILON = 64, 0.01, 1e-12
_PASSES = ("forward", "training")
_OPTIMIZERS = ("adagrad", "sgd", "row-wise", "adam")


@dataclass(frozen=True, eq=False)
class Tables:
    """tables f32 [rows, 64] each, indices int64 [batch, bag] each. Without an optimizer it is the forward pass."""

    tables: list[Tensor]
    indices: list[Tensor]
    optimizer: str | None
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
        if self.optimizer is None:
            sums = [table[each].double().sum(1) for table, each in zip(self.tables, self.indices, strict=True)]
            return torch.cat(sums), work
        stepped = []
        for table, each, rows, given in zip(self.tables, self.indices, self.touched, self.gradients, strict=True):
            place = torch.searchsorted(rows, each.flatten())
            repeated = given.double().repeat_interleave(each.shape[1], 0)
            total = torch.zeros(len(rows), _COLUMNS, dtype=torch.float64).index_add_(0, place, repeated)
            stepped.append(table[rows].double() - _RATE * self._first_step(total))
        return torch.cat(stepped), work

    def _first_step(self, gradient: Tensor) -> Tensor:
        """What the rate of learning is multiplied with in the first step of the optimizer."""
        if self.optimizer == "sgd":
            return gradient
        mean = gradient.square().mean(1, keepdim=True).sqrt()
        return gradient / ((mean if self.optimizer == "row-wise" else gradient.abs()) + _EPSILON)

    def error(self, result: Tensor, expected: Tensor) -> float:
        return largest_error(result, expected)


class Model(nn.Module):
    """An EmbeddingBag for each table; in training of its own."""

    def __init__(self, problem: Tables, sparse: bool) -> None:
        super().__init__()
        tables = [table.clone() if problem.optimizer else table for table in problem.tables]
        self.bags = nn.ModuleList([nn.EmbeddingBag.from_pretrained(t, False, mode="sum", sparse=sparse) for t in tables])

    def forward(self, indices: list[Tensor], offsets: list[Tensor]) -> list[Tensor]:
        return [bag(i.view(-1), o) for bag, i, o in zip(self.bags, indices, offsets, strict=True)]


def ran(problem: Tables, sparse: bool, compiled: Callable[[Model], Callable[..., Any]], watched: bool = False) -> Prepared:
    """A call of a model; in training with gradients and a step."""
    from gossamer.sparsity.bags.steps import unwatched, watch_optimizers

    model = Model(problem, sparse)
    call, given = compiled(model), (problem.indices, problem.offsets)
    if problem.optimizer is None:
        return Prepared(lambda: torch.cat(call(*given)))
    optimizer = optimizer_of(problem.optimizer, model, sparse, watched)
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


def optimizer_of(name: str, model: Model, sparse: bool, watched: bool) -> torch.optim.Optimizer:
    """PyTorch's, which Gossamer watches; Adam has lazy moments where gradients are sparse."""
    parameters = list(model.parameters())
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=_RATE)
    if name == "row-wise":
        if not watched:
            raise Unsupported("PyTorch has no row-wise Adagrad")
        return gossamer.RowWiseAdagrad(parameters, lr=_RATE, eps=_EPSILON)
    if name == "adam":
        adam: Any = torch.optim.SparseAdam if sparse else torch.optim.Adam
        made: torch.optim.Optimizer = adam(parameters, lr=_RATE, eps=_EPSILON)
        return made
    return torch.optim.Adagrad(parameters, lr=_RATE, eps=_EPSILON)


def ours(model: Model) -> Callable[..., Any]:
    return torch.compile(model, backend="sparse", fullgraph=True)


def own_kernel(model: Model) -> Callable[..., Any]:
    return torch.compile(model, backend="sparse", fullgraph=True, options={"min_gain": 0})


def forward_by_our_kernel(problem: Tables) -> Prepared:
    if problem.optimizer is not None:
        raise Unsupported("in training it is Gossamer's kernel anyway")
    return ran(problem, False, own_kernel)


def one_by_one(model: Model) -> Callable[..., Any]:
    calls = [torch.compile(bag, backend="sparse", fullgraph=True, options={"min_gain": 0}) for bag in model.bags]
    return lambda indices, offsets: [call(i.view(-1), o) for call, i, o in zip(calls, indices, offsets, strict=True)]


def fbgemm(problem: Tables) -> Prepared:
    """All tables in one module, which has the optimizer."""
    import fbgemm_gpu.split_table_batched_embeddings_ops_training as tbe
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    kinds = {"adagrad": "EXACT_ADAGRAD", "sgd": "EXACT_SGD", "row-wise": "EXACT_ROWWISE_ADAGRAD", None: "EXACT_SGD"}
    if problem.optimizer not in kinds:
        raise Unsupported("FBGEMM has no Adam for CPUs")
    kind = getattr(EmbOptimType, kinds[problem.optimizer])
    rows = [len(table) for table in problem.tables]
    specs = [(n, _COLUMNS, tbe.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU) for n in rows]
    layer = tbe.SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=kind, learning_rate=_RATE, eps=_EPSILON)
    for weights, table in zip(layer.split_embedding_weights(), problem.tables, strict=True):
        weights.copy_(table)
    indices = torch.cat([each.flatten() for each in problem.indices])
    counts = torch.tensor([each.shape[1] for each in problem.indices for _ in range(len(each))])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    gradient = torch.cat(problem.gradients, 1)

    def forward() -> Tensor:
        found: Tensor = layer(indices, offsets)
        return found

    if problem.optimizer is None:
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


def build(tables: int, rows: int, batch: int, bag: int, optimizer: str | None) -> Tables:
    random = torch.Generator().manual_seed(0)
    made = [torch.randn(rows, _COLUMNS, generator=random) for _ in range(tables)]
    return Tables(made, [torch.randint(0, rows, (batch, bag), generator=random) for _ in range(tables)], optimizer)


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--passes", some_of(*_PASSES), ",".join(_PASSES), "what is timed")
    add_list(parser, "--optimizers", some_of(*_OPTIMIZERS), "adagrad", "of training")
    add_list(parser, "--tables", sizes, "8,26", "how many")
    add_list(parser, "--rows", sizes, "100000", "of a table")
    add_list(parser, "--batches", sizes, "2048", "bags of a table in a call")
    add_list(parser, "--bags", sizes, "20", "indices of a bag")


def cases(args: Namespace) -> list[Case]:
    optimizers = [optimizer for which in args.passes for optimizer in ([None] if which == "forward" else args.optimizers)]
    return [
        case(optimizer, tables, rows, batch, bag)
        for optimizer in optimizers
        for tables in args.tables
        for rows in args.rows
        for batch in args.batches
        for bag in args.bags
    ]


def case(optimizer: str | None, tables: int, rows: int, batch: int, bag: int) -> Case:
    which = "forward" if optimizer is None else "training" if optimizer == "adagrad" else f"training by {optimizer}"
    return Case(
        f"{which}, {tables} x {rows:,} rows, {batch} bags of {bag}",
        {"pass": which, "tables": tables, "rows": rows, "batch": batch, "bag": bag},
        partial(build, tables, rows, batch, bag, optimizer),
        tables * batch * bag * _COLUMNS * 1e-9,
    )


def contenders() -> dict[str, Contender]:
    def as_it_is(model: Model) -> Callable[..., Any]:
        return model

    return {
        "eager": Contender("PyTorch, dense gradients", lambda problem: ran(problem, False, as_it_is)),
        "eager-sparse": Contender("PyTorch, sparse=True", lambda problem: ran(problem, True, as_it_is)),
        "inductor": Contender("Inductor, dense gradients", lambda problem: ran(problem, False, torch.compile)),
        "sparse": Contender("Gossamer, sparse=True", lambda problem: ran(problem, True, ours, True), missing=missing),
        "sparse-kernel": Contender("Gossamer's kernel", forward_by_our_kernel, missing=missing),
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
