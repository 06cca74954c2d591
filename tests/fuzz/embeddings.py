"""python -m tests.fuzz.embeddings --count 1500 --seed 0: random models of embedding tables, against float64 in eager torch.

A model has a few look-ups: bags by offsets or of one length, sums, means and maxima, with weights, padding, empty bags; sums
and means over embeddings; dense gradients or sparse ones. It is called with batches of several sizes, and trained by an
optimizer.
A twin of the same values in float64 does the same. Most cases call look-ups directly, without a graph that takes seconds.
Some cases are layers whose tables are stored in few bits, or as nonzeros; their twin has the floats that these stand for.
"""

import argparse
import copy
import random
import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
from gossamer.backend.report.report import collect
from gossamer.sparsity.bags import gradients as _gradients  # noqa: F401  # defines operations
from gossamer.sparsity.bags import sparse_lookups as lookups
from gossamer.sparsity.bags.sparse_lookups import look_up
from gossamer.sparsity.bags.steps import watch_optimizers
from tests.fuzz.layers import TOLERANCE

_WIDTHS = (1, 4, 7, 16, 33, 64, 100)
_STORED = 0.25  # the share of cases of stored tables
_OPTIMIZERS = ("SGD", "Adagrad", "Adam", "RowWiseAdagrad")


class Lookup(nn.Module):
    """One use of a table."""

    def __init__(self, chance: random.Random, columns: int, sparse: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows = chance.choice((1, 3, 50, 3000))
        self.form = chance.choice(("offsets", "offsets", "lines", "sum", "mean", "weighted", "rows"))
        self.kind = chance.choice(("sum", "mean", "max"))
        self.kind = "sum" if sparse and self.kind == "max" else self.kind
        self.padding = chance.choice((None, None, 0, self.rows - 1))
        self.last, self.weights = chance.random() < 0.4, self.kind == "sum" and chance.random() < 0.4
        self.learned = self.weights and chance.random() < 0.5
        self.sparse, self.keepdim = sparse, chance.random() < 0.2
        self.integers = chance.choice((torch.int32, torch.int64))
        self.table = nn.Parameter(torch.randn(self.rows, columns, dtype=dtype))
        with torch.no_grad():
            if chance.random() < 0.1:
                self.table[chance.randrange(self.rows), chance.randrange(columns)] = chance.choice((float("nan"), float("inf")))
            if self.padding is not None and chance.random() < 0.3:
                self.table[self.padding] = float("nan")
            if chance.random() < 0.3:
                self.table.round_()  # of which some are equal
        self.factor = nn.Parameter(torch.tensor(0.5, dtype=dtype))

    def extra_repr(self) -> str:
        hidden = {"training", "table", "factor"}
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if name[0] != "_" and name not in hidden)

    def batch(self, chance: random.Random, bags: int) -> list[Tensor]:
        """Indices, offsets and weights."""
        length = chance.choice((1, 2, 5, 20))
        counts = [0 if chance.random() < 0.2 else chance.randint(0, 2 * length) for _ in range(bags)]
        total = sum(counts) if self.form == "offsets" else bags * length
        indices = torch.tensor([chance.randrange(self.rows) for _ in range(total)], dtype=self.integers)
        ends = torch.tensor([0, *counts]).cumsum(0).to(self.integers)
        weights = torch.tensor([chance.uniform(-1, 1) for _ in range(total)])
        if self.form != "offsets":
            indices, weights = indices.view(bags, length), weights.view(bags, length)
        return [indices, ends if self.last else ends[:-1], weights]

    def direct(self, indices: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        """The same without a graph, by the functions that graphs call."""
        weights = weights.to(self.table) * (self.factor if self.learned else 1)
        padding = -1 if self.padding is None else self.padding
        if self.form in ("offsets", "lines"):
            begins = offsets if self.form == "offsets" else None
            given, last = (weights if self.weights else None), self.last and begins is not None
            if self.kind == "max":
                return _Maxima.apply(self.table, indices, begins, padding, last)
            (found,) = look_up([lookups.Lookup(self.kind, padding, last)], [(self.table, indices, begins, given)])
            return found
        (found,) = look_up([lookups.Lookup("rows", padding)], [(self.table, indices, None, None)])
        return self._of_rows(found, weights)

    def forward(self, indices: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        weights = weights.to(self.table) * (self.factor if self.learned else 1)
        own = {"sparse": self.sparse, "padding_idx": self.padding}
        if self.form in ("offsets", "lines"):
            by = {"offsets": offsets, "include_last_offset": self.last} if self.form == "offsets" else {}
            per_sample = weights if self.weights else None
            return F.embedding_bag(indices, self.table, mode=self.kind, per_sample_weights=per_sample, **by, **own)
        return self._of_rows(F.embedding(indices, self.table, **own), weights)

    def _of_rows(self, found: Tensor, weights: Tensor) -> Tensor:
        if self.form == "sum":
            return found.sum(1, keepdim=True)[:, 0] if self.keepdim else found.sum(-2)
        if self.form == "mean":
            return found.mean(1)
        if self.form == "weighted":
            return (found * weights.unsqueeze(-1)).sum(1)
        return found.flatten(1).sum(-1, keepdim=True) * found[:, 0]


class _Maxima(torch.autograd.Function):
    """Those of bags, and the dense gradient of their table."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, indices: Tensor, offsets: Tensor | None, padding: int, last: bool) -> Tensor:
        found, ctx.places = torch.ops.gossamer.max_bags.default(table.detach(), indices, offsets, padding, last)
        ctx.rows = table.shape[0]
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        made = torch.ops.gossamer.max_bags_gradient.default(grad.contiguous(), ctx.places, ctx.rows)
        return made, None, None, None, None


class Model(nn.Module):
    """Look-ups in some tables, and what is computed with their results."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        dtype = chance.choice((torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16))
        columns, sparse = chance.choice(_WIDTHS), chance.choice((None, True, False))
        of = [chance.random() < 0.5 if sparse is None else sparse for _ in range(chance.randint(1, 4))]
        self.lookups = nn.ModuleList([Lookup(chance, columns, each, dtype) for each in of])
        self.direct = False
        self.trained = dtype in (torch.float32, torch.float64) and chance.random() < 0.8
        if chance.random() < 0.2:
            self.lookups[-1].table = self.lookups[0].table
            self.lookups[-1].rows = self.lookups[0].rows
            self.lookups[-1].padding = self.lookups[0].padding

    def forward(self, batches: list[list[Tensor]]) -> list[Tensor]:
        calls = [lookup.direct if self.direct else lookup for lookup in self.lookups]
        found = [call(*batch) for call, batch in zip(calls, batches, strict=True)]
        return [found[0] * 2, *found[1:], found[0] + found[-1]] if len(found) > 1 else found


class Stored(nn.Module):
    """Some layers of torch.nn whose tables are stored in less memory."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.layers, self.shapes = nn.ModuleList(), list[Lookup]()
        for _ in range(chance.randint(1, 4)):
            use = Lookup(chance, chance.choice(_WIDTHS), False, torch.float32)
            use.form = chance.choice(("offsets", "lines", "rows"))
            table, own = use.table.detach().clone(), {"padding_idx": use.padding}
            kind = chance.choice(("nonzeros", "int8", "int4", "float16"))
            if kind == "nonzeros":
                table *= torch.rand_like(table) < 0.3
            else:
                table.nan_to_num_(0, 0, 0)
            if use.form == "rows":
                layer: Any = nn.Embedding.from_pretrained(table, freeze=False, **own)
            else:
                use.kind, use.last = ("sum" if use.weights else use.kind), use.last and use.form == "offsets"
                layer = nn.EmbeddingBag.from_pretrained(
                    table, freeze=False, mode=use.kind, include_last_offset=use.last, **own
                )  # fmt: skip
            if kind == "nonzeros":
                gossamer.store_sparse(layer, densest=1.0, only=[nn.Embedding, nn.EmbeddingBag])
            else:
                gossamer.quantize(layer, weights=kind, only=[nn.Embedding, nn.EmbeddingBag])
            self.layers.append(layer)
            self.shapes.append(use)

    def forward(self, batches: list[list[Tensor]]) -> list[Tensor]:
        results = []
        for layer, use, (indices, offsets, weights) in zip(self.layers, self.shapes, batches, strict=True):
            given = (weights.to(layer.weight.dtype) if use.weights else None,)
            by = (offsets if use.form == "offsets" else None, *given)
            results.append(layer(indices) if use.form == "rows" else layer(indices, *by))
        return results

    def twin(self) -> nn.Module:
        """The same in float64 and torch.nn."""
        made = copy.copy(self)
        made._modules = {"layers": nn.ModuleList()}
        for layer, use in zip(self.layers, self.shapes, strict=True):
            own: Any = {"freeze": True, "padding_idx": use.padding}
            cls: Any = nn.Embedding if use.form == "rows" else nn.EmbeddingBag
            own |= {} if use.form == "rows" else {"mode": use.kind, "include_last_offset": use.last}
            made.layers.append(cls.from_pretrained(layer.weight.double(), **own))
        return made


def problem_of_stored(chance: random.Random, direct: bool) -> str | None:
    """What is wrong with a case of stored tables, if anything is."""
    model = Stored(chance)
    twin, call = model.twin(), model
    if not direct:
        torch._dynamo.reset()
        options = {"dense": "eager", "strict": True}
        call = torch.compile(model, backend="sparse", dynamic=chance.choice((None, True)), fullgraph=True, options=options)
    for bags in [chance.choice((0, 1, 2, 3, 17, 40)) for _ in range(3)]:
        batches = [use.batch(chance, bags) for use in model.shapes]
        with torch.no_grad():
            for number, (found, expected) in enumerate(zip(call(batches), twin(batches), strict=True)):
                if difference := _difference(found, expected):
                    return f"{bags} bags, result {number}: {difference}\n{model}"
    return None


def optimizers_of(name: str, model: Model) -> list[torch.optim.Optimizer]:
    """Those of the tables, by whether gradients are sparse, which Adam takes in another class."""
    sparse, dense = dict[Tensor, None](), dict[Tensor, None]()
    for lookup in model.lookups:
        (sparse if lookup.sparse else dense)[lookup.table] = None
    dense = {each: None for each in dense if each not in sparse} | {each.factor: None for each in model.lookups if each.learned}
    mixed = [each for each in sparse if any(each is other.table and not other.sparse for other in model.lookups)]
    made = list[torch.optim.Optimizer]()
    for tables, kind in ((sparse, "SparseAdam"), (dense, "Adam")):
        if tables:
            kind = ("SGD" if mixed else kind) if name == "Adam" else name
            cls: Any = getattr(gossamer if kind == "RowWiseAdagrad" else torch.optim, kind)
            made.append(cls(list(tables), lr=0.1, **({} if kind == "SGD" else {"eps": 0.1})))
    return made


def problem_of(seed: int, direct: float = 0) -> str | None:
    """What is wrong with the case of a seed, if anything is. A share of cases is called `direct`ly."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    if chance.random() < _STORED:
        return problem_of_stored(chance, chance.random() < direct)
    model = Model(chance)
    model.direct = chance.random() < direct
    for lookup in model.lookups if model.direct else ():
        lookup.sparse = lookup.kind != "max" or lookup.form not in ("offsets", "lines")
    twin = copy.deepcopy(model).double()
    twin.direct = False
    name, eager = chance.choice(_OPTIMIZERS), {"dense": "eager", "strict": True, "min_gain": 0}
    call: Any = model
    if not model.direct:
        torch._dynamo.reset()
        call = torch.compile(model, backend="sparse", dynamic=chance.choice((None, True)), fullgraph=True, options=eager)
    sides = [(model, call, optimizers_of(name, model)), (twin, twin, optimizers_of(name, twin))]
    sizes = [chance.choice((1, 2, 3, 17, 40)) for _ in range(3)] + [0] * (chance.random() < 0.2)
    with collect() as collected:
        for bags in sizes:
            batches = [lookup.batch(chance, bags) for lookup in model.lookups]
            mode = chance.random() < 0.2
            model.train(mode), twin.train(mode)
            results, gradients = [], []
            for side, function, optimizers in sides:
                with torch.set_grad_enabled(side.trained):
                    results.append(function(batches))
                if side.trained:
                    loss = sum((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() for y in results[-1])
                    loss.backward()
                    gradients.append([_dense(p.grad) for p in side.parameters() if p.grad is not None])
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            pairs = [*zip(*results, strict=True), *zip(*gradients, strict=True)]
            pairs += zip(model.parameters(), twin.parameters(), strict=True)
            for number, (found, expected) in enumerate(pairs):
                difference = _difference(found.detach(), expected.detach())
                if difference:
                    return f"{bags} bags, {name}: result {number} of {len(results[0])} and {len(pairs)}: {difference}\n{model}"
    looked = not model.direct and any(each.form != "rows" or (each.sparse and model.trained) for each in model.lookups)
    if looked and not any(decision.sparse for decision in collected.decisions):
        return f"nothing is ours: {collected.decisions}"
    return None


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.layout is torch.sparse_coo else grad.clone()


def _difference(found: Tensor, expected: Tensor) -> str | None:
    if found.shape != expected.shape:
        return f"gives {list(found.shape)}, must be {list(expected.shape)}"
    tolerance = TOLERANCE[found.dtype] * 10
    wide = found.double()
    if not torch.equal(wide.isnan(), expected.isnan()):
        return f"{int(wide.isnan().sum())} are NaN, must be {int(expected.isnan().sum())}"
    kept = expected.isfinite() & wide.isfinite()
    if not torch.equal(kept, expected.isfinite()):
        return "infinities differ"
    wide, expected = (torch.where(kept, each, 0) for each in (wide, expected))
    scale = max(float(expected.abs().max()) if expected.numel() else 0, 0.5)
    error = float((wide - expected).abs().max()) / scale if expected.numel() else 0
    return None if error <= tolerance else f"differs by {error:.3g} of {scale:.3g}"


def main() -> int:
    """The number of cases that failed, at most 100."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--direct", type=float, default=0.9, help="the share of cases without a graph")
    given, wrong = options.parse_args(), 0
    watch_optimizers()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    for seed in range(given.seed, given.seed + given.count):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                problem = problem_of(seed, given.direct)
        except Exception as failure:
            problem = f"raises {type(failure).__name__}: {str(failure)[:1500]}"
        if problem is not None:
            wrong += 1
            print(f"seed {seed}: {problem}", flush=True)
    print(f"{given.count} cases from {given.seed} on: {wrong} wrong")
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
