"""A step of training: forward, backward and fused AdamW, of models whose Linears are pruned.

mlp    1024 -> 4096 -> 1024 with gelu, for a batch of 128
gpt    4 layers of 384 with causal attention, for 16 texts of 64 tokens

What is checked is the first step's gradients of the weights that are kept, which are the same under masks and without them.
"""

from __future__ import annotations

import copy
from argparse import Namespace, _ActionsContainer
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.arguments import add_list, shares, some_of
from benchmarks.contenders.sparse import grouped, missing
from benchmarks.models import largest_error
from benchmarks.pruning import prune_linears
from benchmarks.registry import Case, Contender, Prepared, Work, Workload
from benchmarks.workloads.transformer import GptLayer

_WIDTH = 384


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)), torch.randn(128, 1024)


def gpt() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(GptLayer(_WIDTH, 6) for _ in range(4)), nn.LayerNorm(_WIDTH)), torch.randn(16, 64, _WIDTH)


MODELS = {"mlp": mlp, "gpt": gpt}


@dataclass(frozen=True, eq=False)
class Training:
    """A model with zeros in the weights of its Linears, and what it learns."""

    model: nn.Module
    x: Tensor
    target: Tensor
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"f32": 1e-4})
    precision: str = "f32"

    def reference(self) -> tuple[Tensor, Work]:
        """The gradients in float64; three products a Linear."""
        model = copy.deepcopy(self.model).double()
        with torch.enable_grad():
            F.mse_loss(model(self.x.double()), self.target.double()).backward()
        weights = [layer.weight for layer in linears(self.model)]
        rows = self.x.numel() // self.x.shape[-1]
        flops = 6.0 * rows * sum(weight.numel() for weight in weights)
        kept = 6.0 * rows * sum(int(weight.count_nonzero()) for weight in weights)
        return gradients(model), Work(flops, kept, sum(weight.nbytes for weight in weights), 2 * self.x.nbytes)

    def error(self, result: Tensor, expected: Tensor) -> float:
        return largest_error(result, expected)


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def gradients(model: nn.Module) -> Tensor:
    """Those of the weights that are not zero."""
    found = []
    for layer in linears(model):
        (weight,) = (p for name, p in layer.named_parameters() if "bias" not in name)  # maybe that of a parametrization
        gradient: Any = weight.grad
        # A SparseTensor has its own.
        found.append(gradient[layer.weight != 0] if type(gradient) is Tensor else gradient.values())
    return torch.cat([each.detach().clone() for each in found])


def steps(
    problem: Training,
    model: nn.Module,
    call: Callable[[Tensor], Tensor],
    gradients: Callable[[nn.Module], Tensor] = gradients,
) -> Prepared:
    """Takes a step of training at each call, and gives the gradients of the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def backward() -> None:
        with torch.enable_grad():
            F.mse_loss(call(problem.x), problem.target).backward()

    backward()
    first = gradients(model)

    def step() -> Tensor:
        optimizer.zero_grad()
        backward()
        optimizer.step()
        return first

    return Prepared(step)


class Masked(nn.Module):
    """A parametrization that keeps what is not zero."""

    mask: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", (weight != 0).to(weight.dtype))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def under_masks(problem: Training) -> nn.Module:
    model = copy.deepcopy(problem.model)
    for layer in linears(model):
        parametrize.register_parametrization(layer, "weight", Masked(layer.weight.detach()))
    return model


def dense(problem: Training) -> Prepared:
    model = copy.deepcopy(problem.model)
    return steps(problem, model, model, partial(_where_kept, problem))


def inductor(problem: Training) -> Prepared:
    model = copy.deepcopy(problem.model)
    return steps(problem, model, torch.compile(model), partial(_where_kept, problem))


def _where_kept(problem: Training, model: nn.Module) -> Tensor:
    pairs = zip(linears(model), linears(problem.model), strict=True)
    return torch.cat([layer.weight.grad[given.weight != 0] for layer, given in pairs])  # type: ignore[index]


def masked(compiled: bool, problem: Training) -> Prepared:
    model = under_masks(problem)
    return steps(problem, model, torch.compile(model) if compiled else model)


class _Product(torch.autograd.Function):
    """x Wᵀ of a CSR matrix, whose transpose lies beside it, as by `order` of its values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, layer: CsrLinear) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.layer = layer
        return (layer.matrix(values) @ x.t()).t()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (x, values), layer = ctx.saved_tensors, ctx.layer
        rows = gradient[0].t().contiguous()
        back = (layer.transpose(values) @ rows).t() if ctx.needs_input_grad[0] else None
        pattern = layer.matrix(torch.zeros_like(values))
        return back, torch.sparse.sampled_addmm(pattern, rows, x, beta=0).values(), None


