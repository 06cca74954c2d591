"""`gossamer.prune`: a dense model becomes a sparse one, calibrated on data, without training."""

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gossamer.dialects.errors import OptionError
from gossamer.dialects.option_check import check_least, check_name, check_positive, check_share
from gossamer.sparsity.calls.check_model import check_model
from gossamer.sparsity.calls.open_attention import is_open
from gossamer.sparsity.calls.plain_model import called_openly, evaluating, plain_model
from gossamer.sparsity.pruning.batches import Call, calls_of
from gossamer.sparsity.pruning.budgets import DENSITIES, Sensitivity, allocate, scaled_to
from gossamer.sparsity.pruning.calibrate import Walk
from gossamer.sparsity.pruning.choose_layers import Layers, weight_holders
from gossamer.sparsity.pruning.layer_problem import LayerProblem
from gossamer.sparsity.pruning.layers import Layer, layers_of
from gossamer.sparsity.pruning.methods import method_of
from gossamer.sparsity.pruning.patterns import Pattern, pattern_of
from gossamer.sparsity.pruning.predicted_speed import microseconds
from gossamer.sparsity.pruning.progress_file import Done, ProgressFile
from gossamer.sparsity.pruning.report import PrunedLayer, PruningReport


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
    """Set weights of a model's linear layers to 0, and the others so that the model computes nearly what it did; in place.

    No labels and no training: `data`, batches as the model takes them (dictionaries of Hugging Face with their attention
    mask, tuples, tensors), show what the layers are given; a few hundred samples of what the model is for are enough.
    Layers are pruned one after another, each for the inputs that the pruned layers before it give, toward what the dense layer
    computed; biases are corrected. Where the model is a chain of blocks, one block at a time is calibrated, and only its inputs
    are kept.

    What is wanted, one of
      sparsity  the share of zeros in all pruned weights together; implied by the patterns N:M and V:N:M
      latency   microseconds that the pruned layers together may take for `tokens` tokens, as the cost model predicts
      loss      the largest predicted relative squared change of the model's output
    and how
      pattern     "unstructured", "rows" (equally many in each), "2:4", "32x1" (blocks), "64:2:8" (V:N:M)
      method      "best" (of SparseGPT and ADMM, by error), "admm", "sparsegpt", "wanda", "magnitude"
      budget      "uniform": all layers equally sparse; "sensitivity": those more dense whose error the output shows more.
                  `latency` and `loss` imply it
      only, skip  which layers, as for `sparsify`; `only=nn.Conv2d` takes convolutions (Conv1d and Conv3d,
                  too, of any groups and padding)
      damping     added to the diagonal of each Hessian, as a share of its mean
      sequential  False calibrates on the dense model's activations instead
      resume      a folder that keeps what is done: the same call with the same folder goes on where it was broken off, with
                  the model as it was before or as it was left

    Returns a report that can be printed. `torch.compile(model, backend="sparse")` finds the zeros. Layers that the data do not
    reach stay dense, which the report says, as it counts what else of the model has weights. The projections of
    nn.MultiheadAttention are layers called `q_proj`, `k_proj`, `v_proj` (parts of its `in_proj_weight`) and `out_proj`.
    OptionError for what makes no sense, before anything is changed; for data that make NaN or infinity within the model, when
    the blocks before that are pruned.
    Sources: SparseGPT (2023), Wanda (2023), ALPS (2024); see the files of this folder.
    """
    wanted, solve = pattern_of(pattern), method_of(method)
    share = _share(wanted, pattern, sparsity, latency, loss)
    check_name("budget", budget, ("uniform", "sensitivity"))
    check_least("damping", damping, 0)
    check_least("tokens", tokens, 1, integer=True)
    check_model(model)
    model = plain_model(model)
    with evaluating(model), called_openly(model):
        layers, calls = layers_of(model, only, skip), calls_of(model, data)
        for layer in layers:
            if isinstance(layer.module, nn.MultiheadAttention):
                raise OptionError(
                    f"'{layer.name}' is of attention with a `forward` of its own, which reads it itself: `skip` it"
                )
            if not bool(layer.weight.isfinite().all()):
                raise OptionError(f"the weight of '{layer.name}' has a NaN or an infinity: repair it, or `skip` the layer")
        settings = {
            "layers": [(layer.name, *layer.weight.shape) for layer in layers], "batches": len(calls), "pattern": pattern,
            "sparsity": sparsity, "latency": latency, "loss": loss, "method": method, "budget": budget, "damping": damping,
            "sequential": sequential,
        }  # fmt: skip
        kept = ProgressFile(resume, settings) if resume is not None else None
        if kept is not None:
            kept.start_again(layers)
        report, console = PruningReport(tokens), Console(stderr=True)
        walk = Walk(model, layers, calls, damping=damping, sequential=sequential)
        densities = dict.fromkeys(layers, share)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            if wanted.density is None and (budget == "sensitivity" or latency is not None or loss is not None):
                task = bar.add_task("layers measured", total=len(layers))
                measured = lambda: bar.advance(task)
                densities = _budget(model, layers, calls, wanted, share, damping, latency, loss, tokens, measured)
            task = bar.add_task("layers pruned", total=len(layers))

            def visit(layer: Layer, problem: LayerProblem) -> Tensor | None:
                density = densities[layer]
                found = problem.weight if density >= 1 else solve(problem, wanted, density)
                found = found.to(layer.weight.dtype).reshape(layer.weight.shape)
                line = _line(layer, found, problem.error(found.to(problem.weight)), wanted, tokens)
                report.layers.append(line)
                if kept is not None:
                    bias = layer.bias
                    after, before = problem.bias(found.to(problem.weight), bias), None if bias is None else bias.clone()
                    kept.add(layer.name, Done(found, after, vars(line), layer.weight.clone(), before))
                bar.advance(task)
                return found

            walk.run(visit, kept.write if kept is not None else lambda: None, kept.done if kept is not None else {})
        done = {line.name for line in report.layers}
        if kept is not None:
            before = [PrunedLayer(**kept.done[layer.name].line) for layer in layers if layer.name in kept.done.keys() - done]
            report.layers[:0] = before
        pruned = {layer.module for layer in layers}
        others = [each for each in weight_holders(model) if each not in pruned and not is_open(each)]
        report.left = dict(Counter(type(each).__name__ for each in others))
        report.layers += _left_dense(layers, {line.name for line in report.layers}, wanted, tokens)
    return report


