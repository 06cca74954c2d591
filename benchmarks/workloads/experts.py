"""A layer of a mixture of experts: tokens choose some experts at random, whose weights come from memory.

`--zeros 0.9` prunes the weights of each expert at random. One more contender makes use of that, the others compute densely.
"""

from __future__ import annotations

import math
from argparse import Namespace, _ActionsContainer
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
from benchmarks.arguments import add_list, shares, sizes, some_of
from benchmarks.contenders.sparse import chosen, missing
from benchmarks.models import largest_error
from benchmarks.own_code import compiled as compiled_alone
from benchmarks.registry import Case, Contender, Prepared, Unsupported, Work, Workload
from benchmarks.roofline import seconds

Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of x, experts, scores, gate_up and down."""

LAYERS = {"olmoe": (64, 8, 1024, 512), "mixtral": (8, 2, 1024, 3584), "qwen3": (128, 8, 1024, 384)}
"""Experts, how many of them a token chooses, hidden elements of a token, and of an expert."""
_BATCHED_BYTES = 2 << 30


@dataclass(frozen=True, eq=False)
class Experts:
    """x [tokens, hidden], experts and scores [tokens, top], gate_up [experts, 2 size, hidden], down [experts, hidden, size].

    A `training` step gives the gradient of x, and computes that of scores and weights. `zeros` is the share of zero weights.
    """

    x: Tensor
    experts: Tensor
    scores: Tensor
    gate_up: Tensor
    down: Tensor
    training: bool
    zeros: float = 0.0
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"f32": 2e-5, "bf16": 3e-2, "int8": 3e-2})
    precision: str = "f32"

    def reference(self) -> tuple[Tensor, Work]:
        given = self.x.double(), self.experts, self.scores.double(), self.gate_up, self.down
        flops = 2.0 * self.experts.numel() * (self.gate_up[0].numel() + self.down[0].numel()) * (3 if self.training else 1)
        weights = self.experts.unique().numel() * (self.gate_up[0].nbytes + self.down[0].nbytes)
        return self._expected(*given), Work(flops, flops * (1 - self.zeros), weights, 2 * self.x.nbytes)

    def _expected(self, x: Tensor, *given: Tensor) -> Tensor:
        """The result or, of a step, the gradient of x."""
        if not self.training:
            return one_by_one(x, *given)
        with torch.enable_grad():
            y = one_by_one(x.requires_grad_(), *given).sum()
        return torch.autograd.grad(y, x)[0]

    def error(self, result: Tensor, expected: Tensor) -> float:
        return largest_error(result, expected)


def one_by_one(x: Tensor, experts: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """A loop over the experts that a token chose; weights are converted to the type of x one by one."""
    out = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        token, slot = torch.where(experts == expert)
        gate, up = F.linear(x[token], gate_up[expert].to(x.dtype)).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, down[expert].to(x.dtype))
        out = out.index_add(0, token, y * scores[token, slot, None].to(x.dtype))
    return out


def grouped(
    x: Tensor, experts: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor, product: Callable[..., Tensor] = F.grouped_mm
) -> Tensor:
    """Sorted tokens through grouped_mm, as transformers has it."""
    order = experts.flatten().argsort()
    ends = torch.histc(experts.flatten().float(), len(gate_up), 0, len(gate_up) - 1).cumsum(0, dtype=torch.int32)
    tokens = order // experts.shape[1]
    gate, up = product(x[tokens], gate_up.mT, offs=ends).chunk(2, -1)
    y = product(F.silu(gate) * up, down.mT, offs=ends) * scores.flatten()[order, None].to(x.dtype)
    return torch.zeros_like(y).index_copy(0, order, y).unflatten(0, (x.shape[0], -1)).sum(1)


def traced(x: Tensor, experts: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same for compilers: PyTorch traces grouped_mm of bfloat16 only, transformers has another for other types."""
    import transformers.integrations.moe  # noqa: F401

    return grouped(x, experts, scores, gate_up, down, torch.ops.transformers.grouped_mm_fallback)