class CsrLinear(nn.Module):
    """A Linear by torch.sparse as one writes it by hand: the values are the parameter."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        csr = linear.weight.detach().to_sparse_csr()
        numbers = torch.arange(1, csr.values().numel() + 1, dtype=torch.float64)
        numbered = torch.sparse_csr_tensor(csr.crow_indices(), csr.col_indices(), numbers, csr.shape)
        turned = numbered.to_dense().t().to_sparse_csr()
        self.order = turned.values().long() - 1
        self.rows = csr.crow_indices().int(), csr.col_indices().int(), tuple(csr.shape)
        self.columns = turned.crow_indices().int(), turned.col_indices().int(), tuple(turned.shape)
        self.values, self.bias = nn.Parameter(csr.values().clone()), nn.Parameter(linear.bias.detach().clone())

    def matrix(self, values: Tensor) -> Tensor:
        crow, col, shape = self.rows
        return torch.sparse_csr_tensor(crow, col, values, shape)

    def transpose(self, values: Tensor) -> Tensor:
        crow, col, shape = self.columns
        return torch.sparse_csr_tensor(crow, col, values[self.order], shape)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), self.values, self)
        return y.reshape(*x.shape[:-1], -1) + self.bias


def csr(problem: Training) -> Prepared:
    model = copy.deepcopy(problem.model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, CsrLinear(child))

    def gradients(model: nn.Module) -> Tensor:
        found = [module.values.grad for module in model.modules() if isinstance(module, CsrLinear)]
        return torch.cat([each.clone() for each in found if each is not None])

    return steps(problem, model, model, gradients)


def ours(stored: bool, problem: Training) -> Prepared:
    import gossamer
    from gossamer.backend.report.report import collect

    model = under_masks(problem) if not stored else gossamer.store_sparse(copy.deepcopy(problem.model))
    compiled = torch.compile(model, backend="sparse", fullgraph=True)
    with collect() as collected:
        prepared = steps(problem, model, compiled)
    decisions = list(collected.decisions)
    return Prepared(prepared.call, lambda: {"layers": grouped(decisions), "sparse": sum(d.sparse for d in decisions)})


def build(name: str, sparsity: float) -> Training:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    prune_linears(model, "unstructured", sparsity)
    return Training(model, x, torch.randn_like(x))


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--models", some_of(*MODELS), ",".join(MODELS), "of which")
    add_list(parser, "--sparsity", shares, ".8,.9,.95", "shares of zeros")


def cases(args: Namespace) -> list[Case]:
    return [
        Case(f"{name} {sparsity:.0%}", {"model": name, "sparsity": sparsity}, partial(build, name, sparsity), 7.0)
        for name in args.models
        for sparsity in args.sparsity
    ]


def contenders() -> Mapping[str, Contender]:
    return {
        "dense": Contender("PyTorch eager, no masks", dense),
        "inductor": Contender("Inductor, no masks", inductor),
        "masked": Contender("PyTorch eager, masks", partial(masked, False)),
        "masked-inductor": Contender("Inductor, masks", partial(masked, True)),
        "csr": Contender("torch.sparse CSR", csr),
        "sparse": Contender("Gossamer, stored", partial(ours, True), missing=missing),
        "sparse-masked": Contender("Gossamer, masks", partial(ours, False), missing=missing),
    }


WORKLOAD = Workload(
    "a step of training with pruned weights",
    add_arguments,
    cases,
    contenders=contenders,
    baselines=("dense", "inductor"),
    panels=("model",),
    across="sparsity",
    preparing=20.0,
)
