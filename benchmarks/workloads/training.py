"""A step of training: forward, backward and AdamW, fused or as torch has it by default, of models whose Linears, or
convolutions, are pruned.

mlp         1024 -> 4096 -> 1024 with gelu, for a batch of 128
mlp-blocks  the same in bf16, pruned in blocks of 32 x 32
gpt         4 layers of 384 with causal attention, for 16 texts of 64 tokens
mobilenet1  and the other networks of `convnet`, for 4 images of 224 x 224: their pointwise and k x k convolutions are pruned

What is checked is the first step's gradients of the weights that are kept, which are the same under masks and without them.
"""

from __future__ import annotations

import copy
from argparse import Namespace, _ActionsContainer
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from benchmarks.arguments import add_list, shares, some_of
from benchmarks.contenders.sparse import chosen, missing
from benchmarks.models import largest_error
from benchmarks.pruning import prune_linears
from benchmarks.registry import Case, Contender, Prepared, Unsupported, Work, Workload
from benchmarks.workloads.convnet import GFLOP, PIXELS, classifier, prune_convolutions
from benchmarks.workloads.transformer import GptLayer

_WIDTH, _IMAGES = 384, 4
_LEAST_ZEROS = 0.1


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)), torch.randn(128, 1024)


def gpt() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(GptLayer(_WIDTH, 6) for _ in range(4)), nn.LayerNorm(_WIDTH)), torch.randn(16, 64, _WIDTH)


def convnet(name: str) -> tuple[nn.Module, Tensor]:
    """Without its dropout, which would give each contender other gradients."""
    model = classifier(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, torch.randn(_IMAGES, 3, PIXELS, PIXELS)


def mlp_blocks() -> tuple[nn.Module, Tensor]:
    model, x = mlp()
    return model.bfloat16(), x.bfloat16()


MODELS = {"mlp": mlp, "mlp-blocks": mlp_blocks, "gpt": gpt} | {name: partial(convnet, name) for name in GFLOP}


@dataclass(frozen=True, eq=False)
class Training:
    """A model with zeros in the weights of the layers of these names, what it learns, and a flag of AdamW."""

    model: nn.Module
    layers: tuple[str, ...]
    x: Tensor
    target: Tensor
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"f32": 1e-4})
    precision: str = "f32"
    fused: bool | None = True

    def reference(self) -> tuple[Tensor, Work]:
        """The gradients in float64; three products a layer."""
        model, rows = copy.deepcopy(self.model).double(), dict[nn.Module, int]()

        def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            rows[layer] = output.numel() // len(layer.weight)  # type: ignore[arg-type]

        for layer in pruned(model, self.layers):
            layer.register_forward_hook(count)
        with torch.enable_grad():
            F.mse_loss(model(self.x.double() if self.x.is_floating_point() else self.x), self.target.double()).backward()
        weights: list[tuple[int, Tensor]] = [(rows[layer], layer.weight) for layer in pruned(model, self.layers)]
        flops = sum(6.0 * many * weight.numel() for many, weight in weights)
        kept = sum(6.0 * many * int(weight.count_nonzero()) for many, weight in weights)
        bytes_ = self.x.itemsize * sum(weight.numel() for _, weight in weights)
        return gradients(model, self.layers), Work(flops, kept, bytes_, 2 * self.x.nbytes)

    def error(self, result: Tensor, expected: Tensor) -> float:
        return largest_error(result, expected)


def pruned(model: nn.Module, layers: Sequence[str]) -> list[Any]:
    return [model.get_submodule(name) for name in layers]


def gradients(model: nn.Module, layers: Sequence[str]) -> Tensor:
    """Those of the weights that are not zero."""
    found = []
    for layer in pruned(model, layers):
        (weight,) = (p for name, p in layer.named_parameters() if "bias" not in name)  # maybe that of a parametrization
        gradient: Any = weight.grad
        # A SparseTensor has its own.
        found.append(gradient[layer.weight != 0] if type(gradient) is Tensor else gradient.values())
    return torch.cat([each.detach().clone() for each in found])


