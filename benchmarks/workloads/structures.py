"""Products with structured matrices of 1,024 features, batches with many adapters, and einsums of sparse operands.

forward    in inference, with parameters that do not change
training   forward, and the gradients of the input and all parameters; the result is that of the first parameter

PyTorch and Inductor run a structure as it is written. `by-hand` is Inductor with the factors that somebody takes out by hand;
Monarch matrices, butterflies and adapters are written with factors anyway. `whole` is PyTorch with the matrix made before.
"""

from __future__ import annotations

from argparse import Namespace, _ActionsContainer
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
from benchmarks.arguments import add_list, sizes, some_of
from benchmarks.contenders.sparse import missing
from benchmarks.models import largest_error
from benchmarks.registry import Case, Contender, Prepared, Unsupported, Work, Workload

Written = Callable[..., Tensor]
"""(parameters, x) or, of adapters, (parameters, x, the adapter of each sequence)."""

_FEATURES, _ADAPTERS, _RANK, _LENGTH = 1024, 64, 64, 16
_ROWS, _DENSITY, _EQUATION = 2048, 0.01, "ij,jk,kl->il"


def kron(p: Sequence[Tensor], x: Tensor) -> Tensor:
    return F.linear(x, torch.kron(p[0], p[1]))


def kron_by_hand(p: Sequence[Tensor], x: Tensor) -> Tensor:
    h = x.unflatten(-1, (p[0].shape[1], -1)) @ p[1].T
    return torch.einsum("tqr,pq->tpr", h, p[0]).flatten(1)


def blocks(p: Sequence[Tensor], x: Tensor) -> Tensor:
    return F.linear(x, torch.block_diag(*p))


def blocks_by_hand(p: Sequence[Tensor], x: Tensor) -> Tensor:
    h = torch.bmm(x.unflatten(-1, (len(p), -1)).transpose(0, 1), torch.stack(list(p)).transpose(1, 2))
    return h.transpose(0, 1).flatten(1)


def monarch(p: Sequence[Tensor], x: Tensor) -> Tensor:
    h = torch.einsum("tkp,kqp->tkq", x.unflatten(-1, (p[0].shape[0], -1)), p[0]).transpose(1, 2)
    return torch.einsum("tlr,lsr->tls", h, p[1]).transpose(1, 2).flatten(1)


def butterfly(p: Sequence[Tensor], x: Tensor) -> Tensor:
    """Radix 4: a stage multiplies four features that lie 256, 64, 16, 4 and 1 apart."""
    features = x.shape[-1]
    for number, stage in enumerate(p):
        apart = features // 4 ** (number + 1)
        h = x.view(-1, features // (4 * apart), 4, apart)
        x = torch.einsum("tgia,gaji->tgja", h, stage.view(-1, apart, 4, 4)).reshape(-1, features)
    return x


def adapters(p: Sequence[Tensor], x: Tensor, who: Tensor) -> Tensor:
    """Of a rank of 64, for sequences of 16 tokens."""
    return torch.bmm(torch.bmm(x.unflatten(0, (len(who), -1)), p[0][who]), p[1][who]).flatten(0, 1)


@dataclass(frozen=True)
class Structure:
    """How it is written, the shapes of its parameters, and how somebody takes the factors out by hand."""

    written: Written
    shapes: list[tuple[int, ...]]
    by_hand: Written | None = None


STRUCTURES = {
    "kron": Structure(kron, [(32, 32)] * 2, kron_by_hand),
    "blocks": Structure(blocks, [(64, 64)] * 16, blocks_by_hand),
    "monarch": Structure(monarch, [(32, 32, 32)] * 2),
    "butterfly": Structure(butterfly, [(256, 4, 4)] * 5),
    "adapters": Structure(adapters, [(_ADAPTERS, _FEATURES, _RANK), (_ADAPTERS, _RANK, _FEATURES)]),
}


class Layer(nn.Module):
    """Parameters, and what is computed with them."""

    def __init__(self, written: Written, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.written, self.factors = written, nn.ParameterList([each.clone() for each in parameters])

    def forward(self, *given: Tensor) -> Tensor:
        return self.written(list(self.factors), *given)


@dataclass(frozen=True, eq=False)
class Structured:
    """Parameters, and inputs of which x f32 [tokens, features] is the first."""

    structure: Structure
    parameters: list[Tensor]
    given: list[Tensor]
    training: bool
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"f32": 2e-5})
    precision: str = "f32"

    def reference(self) -> tuple[Tensor, Work]:
        tokens, passes = self.given[0].shape[0], 3 if self.training else 1
        used = sum(each.nbytes for each in self.parameters)
        flops = 2.0 * tokens * _FEATURES**2 * passes
        least = 2.0 * tokens * passes * sum(each.numel() for each in self.parameters)
        if len(self.given) > 1:
            flops = least = 2.0 * tokens * passes * sum(each[0].numel() for each in self.parameters)
        layer = Layer(self.structure.written, self.parameters).double()
        given = [each.double() if each.is_floating_point() else each for each in self.given]
        return stepped(layer, layer, given, self.training), Work(flops, least, used, 2 * self.given[0].nbytes)

    def error(self, result: Tensor, expected: Tensor) -> float:
        return largest_error(result, expected)


