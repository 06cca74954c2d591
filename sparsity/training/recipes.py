"""The recipes of the literature for `gossamer.train_sparse`, by their names.

Each is a function of the number of training steps, which sets when masks change, and of the recipe's options.
"""

import inspect
from collections.abc import Callable
from typing import Any

from gossamer.dialects.errors import OptionError
from gossamer.dialects.option_check import check_least, check_name, did_you_mean
from gossamer.sparsity.training.recipe import Recipe, Sparsifier
from gossamer.sparsity.training.schedules import Cubic, Exchange, Fading, Schedule, Stepwise, once


def recipe_of(name: str, steps: int, **options: Any) -> Recipe:
    """Returns the recipe with a name. OptionError for an unknown name or option."""
    check_name("recipe", name, RECIPES)
    if name not in _ONCE or steps:
        _check_steps(name, steps)
    takes = list(inspect.signature(RECIPES[name]).parameters.values())[1:]
    known = [parameter.name for parameter in takes]
    for option in options:
        if option not in known:
            has = f"its options are {', '.join(known)}" if known else "it has none"
            raise OptionError(f"recipe '{name}' has no option '{option}'{did_you_mean(option, known)}: {has}")
    if missing := [each.name for each in takes if each.default is each.empty and each.name not in options]:
        raise OptionError(f"recipe '{name}' needs {', '.join(missing)}: give {missing[0]}=..., for instance 0.9")
    return RECIPES[name](steps, **options)


def _check_steps(name: str, steps: int) -> None:
    """OptionError unless the number of training steps is known."""
    if steps == 0:
        raise OptionError(
            f"recipe '{name}' needs steps, the number of calls of optimizer.step() in all of training: give "
            "steps=len(data) * epochs"
        )
    check_least("steps", steps, 1, integer=True)


def fixed(steps: int) -> Recipe:
    """Keeps the zeros that the model has: from `gossamer.prune`, from `sparsify` and `finalize`, or from a checkpoint."""
    return Recipe(Sparsifier("zeros"), once())


def one_shot(
    steps: int, sparsity: float | None = None, at: int = 0, saliency: str = "magnitude", pattern: str = "unstructured",
    distribution: str = "uniform",
) -> Recipe:  # fmt: skip
    """Drops the least salient elements at step `at`: Han et al., 2015, section 3. Saliency by gradients needs `at` >= 1."""
    return Recipe(Sparsifier(saliency), once(at), distribution, pattern, sparsity)


def gradual(
    steps: int, sparsity: float, begin: int = 0, end: int | None = None, every: int = 10, saliency: str = "magnitude",
    pattern: str = "unstructured", distribution: str = "uniform",
) -> Recipe:  # fmt: skip
    """Raises the sparsity by a cubic until step `end` (default: 70 % of the steps): Zhu and Gupta, 2017, section 3."""
    return Recipe(Sparsifier(saliency), Cubic(begin, _end(end, steps, 0.7), every), distribution, pattern, sparsity)


def random(steps: int, sparsity: float, pattern: str = "unstructured", distribution: str = "erdos-renyi-kernel") -> Recipe:
    """Keeps random nonzeros, which never move: the baseline "static" of Evci et al., 2020, section 4."""
    return Recipe(Sparsifier("random"), once(), distribution, pattern, sparsity)


def set_(
    steps: int, sparsity: float, every: int = 100, fraction: float = 0.3, until: int | None = None,
    pattern: str = "unstructured", distribution: str = "erdos-renyi",
) -> Recipe:  # fmt: skip
    """SET: moves the smallest nonzeros, a `fraction`, to random places every `every` steps: Mocanu et al., 2018, methods.

    The moved ones start as zeros, as in Evci et al., 2020.
    """
    schedule = Exchange(0, _end(until, steps, 0.75), every, fraction, anneal=False)
    return Recipe(Sparsifier(grows="random"), schedule, distribution, pattern, sparsity)


def rigl(
    steps: int, sparsity: float, every: int = 100, fraction: float = 0.3, until: int | None = None,
    pattern: str = "unstructured", distribution: str = "erdos-renyi-kernel",
) -> Recipe:  # fmt: skip
    """RigL: moves the smallest nonzeros to the places with the largest gradients: Evci et al., 2020, section 3, algorithm 1.

    They move every `every` steps in the first 75 % of the steps. A cosine lowers their `fraction`. Only these steps compute the
    gradient of pruned weights. Nonzeros move after the optimizer's step; the paper's algorithm skips that step.
    """
    schedule = Exchange(0, _end(until, steps, 0.75), every, fraction)
    return Recipe(Sparsifier(grows="gradient"), schedule, distribution, pattern, sparsity)