def steps(
    problem: Training,
    model: nn.Module,
    call: Callable[[Tensor], Tensor],
    gradients: Callable[[nn.Module, Sequence[str]], Tensor] = gradients,
    attach: Callable[[torch.optim.Optimizer], object] = id,
) -> Prepared:
    """Takes a step of training at each call, and gives the gradients of the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=problem.fused)
    attach(optimizer)

    def backward() -> None:
        with torch.enable_grad():
            F.mse_loss(call(problem.x), problem.target).backward()

    backward()
    first = gradients(model, problem.layers)

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
    for layer in pruned(model, problem.layers):
        parametrize.register_parametrization(layer, "weight", Masked(layer.weight.detach()))
    return model


def dense(problem: Training) -> Prepared:
    model = copy.deepcopy(problem.model)
    return steps(problem, model, model, partial(_where_kept, problem))


def inductor(problem: Training) -> Prepared:
    model = copy.deepcopy(problem.model)
    return steps(problem, model, torch.compile(model), partial(_where_kept, problem))


def _where_kept(problem: Training, model: nn.Module, layers: Sequence[str]) -> Tensor:
    pairs = zip(pruned(model, layers), pruned(problem.model, layers), strict=True)
    return torch.cat([layer.weight.grad[given.weight != 0] for layer, given in pairs])


def masked(compiled: bool, problem: Training) -> Prepared:
    model = under_masks(problem)
    return steps(problem, model, torch.compile(model) if compiled else model)


def under_hooks(problem: Training) -> nn.Module:
    """A copy under the hooks of torch.nn.utils.prune."""
    model = copy.deepcopy(problem.model)
    for layer in pruned(model, problem.layers):
        prune.custom_from_mask(layer, "weight", layer.weight != 0)
    return model


def hooked(compiled: bool, problem: Training) -> Prepared:
    model = under_hooks(problem)
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


def only_linears(problem: Training) -> None:
    """Unsupported if convolutions are pruned."""
    if any(isinstance(layer, nn.Conv2d) for layer in pruned(problem.model, problem.layers)):
        raise Unsupported("Linears only")


def csr(problem: Training) -> Prepared:
    only_linears(problem)
    if problem.precision != "f32":
        raise Unsupported("f32 only")
    model = copy.deepcopy(problem.model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, CsrLinear(child))

    def gradients(model: nn.Module, layers: Sequence[str]) -> Tensor:
        found = [module.values.grad for module in model.modules() if isinstance(module, CsrLinear)]
        return torch.cat([each.clone() for each in found if each is not None])

    return steps(problem, model, model, gradients)


def ours(how: str, problem: Training) -> Prepared:
    """Stored weights, masks, hooks of torch.nn.utils.prune, or masks whose weights a recipe stores while it trains them."""
    import gossamer
    from gossamer.backend.report.report import collect

    attach: Callable[[torch.optim.Optimizer], object] = id
    if how not in ("masks", "hooks"):
        only_linears(problem)
    if how == "masks":
        model = under_masks(problem)
    elif how == "hooks":
        model = under_hooks(problem)
    elif how == "stored":
        model = gossamer.store_sparse(copy.deepcopy(problem.model))
    else:
        model = gossamer.sparsify(copy.deepcopy(problem.model), _kept, only=list(problem.layers))
        attach = lambda optimizer: gossamer.train_sparse(
            model, optimizer, "fixed", steps=1, only=list(problem.layers), store=True
        )
    compiled = torch.compile(model, backend="sparse", fullgraph=True)
    with collect() as collected:
        prepared = steps(problem, model, compiled, attach=attach)
        prepared.call()  # `train_sparse` stores weights at its first step
    decisions = list(collected.decisions)
    if not decisions:  # it runs the code that was compiled for another contender's model of these types and shapes
        return prepared
    return Prepared(prepared.call, lambda: chosen(decisions))


def _kept(weight: Tensor) -> Any:
    """A sparsifier: what is not zero."""
    from gossamer import SparseTensor

    return SparseTensor.from_dense(weight)


def build(name: str, sparsity: float, optimizer: str = "fused") -> Training:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    if name in GFLOP:
        prune_convolutions(model, sparsity)
    else:
        prune_linears(model, "32x32" if name == "mlp-blocks" else "unstructured", sparsity)
    layers = [
        path
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d) and (layer.weight == 0).double().mean() >= _LEAST_ZEROS
    ]
    tolerance = {"f32": 0.1 if name in GFLOP else 1e-4, "bf16": 0.05}
    precision, fused = "bf16" if name == "mlp-blocks" else "f32", True if optimizer == "fused" else None
    return Training(model, tuple(layers), x, torch.randn_like(model(x)), tolerance, precision, fused)


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--models", some_of(*MODELS), "mlp,gpt", "of which")
    add_list(parser, "--sparsity", shares, ".8,.9,.95", "shares of zeros")
    parser.add_argument("--optimizer", choices=("fused", "default"), default="fused", help="the flags of AdamW (default fused)")


def cases(args: Namespace) -> list[Case]:
    return [
        Case(
            f"{name} {sparsity:.0%}",
            {"model": name, "sparsity": sparsity} | ({} if args.optimizer == "fused" else {"optimizer": args.optimizer}),
            partial(build, name, sparsity, args.optimizer),
            3.0 * _IMAGES * GFLOP.get(name, 0.6),
        )
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
        "sparse": Contender("Gossamer, stored", partial(ours, "stored"), missing=missing),
        "sparse-trained": Contender("Gossamer, masks and train_sparse", partial(ours, "trained"), missing=missing),
        "sparse-masked": Contender("Gossamer, masks", partial(ours, "masks"), missing=missing),
        "sparse-pruned": Contender("Gossamer, hooks of torch.nn.utils.prune", partial(ours, "hooks"), missing=missing),
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