def stepped(layer: Layer, call: Callable[..., Tensor], given: list[Tensor], training: bool) -> Tensor:
    """The result of a call or, in training, the gradient of the first parameter."""
    if not training:
        return call(*given)
    with torch.enable_grad():
        x = given[0].detach().requires_grad_()
        y = call(x, *given[1:])
    gradients: tuple[Tensor, ...] = torch.autograd.grad(y, [*layer.parameters(), x], torch.ones_like(y))
    return gradients[0]


def run(problem: Structured, written: Written | None, compiled: Callable[[Layer], Callable[..., Tensor]]) -> Prepared:
    if written is None:
        raise Unsupported("it is written with factors")
    layer = Layer(written, problem.parameters)
    call = compiled(layer)
    return Prepared(partial(stepped, layer, call, problem.given, problem.training))


def whole(problem: Structured) -> Prepared:
    if problem.training or len(problem.given) > 1:
        raise Unsupported("there is no matrix that stays")
    layer, (x,) = Layer(problem.structure.written, problem.parameters), problem.given
    matrix = layer(torch.eye(x.shape[1])).T.contiguous()
    return Prepared(lambda: F.linear(x, matrix))


def ours(problem: Structured) -> Prepared:
    from gossamer.backend.report.report import collect

    made = run(problem, problem.structure.written, partial(torch.compile, backend="sparse", fullgraph=True))
    with collect() as collected:
        made.call()
    taken = [each for each in collected.decisions if each.sparse or each.format == "factors"]
    notes = {"sparse": len(taken), "schedules": sorted({str(each.schedule) for each in taken})}
    return Prepared(made.call, lambda: notes)


@dataclass(frozen=True, eq=False)
class Chain:
    """An einsum of a pruned, a pruned and a dense matrix; all of them f32."""

    operands: list[Tensor]
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"f32": 2e-5})
    precision: str = "f32"

    def reference(self) -> tuple[Tensor, Work]:
        a, b, c = (each.double() for each in self.operands)
        flops, stored = 2.0 * c.shape[1], 2 * self.operands[0].nbytes
        return a @ (b @ c), Work(2 * flops * a.numel(), flops * int((a != 0).sum() + (b != 0).sum()), stored, 2 * c.nbytes)

    def error(self, result: Tensor, expected: Tensor) -> float:
        return largest_error(result, expected)


def einsum(compiled: Callable[[Written], Written], problem: Chain) -> Prepared:
    return Prepared(partial(compiled(torch.einsum), _EQUATION, *problem.operands))