def _share(pattern: Pattern, name: str, sparsity: float | None, latency: float | None, loss: float | None) -> float:
    """The density of the whole, or where to look from."""
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
    model: nn.Module, layers: list[Layer], calls: list[Call], pattern: Pattern, share: float, damping: float,
    latency: float | None, loss: float | None, tokens: int, advance: Any,
) -> dict[Layer, float]:  # fmt: skip
    """Densities by sensitivity; layers that the data do not reach are not in it."""
    measured = Sensitivity(model, calls[0], pattern, share)

    def visit(layer: Layer, problem: LayerProblem) -> None:
        measured.visit(layer, problem)
        advance()

    Walk(model, layers, calls[: max(1, len(calls) // 4)], damping=damping).run(visit)
    reached = list(measured.loss)
    losses = [measured.loss[layer] for layer in reached]
    if latency is not None:
        costs = [[microseconds(layer, pattern, d, tokens)[1] for d in DENSITIES] for layer in reached]
        choice = allocate(losses, costs, cost=latency)
    else:
        costs = [[d * layer.weight.numel() for d in DENSITIES] for layer in reached]
        all_of_it = sum(layer.weight.numel() for layer in reached)
        choice = allocate(losses, costs, loss=loss) if loss is not None else allocate(losses, costs, cost=share * all_of_it)
    densities = {layer: DENSITIES[i] for layer, i in zip(reached, choice, strict=True)}
    if latency is None and loss is None:
        densities = scaled_to(densities, share)
    return {layer: densities.get(layer, 1.0) for layer in layers}


def _left_dense(layers: list[Layer], done: set[str], pattern: Pattern, tokens: int) -> list[PrunedLayer]:
    lines = []
    for layer in (each for each in layers if each.name not in done):
        dense_us, _ = microseconds(layer, pattern, 1, tokens)
        held = isinstance(layer.module, NonDynamicallyQuantizableLinear)
        note = f"left dense, {'its attention reads the weight itself' if held else 'the data do not reach it'}"
        lines.append(PrunedLayer(layer.name, tuple(layer.weight.shape), 1, 0, dense_us, dense_us, note))
    return lines


def _line(layer: Layer, weight: Tensor, error: float, pattern: Pattern, tokens: int) -> PrunedLayer:
    density = float(torch.count_nonzero(weight)) / weight.numel()
    return PrunedLayer(layer.name, tuple(weight.shape), density, error, *microseconds(layer, pattern, density, tokens))