def sr_ste(steps: int, pattern: str = "2:4", decay: float = 2e-4, begin: int = 0) -> Recipe:
    """SR-STE: new N:M masks at each step, straight-through gradients, decay of pruned weights: Zhou et al., 2021, section 4.2.

    w <- w - lr (g + decay * (1 - mask) * w)
    """
    return _straight_through(pattern, Schedule(begin, steps), decay=decay)


def structure_decay(steps: int, pattern: str = "2:4", begin: int = 0, end: int | None = None) -> Recipe:
    """Lowers N from M - 1 over M / 2, M / 4, … to that of the pattern: Kao et al., 2022, "structure decay".

    Bambhaniya et al., 2024, call it "SdGf-Stepwise".
    """
    return _straight_through(pattern, Stepwise(begin, max(begin, steps), settled=_end(end, steps, 0.5)))


def step(
    steps: int, pattern: str = "2:4", earliest: int | None = None, latest: int | None = None, decay: float = 0.0
) -> Recipe:
    """STEP: dense Adam until its variance has settled, then a frozen variance and learned masks: Lu et al., 2023, algorithm 1.

    AutoSwitch (section 5) chooses the step of the switch, between `earliest` and `latest` (defaults: 10 % and 50 % of the
    steps).
    """
    first, last = _end(earliest, steps, 0.1), _end(latest, steps, 0.5)
    return _straight_through(pattern, Schedule(0, steps), decay=decay, frozen_variance=(first, max(first, last)))


def bi_mask(steps: int, pattern: str = "2:4", decay: float = 2e-4, every: int = 100) -> Recipe:
    """Bi-Mask: the backward pass has another N:M mask, along columns: Zhang et al., 2023, section 3.

    It is chosen among random orders of the rows, every `every` steps. Linear layers only.
    """
    return _straight_through(pattern, Schedule(0, steps), decay=decay, backward_mask=every)


def _straight_through(pattern: str, schedule: Schedule, **how: Any) -> Recipe:
    """Returns a recipe with new masks at each due step, and gradients that go straight through them."""
    return Recipe(Sparsifier(pruned="train", **how), schedule, pattern=pattern)


def progressive_gradient_flow(
    steps: int, pattern: str = "2:4", begin: int = 0, end: int | None = None, rate: float | None = 5.0
) -> Recipe:
    """Fades pruned weights by an exponential: Bambhaniya et al., 2024, "MdGf-Exponential".

    The mask of pruned weights falls from 1 at step `begin` to 0 at `end` (default: 75 % of the steps). It multiplies their
    gradients, too.
    """
    return Recipe(Sparsifier(pruned="fade"), Fading(begin, _end(end, steps, 0.75), rate=rate), pattern=pattern)


def mask_decay(steps: int, pattern: str = "2:4", begin: int = 0, end: int | None = None) -> Recipe:
    """Fades pruned weights linearly: Kao et al., 2022, "mask decay", linear."""
    return progressive_gradient_flow(steps, pattern, begin, end, rate=None)


def soft(
    steps: int, sparsity: float | None = None, every: int = 10, end: int | None = None, pattern: str = "unstructured",
    distribution: str = "uniform",
) -> Recipe:  # fmt: skip
    """Sets the smallest weights to zero every `every` steps until `end` (75 %); they train on: He et al., 2018, section 3.2."""
    return Recipe(Sparsifier(pruned="return"), Schedule(0, _end(end, steps, 0.75), every), distribution, pattern, sparsity)


RECIPES: dict[str, Callable[..., Recipe]] = {
    "fixed": fixed,
    "one-shot": one_shot,
    "gradual": gradual,
    "random": random,
    "set": set_,
    "rigl": rigl,
    "sr-ste": sr_ste,
    "mask-decay": mask_decay,
    "progressive-gradient-flow": progressive_gradient_flow,
    "structure-decay": structure_decay,
    "step": step,
    "bi-mask": bi_mask,
    "soft": soft,
}


_ONCE = ("fixed", "one-shot", "random")
"""Recipes that make their masks once, and so need no number of steps."""


def _end(given: int | None, steps: int, share: float) -> int:
    return max(1, round(share * steps)) if given is None else given