def einsum_by_hand(problem: Chain) -> Prepared:
    a, b, c = problem.operands[0].to_sparse_csr(), problem.operands[1].to_sparse_csr(), problem.operands[2]
    return Prepared(lambda: a @ (b @ c))


def our_einsum(problem: Chain) -> Prepared:
    a, b = map(gossamer.SparseTensor.from_dense, problem.operands[:2])
    return Prepared(partial(gossamer.einsum, _EQUATION, a, b, problem.operands[2]))


def as_it_is(layer: Any) -> Any:
    return layer


def prepared(name: str, problem: Structured | Chain) -> Prepared:
    """Who runs what."""
    if isinstance(problem, Chain):
        chains: dict[str, Callable[[Chain], Prepared]] = {
            "eager": partial(einsum, as_it_is), "inductor": partial(einsum, torch.compile), "by-hand": einsum_by_hand,
            "sparse": our_einsum,
        }  # fmt: skip
        if name not in chains:
            raise Unsupported("there is no matrix that stays")
        return chains[name](problem)
    written = problem.structure.written
    match name:
        case "eager":
            return run(problem, written, as_it_is)
        case "inductor":
            return run(problem, written, torch.compile)
        case "by-hand":
            return run(problem, problem.structure.by_hand, torch.compile)
        case "whole":
            return whole(problem)
        case _:
            return ours(problem)


def build(structure: str, tokens: int, training: bool) -> Structured:
    random = torch.Generator().manual_seed(0)
    found = STRUCTURES[structure]
    parameters = [torch.randn(shape, generator=random) / shape[-1] ** 0.5 for shape in found.shapes]
    given = [torch.randn(tokens, _FEATURES, generator=random)]
    if structure == "adapters":
        given.append(torch.randint(_ADAPTERS, (max(tokens // _LENGTH, 1),), generator=random))
    return Structured(found, parameters, given, training)


def build_chain(columns: int) -> Chain:
    random = torch.Generator().manual_seed(0)
    pruned = [torch.randn(_ROWS, _ROWS, generator=random) for _ in range(2)]
    for each in pruned:
        each.mul_(torch.rand(each.shape, generator=random) < _DENSITY)
    return Chain([*pruned, torch.randn(_ROWS, columns, generator=random)])


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--structures", some_of(*STRUCTURES, "einsum"), ",".join((*STRUCTURES, "einsum")), "which")
    add_list(parser, "--tokens", sizes, "64,512", "rows of the input, or columns of the last operand of an einsum")
    add_list(parser, "--steps", some_of("forward", "training"), "forward,training", "what is computed")


def cases(args: Namespace) -> list[Case]:
    found = []
    for structure in args.structures:
        for step in args.steps:
            for tokens in args.tokens:
                coordinates = {"structure": structure, "tokens": tokens, "step": step}
                gflop = 2e-9 * tokens * _FEATURES**2
                if structure != "einsum":
                    make: Any = partial(build, structure, tokens, step == "training")
                    found.append(Case(f"{structure}, {tokens} tokens, {step}", coordinates, make, gflop))
                elif step == "forward":
                    name = f"einsum, {_DENSITY:.0%} twice, {tokens} columns"
                    found.append(Case(name, coordinates, partial(build_chain, tokens), 2e-9 * _ROWS**3))
    return found


def contenders() -> dict[str, Contender]:
    labels = {
        "eager": "PyTorch eager", "inductor": "Inductor", "whole": "PyTorch, matrix made before",
        "by-hand": "Inductor, by hand", "sparse": "Gossamer",
    }  # fmt: skip
    return {
        name: Contender(label, partial(prepared, name), missing=missing if name == "sparse" else lambda: None)
        for name, label in labels.items()
    }


WORKLOAD = Workload(
    "products with structured matrices, many adapters, and einsums of sparse operands",
    add_arguments,
    cases,
    contenders=contenders,
    baselines=("eager", "inductor"),
    preparing=2,
    gflops=50.0,
)
