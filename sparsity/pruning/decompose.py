"""`gossamer.decompose` splits the weights of a model's linear layers into a sparse and a low-rank matrix each."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.dialects.errors import OptionError
from gossamer.dialects.option_check import check_least, check_positive, check_share
from gossamer.sparsity.pruning.batches import calls_of
from gossamer.sparsity.pruning.calibrate import Walk
from gossamer.sparsity.pruning.choose_layers import Layers, weight_holders
from gossamer.sparsity.pruning.layer_problem import LayerProblem
from gossamer.sparsity.pruning.layers import Layer, layers_of
from gossamer.sparsity.pruning.patterns import Pattern, pattern_of
from gossamer.sparsity.pruning.predicted_speed import microseconds
from gossamer.sparsity.pruning.report import PrunedLayer, PruningReport
from gossamer.sparsity.pruning.sparse_low_rank import Budget, Parts, parametrize_by_parts, split
from gossamer.sparsity.torch_functions.check_model import check_model
from gossamer.sparsity.torch_functions.open_attention import is_open
from gossamer.sparsity.torch_functions.plain_model import called_openly, evaluating, plain_model


def decompose(
    model: nn.Module,
    data: Iterable[Any] | None = None,
    density: float = 0.2,
    *,
    rank_share: float = 0.25,
    pattern: str = "unstructured",
    steps: int = 20,
    only: Layers | None = None,
    skip: Layers = (),
    tokens: int = 128,
    damping: float = 0.01,
) -> PruningReport:
    """Replaces each weight W of a model's linear layers by S + U V in place: S is sparse, U V has a low rank.

    density     how many numbers S, U and V have together, as a share of the elements of W
    rank_share  the share of these numbers in U and V: 0 is pruning alone, 1 is a low rank alone
    data        batches as for `prune`. With them, errors are weighted by the size of the inputs, and biases are corrected. Each
                layer is split for the outputs of the layers before it
    pattern     the pattern of S, as for `prune`. It must not have a fixed density, as 2:4 has
    steps       the number of steps of the alternating projection
    only, skip  which linear layers, as for `sparsify`
    tokens      the number of tokens for which the report predicts the speed of S alone
    damping     as for `prune`

    The parts become parameters, `parametrizations.weight.original0` to `original2` with the mask of S in `0.mask`, and train
    on. A state dict can be loaded into a model that was decomposed with the same density, rank_share and layers.
    `torch.compile(model, backend="sparse")` computes x S + (x U) V as one kernel. Returns a report like that of `prune`; its
    shares of nonzeros count all three parts. OptionError for bad arguments, before anything changes.
    Source: OATS (Zhang and Papyan, 2025).
    """
    rule = pattern_of(pattern)
    check_share("density", density)
    check_least("rank_share", rank_share, 0)
    if rank_share > 1:
        raise OptionError(f"rank_share is {rank_share!r}, must be at most 1")
    check_least("steps", steps, 1, integer=True)
    check_least("tokens", tokens, 1, integer=True)
    check_positive("damping", damping)
    if rule.density is not None:
        raise OptionError(f"pattern '{pattern}' has a density of its own, and what U V leaves is less: take another pattern")
    check_model(model)
    budget = Budget(density, rank_share)
    with evaluating(plain := plain_model(model)), called_openly(plain):
        layers = layers_of(plain, only, skip)
        for layer in layers:
            _check(layer)
        work = _Work(budget, rule, steps, tokens)
        if data is None:
            for layer in layers:
                work.split(layer)
        else:
            Walk(plain, layers, calls_of(plain, data), damping=damping).run(work.visit)
    for layer, parts in work.parts.items():
        parametrize_by_parts(layer.module, parts, budget, rule)
    done = {layer.module for layer in work.parts}
    others = [each for each in weight_holders(plain) if each not in done and not is_open(each)]
    return PruningReport(tokens, work.lines, dict(Counter(type(each).__name__ for each in others)))


class _Work:
    """Splits layer after layer, and remembers the parts and the lines of the report."""

    def __init__(self, budget: Budget, pattern: Pattern, steps: int, tokens: int) -> None:
        self.budget, self.pattern, self.steps, self.tokens = budget, pattern, steps, tokens
        self.parts: dict[Layer, Parts] = {}
        self.lines: list[PrunedLayer] = []

    def visit(self, layer: Layer, problem: LayerProblem) -> Tensor:
        """Splits a layer's weight for its inputs. Returns the sum of the parts."""
        parts = split(problem.target, self.budget, self.pattern, problem.curvature.scale, self.steps)
        self._note(layer, parts, problem.error(parts.whole))
        return parts.whole.to(layer.weight.dtype)

    def split(self, layer: Layer) -> None:
        """Splits a layer's weight without inputs. Its error is that of the weight itself."""
        weight = layer.weight.float()
        parts = split(weight, self.budget, self.pattern, None, self.steps)
        size = float(weight.square().sum())
        lost = float((parts.whole - weight).square().sum())
        self._note(layer, parts, lost / size if size else lost)

    def _note(self, layer: Layer, parts: Parts, error: float) -> None:
        self.parts[layer] = parts
        nonzeros = int(torch.count_nonzero(parts.sparse))
        numbers = nonzeros + parts.first.numel() + parts.second.numel()
        size = parts.sparse.numel()
        times = microseconds(layer, self.pattern, nonzeros / size, self.tokens)
        self.lines.append(PrunedLayer(layer.name, tuple(parts.sparse.shape), numbers / size, error, *times))


def _check(layer: Layer) -> None:
    """OptionError for layers whose weight cannot be a sum."""
    if not isinstance(layer.module, nn.Linear) or layer.weight_name != "weight":
        raise OptionError(f"'{layer.name}' is a {type(layer.module).__name__}: linear layers can be decomposed; `skip` it")
    if not bool(layer.weight.isfinite().all()):
        raise OptionError(f"the weight of '{layer.name}' has a NaN or an infinity: repair it, or `skip` the layer")
