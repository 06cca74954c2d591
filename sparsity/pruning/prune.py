"""`gossamer.prune` makes a dense model sparse, with calibration data and without training.

It walks through the layers (calibrate.py), prunes each by a method (methods.py), and reports the errors (report.py).
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gossamer.dialects.errors import OptionError
from gossamer.dialects.option_check import check_least, check_name, check_positive, check_share
from gossamer.sparsity.pruning.batches import Call, calls_of
from gossamer.sparsity.pruning.budgets import DENSITIES, Sensitivity, allocate, scaled_to
from gossamer.sparsity.pruning.calibrate import Walk
from gossamer.sparsity.pruning.choose_layers import Layers, weight_holders
from gossamer.sparsity.pruning.layer_problem import LayerProblem
from gossamer.sparsity.pruning.layers import Layer, layers_of
from gossamer.sparsity.pruning.methods import Method, method_of
from gossamer.sparsity.pruning.patterns import Pattern, pattern_of
from gossamer.sparsity.pruning.predicted_speed import microseconds
from gossamer.sparsity.pruning.progress_file import Done, ProgressFile
from gossamer.sparsity.pruning.report import PrunedLayer, PruningReport
from gossamer.sparsity.torch_functions.check_model import check_model
from gossamer.sparsity.torch_functions.open_attention import is_open
from gossamer.sparsity.torch_functions.open_experts import are_open
from gossamer.sparsity.torch_functions.plain_model import called_openly, evaluating, plain_model


def prune(
    model: nn.Module,
    data: Iterable[Any],
    sparsity: float | None = None,
    *,
    latency: float | None = None,
    loss: float | None = None,
    pattern: str = "unstructured",
    method: str = "best",
    budget: str = "uniform",
    only: Layers | None = None,
    skip: Layers = (),
    tokens: int = 128,
    damping: float = 0.01,
    sequential: bool = True,
    resume: str | os.PathLike[str] | None = None,
) -> PruningReport:
    """Sets weights of a model's linear layers to zero in place, and adapts the others so that the outputs change least.

    It needs no labels and no training. It prunes layer by layer: each layer gets its inputs from the pruned layers before it,
    and aims at the output of the dense layer. It corrects biases, except those under masks and other parametrizations. If the
    model is a chain of blocks, it keeps only the inputs of one block at a time in memory.

    data      batches for the model: tensors, tuples, or dictionaries of Hugging Face with their attention mask. A few hundred
              samples of the model's task are enough

    Give one of these:
    sparsity  the share of zeros in all pruned weights together; not needed for the patterns N:M and V:N:M
    latency   microseconds that the pruned layers may take together for `tokens` tokens, by the cost model's prediction
    loss      the largest predicted relative squared change of the model's output

    And choose how:
    pattern     "unstructured", "rows" (equally many in each row), "2:4", "32x1" (blocks), "64:2:8" (V:N:M)
    method      "best" (SparseGPT or ADMM, whichever has the smaller error), "admm", "sparsegpt", "wanda", "magnitude"
    budget      "uniform": all layers are equally sparse. "sensitivity": layers whose error shows more in the output stay
                denser; `latency` and `loss` imply it
    only, skip  which layers, as for `sparsify`. `only=nn.Conv2d` takes convolutions, also Conv1d and Conv3d, with any groups
                and padding
    damping     a share of the mean of each Hessian's diagonal, which is added to the diagonal
    sequential  False uses the activations of the dense model instead
    resume      a folder that keeps finished work. Call again with the same folder to go on after an interruption. The model may
                be as before the first call, or as the interruption left it

    Returns a report that can be printed. It names the layers that the data do not reach, which stay dense, and counts the other
    parts of the model with weights. The projections of nn.MultiheadAttention are called `q_proj`, `k_proj`, `v_proj` (parts of
    its `in_proj_weight`) and `out_proj`. The products of each expert of transformers are layers, too, such as
    `experts.3.gate_up_proj`. An expert is calibrated with the tokens that are routed to it.

    OptionError for bad arguments, before anything changes. OptionError also if the data make NaN or infinity within the model;
    the blocks before that place are then pruned.
    Sources: SparseGPT (2023), Wanda (2023), ALPS (2024); see the files of this folder.
    """
    wanted, solve = pattern_of(pattern), method_of(method)
    goal = _Goal(wanted, _share(wanted, pattern, sparsity, latency, loss), latency, loss, tokens)
    check_name("budget", budget, ("uniform", "sensitivity"))
    check_least("damping", damping, 0)
    check_least("tokens", tokens, 1, integer=True)
    check_model(model)
    model = plain_model(model)
    console = Console(stderr=True)
    with evaluating(model), called_openly(model):
        layers, calls = layers_of(model, only, skip), calls_of(model, data)
        _check_layers(layers)
        settings = {
            "layers": [(layer.name, *layer.weight.shape) for layer in layers], "batches": len(calls), "pattern": pattern,
            "sparsity": sparsity, "latency": latency, "loss": loss, "method": method, "budget": budget, "damping": damping,
            "sequential": sequential,
        }  # fmt: skip
        kept = ProgressFile(resume, settings) if resume is not None else None
        if kept is not None:
            kept.start_again(layers)
        walk = Walk(model, layers, calls, damping=damping, sequential=sequential)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            densities = dict.fromkeys(layers, goal.share)
            if wanted.density is None and (budget == "sensitivity" or latency is not None or loss is not None):
                densities = _budget(model, layers, calls, goal, damping, _counting(bar, "measured", layers))
            visitor = _Visitor(goal, solve, densities, kept, _counting(bar, "pruned", layers))
            walk.run(visitor.visit, kept.write if kept is not None else lambda: None, kept.done if kept is not None else {})
        return _report(model, layers, visitor.lines, goal, kept)


@dataclass(frozen=True)
class _Goal:
    """The user's goal: a pattern, and a share of nonzeros, microseconds or a loss.

    share   the density to reach; with `latency` or `loss` the density at which layers are tried
    tokens  how many tokens a call has, for the predicted costs
    """

    pattern: Pattern
    share: float
    latency: float | None
    loss: float | None
    tokens: int

    def microseconds(self, layer: Layer, density: float) -> tuple[float, float]:
        """Returns the predicted microseconds of a call of a layer: dense, and at a density."""
        return microseconds(layer, self.pattern, density, self.tokens)


@dataclass
class _Visitor:
    """Prunes layer after layer. `lines` collects the lines of the report, and `kept` writes finished layers to disk."""

    goal: _Goal
    solve: Method
    densities: dict[Layer, float]
    kept: ProgressFile | None
    advance: Callable[[], None]
    lines: list[PrunedLayer] = field(default_factory=list)

    def visit(self, layer: Layer, problem: LayerProblem) -> Tensor | None:
        """Returns the new weight of a layer."""
        density = self.densities[layer]
        found = problem.weight if density >= 1 else self.solve(problem, self.goal.pattern, density)
        found = found.to(layer.weight.dtype).reshape(layer.weight.shape)
        wide = found.to(problem.weight)
        line = self._line(layer, found, problem.error(wide))
        self.lines.append(line)
        if self.kept is not None:
            before = None if layer.bias is None else layer.bias.clone()
            done = Done(found, problem.bias(wide, layer.bias), vars(line), layer.weight.clone(), before)
            self.kept.add(layer.name, done)
        self.advance()
        return found

    def _line(self, layer: Layer, weight: Tensor, error: float) -> PrunedLayer:
        density = float(torch.count_nonzero(weight)) / weight.numel()
        return PrunedLayer(layer.name, tuple(weight.shape), density, error, *self.goal.microseconds(layer, density))


def _check_layers(layers: Sequence[Layer]) -> None:
    """OptionError for layers that cannot be pruned."""
    for layer in layers:
        if isinstance(layer.module, nn.MultiheadAttention):
            raise OptionError(
                f"'{layer.name}' is of a subclass of nn.MultiheadAttention with its own `forward`, which cannot be pruned: "
                "`skip` it"
            )
        if not bool(layer.weight.isfinite().all()):
            raise OptionError(f"the weight of '{layer.name}' has a NaN or an infinity: repair it, or `skip` the layer")


def _counting(bar: Progress, what: str, layers: Sequence[Layer]) -> Callable[[], None]:
    """Adds a progress bar for the layers. Returns a function that moves it on by one layer."""
    task = bar.add_task(f"layers {what}", total=len(layers))
    return lambda: bar.advance(task)


def _report(
    model: nn.Module, layers: list[Layer], lines: list[PrunedLayer], goal: _Goal, kept: ProgressFile | None
) -> PruningReport:
    """Returns the report about all layers: those of an earlier run, those of this run, and those that the data do not reach."""
    done = {line.name for line in lines}
    if kept is not None:
        earlier = [kept.done[layer.name] for layer in layers if layer.name in kept.done.keys() - done]
        lines = [*(PrunedLayer(**each.line) for each in earlier), *lines]
    pruned = {layer.module for layer in layers}
    others = [each for each in weight_holders(model) if each not in pruned and not is_open(each) and not are_open(each)]
    lines = [*lines, *_left_dense(layers, {line.name for line in lines}, goal)]
    return PruningReport(goal.tokens, lines, dict(Counter(type(each).__name__ for each in others)))


def _share(pattern: Pattern, name: str, sparsity: float | None, latency: float | None, loss: float | None) -> float:
    """Returns the density of all layers together. With `latency` or `loss` it is the density at which layers are tried."""
    given = [each for each in (sparsity, latency, loss) if each is not None]
    if sparsity is not None:
        check_share("sparsity", sparsity)
    if pattern.density is not None:
        if latency is not None or loss is not None or (sparsity is not None and abs(1 - sparsity - pattern.density) > 1e-6):
            raise OptionError(f"pattern '{name}' has {1 - pattern.density:.0%} of zeros: leave out sparsity, latency and loss")
        return pattern.density
    if len(given) != 1:
        raise OptionError(
            "how sparse is the model to be? Give one of sparsity (0.8: 80 % of zeros), latency (microseconds) and loss, or a "
            f"pattern such as '2:4'; given are {', '.join(_named(sparsity, latency, loss)) or 'none'}"
        )
    if sparsity is None:
        check_positive("loss" if latency is None else "latency", given[0])
        return 0.3
    return 1 - sparsity


def _named(*values: float | None) -> list[str]:
    return [name for name, value in zip(("sparsity", "latency", "loss"), values, strict=True) if value is not None]


def _budget(
    model: nn.Module, layers: list[Layer], calls: list[Call], goal: _Goal, damping: float, advance: Callable[[], None]
) -> dict[Layer, float]:
    """Returns the density of each layer by its sensitivity. Layers that the data do not reach stay dense (1.0)."""
    measured = Sensitivity(model, calls[0], goal.pattern, goal.share)

    def visit(layer: Layer, problem: LayerProblem) -> None:
        measured.visit(layer, problem)
        advance()

    Walk(model, layers, calls[: max(1, len(calls) // 4)], damping=damping).run(visit)
    reached = list(measured.loss)
    losses = [measured.loss[layer] for layer in reached]
    if goal.latency is not None:
        costs = [[goal.microseconds(layer, density)[1] for density in DENSITIES] for layer in reached]
        choice = allocate(losses, costs, cost=goal.latency)
    else:
        costs = [[density * layer.weight.numel() for density in DENSITIES] for layer in reached]
        whole = goal.share * sum(layer.weight.numel() for layer in reached)
        choice = allocate(losses, costs, cost=whole) if goal.loss is None else allocate(losses, costs, loss=goal.loss)
    densities = {layer: DENSITIES[i] for layer, i in zip(reached, choice, strict=True)}
    if goal.latency is None and goal.loss is None:
        densities = scaled_to(densities, goal.share)
    return {layer: densities.get(layer, 1.0) for layer in layers}


def _left_dense(layers: list[Layer], done: set[str], goal: _Goal) -> Iterator[PrunedLayer]:
    for layer in (each for each in layers if each.name not in done):
        dense_us, _ = goal.microseconds(layer, 1)
        held = isinstance(layer.module, NonDynamicallyQuantizableLinear)
        note = f"left dense, {'its attention reads the weight itself' if held else 'the data do not reach it'}"
        yield PrunedLayer(layer.name, tuple(layer.weight.shape), 1, 0, dense_us, dense_us, note)