def batched(x: Tensor, experts: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """A copy of the weights for each slot, through bmm, as transformers has it."""
    slots = experts.flatten()
    gate, up = torch.bmm(gate_up[slots], x.repeat_interleave(experts.shape[1], 0).unsqueeze(2)).squeeze(2).chunk(2, -1)
    y = torch.bmm(down[slots], (F.silu(gate) * up).unsqueeze(2)).squeeze(2) * scores.flatten()[:, None].to(x.dtype)
    return y.unflatten(0, (x.shape[0], -1)).sum(1)


def made(layer: Layer, problem: Experts) -> Prepared:
    """A call of a layer, or a training step."""
    given = problem.x, problem.experts, problem.scores, problem.gate_up, problem.down
    if not problem.training:
        return Prepared(lambda: layer(*given))
    if layer is one_by_one:
        raise Unsupported("autograd fills the gradient of all experts anew for each of them")
    leaves = [each.detach().requires_grad_() for each in (given[0], *given[2:])]

    def step() -> Tensor:
        with torch.enable_grad():
            y = layer(leaves[0], given[1], *leaves[1:])
        gradients: tuple[Tensor, ...] = torch.autograd.grad(y, leaves, torch.ones_like(y))
        return gradients[0]

    return Prepared(step)


def eager(layer: Layer, problem: Experts) -> Prepared:
    if layer is batched and problem.experts.numel() * problem.gate_up[0].nbytes > _BATCHED_BYTES:
        raise Unsupported(f"the copies of the weights would take more than {_BATCHED_BYTES >> 30} GiB")
    return made(layer, problem)


def compiled(layer: Layer, problem: Experts) -> Prepared:
    return eager(torch.compile(layer), problem)


def ours(precision: str, problem: Experts) -> Prepared:
    if precision == "int8":
        if problem.training:
            raise Unsupported("integers are not trained")
        (gate_up, first), (down, second) = map(_quantized, (problem.gate_up, problem.down))
        x = problem.x.bfloat16()
        call = partial(gossamer.routed_mlp, gate_up_scales=first, down_scales=second)
        return Prepared(lambda: call(x, problem.experts, problem.scores, gate_up, down))
    if precision == "bf16":
        problem = in_bf16(problem)

    def notes() -> dict[str, Any]:
        """What the weights that are hit take to be read, and what a dense product of as many multiplications takes."""
        rows, columns = problem.gate_up.shape[1:]
        hit = problem.experts.unique().numel() * (problem.gate_up[0].numel() + problem.down[0].numel())
        line = torch.ones(hit, dtype=problem.x.dtype).view(torch.float32)
        dense = (
            torch.randn(problem.experts.numel(), columns).to(problem.x),
            torch.randn(columns, rows + rows // 2).to(problem.x),
        )
        return {"read_ms": 1e3 * seconds(line.sum), "dense_ms": 1e3 * seconds(partial(torch.mm, *dense))}

    return Prepared(made(gossamer.routed_mlp, problem).call, notes)


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax(-1, keepdim=True) / 127
    return (weight / scales).round().to(torch.int8), scales


def in_bf16(problem: Experts) -> Experts:
    x, gate_up, down = (each.bfloat16() for each in (problem.x, problem.gate_up, problem.down))
    return Experts(x, problem.experts, problem.scores, gate_up, down, problem.training, problem.zeros)


class Pruned(nn.Module):
    """The layer of a model, whose weights are its own."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(gate_up, False), nn.Parameter(down, False)

    def forward(self, x: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
        return traced(x, experts, scores, self.gate_up, self.down)


def pruned(problem: Experts) -> Prepared:
    """The zeros left out, by the backend."""
    if not problem.zeros or problem.training:
        raise Unsupported("experts are sparse in inference only" if problem.training else "the weights have no zeros")
    from gossamer.backend.report.report import collect

    call = compiled_alone(Pruned(problem.gate_up, problem.down).eval(), backend="sparse", fullgraph=True)
    given = problem.x, problem.experts, problem.scores
    with collect() as collected, torch.no_grad():
        call(*given)
    return Prepared(partial(call, *given), partial(chosen, collected.decisions))


def narrow(layer: Layer, problem: Experts) -> Prepared:
    """The same in bf16."""
    return eager(layer, in_bf16(problem))


def build(layer: str, tokens: int, training: bool, zeros: float) -> Experts:
    count, top, hidden, size = LAYERS[layer]
    random = torch.Generator().manual_seed(0)
    x, gate_up, down, logits = (
        torch.randn(*shape, generator=random)
        for shape in ((tokens, hidden), (count, 2 * size, hidden), (count, hidden, size), (tokens, count))
    )
    if zeros:
        for each in (*gate_up, *down):
            each.mul_(torch.rand(each.shape, generator=random) >= zeros)
    scores, experts = logits.softmax(1).topk(top)
    return Experts(x, experts, scores, gate_up / math.sqrt(hidden), down / math.sqrt(size), training, zeros)


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--layers", some_of(*LAYERS), "olmoe", "which")
    add_list(parser, "--tokens", sizes, "1,2,4,8,64,512", "in a batch")
    add_list(parser, "--steps", some_of("forward", "training"), "forward,training", "what is computed")
    add_list(parser, "--zeros", shares, "0", "their share in the weights")


def cases(args: Namespace) -> list[Case]:
    return [
        Case(
            f"{layer} {tokens} {step}" + (f" {zeros:.0%} zeros" if zeros else ""),
            {"layer": layer, "tokens": tokens, "step": step, "zeros": zeros},
            partial(build, layer, tokens, step == "training", zeros),
            6e-9 * tokens * math.prod(LAYERS[layer][1:]) * (3 if step == "training" else 1),
        )
        for layer in args.layers
        for zeros in args.zeros
        for step in args.steps
        for tokens in args.tokens
        if step == "forward" or tokens >= 64
    ]


def conclude(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """How near two limits are: the time to read the weights, and the time of a dense product of as many multiplications."""
    lines = []
    for case in cases:
        for name, limit in (("sparse", "f32"), ("sparse-bf16", "bf16")):
            result = case["results"].get(name, {})
            notes, took = result.get("notes", {}), result.get("median_ms")
            if took and "read_ms" in notes and case["parameters"]["step"] == "forward":
                reading, dense = (f"{notes[limited] / took:.0%}" for limited in ("read_ms", "dense_ms"))
                lines.append(
                    f"- {case['name']}, {limit}: reading the weights alone would take {reading} of this time,"
                    f" and a dense product of as many multiplications {dense}."
                )
    return lines


def contenders() -> dict[str, Contender]:
    layers: dict[str, tuple[str, Layer]] = {
        "loop": ("loop over hit experts", one_by_one), "grouped": ("grouped_mm", grouped), "batched": ("batched bmm", batched),
    }  # fmt: skip
    found = {name: Contender(f"PyTorch, {label}", partial(eager, layer)) for name, (label, layer) in layers.items()}
    found |= {
        f"inductor-{name}": Contender(f"Inductor, {layers[name][0]}", partial(compiled, layer))
        for name, layer in (("grouped", traced), ("batched", batched))
    }
    found |= {
        f"{name}-bf16": Contender(f"PyTorch bf16, {layers[name][0]}", partial(narrow, layers[name][1]), "bf16")
        for name in ("loop", "grouped")
    }
    own = {"sparse": ("Gossamer", "f32"), "sparse-bf16": ("Gossamer bf16", "bf16"), "sparse-int8": ("Gossamer int8", "int8")}
    return (
        found
        | {
            name: Contender(label, partial(ours, precision), precision, missing=missing)
            for name, (label, precision) in own.items()
        }
        | {"sparse-pruned": Contender("Gossamer, pruned", pruned, missing=missing)}
    )


WORKLOAD = Workload(
    "a layer of a mixture of experts",
    add_arguments,
    cases,
    contenders=contenders,
    baselines=("grouped", "loop"),
    conclude=conclude,
    preparing=2,
    gflops=50.0,
)
