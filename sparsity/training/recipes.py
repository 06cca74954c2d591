"""The recipes of the literature by their names, for `gossamer.train_sparse`.

Each is a function of the steps that training takes, which says when masks change, and of what its options are.
"""

import inspect
from collections.abc import Callable
from typing import Any

from gossamer.dialects.errors import OptionError
from gossamer.dialects.option_check import check_least, check_name, did_you_mean
from gossamer.sparsity.training.recipe import Recipe, Sparsifier
from gossamer.sparsity.training.schedules import Cubic, Exchange, Fading, Schedule, Stepwise, once


def recipe_of(name: str, steps: int, **options: Any) -> Recipe:
    """The recipe of a name. OptionError if there is none, or it does not have such an option."""
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
    """OptionError unless it is known how long training takes."""
    if steps == 0:
        raise OptionError(
            f"recipe '{name}' needs steps, the number of calls of optimizer.step() in all of training: give "
            "steps=len(data) * epochs"
        )
    check_least("steps", steps, 1, integer=True)


def fixed(steps: int) -> Recipe:
    """The zeros that are there stay: after `gossamer.prune`, `sparsify` and `finalize`, or a checkpoint."""
    return Recipe(Sparsifier("zeros"), once())


def one_shot(
    steps: int, sparsity: float | None = None, at: int = 0, saliency: str = "magnitude", pattern: str = "unstructured",
    distribution: str = "uniform",
) -> Recipe:  # fmt: skip
    """The least salient elements are dropped at step `at`, by gradients 1 or later: Han et al., 2015, section 3."""
    return Recipe(Sparsifier(saliency), once(at), distribution, pattern, sparsity)


def gradual(
    steps: int, sparsity: float, begin: int = 0, end: int | None = None, every: int = 10, saliency: str = "magnitude",
    pattern: str = "unstructured", distribution: str = "uniform",
) -> Recipe:  # fmt: skip
    """Sparsity rises by a cubic to its share at step `end`, by default 70 % of the steps: Zhu and Gupta, 2017, section 3."""
    return Recipe(Sparsifier(saliency), Cubic(begin, _end(end, steps, 0.7), every), distribution, pattern, sparsity)


def random(steps: int, sparsity: float, pattern: str = "unstructured", distribution: str = "erdos-renyi-kernel") -> Recipe:
    """Random nonzeros from the start, which never move: the baseline "static" of Evci et al., 2020, section 4."""
    return Recipe(Sparsifier("random"), once(), distribution, pattern, sparsity)


def set_(
    steps: int, sparsity: float, every: int = 100, fraction: float = 0.3, until: int | None = None,
    pattern: str = "unstructured", distribution: str = "erdos-renyi",
) -> Recipe:  # fmt: skip
    """SET: the smallest nonzeros move to random places, a `fraction` of them every so many steps: Mocanu et al., 2018, methods.

    They start there as zeros, as in Evci et al., 2020.
    """
    schedule = Exchange(0, _end(until, steps, 0.75), every, fraction, anneal=False)
    return Recipe(Sparsifier(grows="random"), schedule, distribution, pattern, sparsity)


def rigl(
    steps: int, sparsity: float, every: int = 100, fraction: float = 0.3, until: int | None = None,
    pattern: str = "unstructured", distribution: str = "erdos-renyi-kernel",
) -> Recipe:  # fmt: skip
    """RigL: the smallest nonzeros move to where the gradient is largest: Evci et al., 2020, section 3, algorithm 1.

    Every `every` steps until 75 % of them, a fraction that a cosine lowers. The gradient of pruned weights is looked at in
    those steps alone; nonzeros move after the optimizer's step, where the paper's algorithm leaves that one out.
    """
    schedule = Exchange(0, _end(until, steps, 0.75), every, fraction)
    return Recipe(Sparsifier(grows="gradient"), schedule, distribution, pattern, sparsity)


def sr_ste(steps: int, pattern: str = "2:4", decay: float = 2e-4, begin: int = 0) -> Recipe:
    """SR-STE: N:M masks of the moment, gradients straight through, pruned weights decay: Zhou et al., 2021, section 4.2.

    w <- w - lr (g + decay * (1 - mask) * w)
    """
    return _straight_through(pattern, Schedule(begin, steps), decay=decay)


def structure_decay(steps: int, pattern: str = "2:4", begin: int = 0, end: int | None = None) -> Recipe:
    """N falls from M - 1 over M / 2, M / 4, … to the one asked for: Kao et al., 2022, "structure decay".

    "SdGf-Stepwise" of Bambhaniya et al., 2024.
    """
    return _straight_through(pattern, Stepwise(begin, max(begin, steps), settled=_end(end, steps, 0.5)))


def step(
    steps: int, pattern: str = "2:4", earliest: int | None = None, latest: int | None = None, decay: float = 0.0
) -> Recipe:
    """STEP: dense Adam until its variance has settled; then it is frozen, and masks are learned.

    Lu et al., 2023, algorithm 1. The switch comes by itself (section 5, AutoSwitch), but not before `earliest` nor after
    `latest`: 10 % and 50 % of the steps.
    """
    first, last = _end(earliest, steps, 0.1), _end(latest, steps, 0.5)
    return _straight_through(pattern, Schedule(0, steps), decay=decay, frozen_variance=(first, max(first, last)))


def bi_mask(steps: int, pattern: str = "2:4", decay: float = 2e-4, every: int = 100) -> Recipe:
    """Bi-Mask: the gradient of a layer's input has an N:M mask of its own, down columns: Zhang et al., 2023, section 3.

    It is chosen every so many steps among random orders of the rows. Linear layers only.
    """
    return _straight_through(pattern, Schedule(0, steps), decay=decay, backward_mask=every)


def _straight_through(pattern: str, schedule: Schedule, **how: Any) -> Recipe:
    """Masks are those of the moment, and gradients go straight through them."""
    return Recipe(Sparsifier(pruned="train", **how), schedule, pattern=pattern)


def progressive_gradient_flow(
    steps: int, pattern: str = "2:4", begin: int = 0, end: int | None = None, rate: float | None = 5.0
) -> Recipe:
    """Mask decay by an exponential: Bambhaniya et al., 2024, "MdGf-Exponential".

    Where weights are pruned, the mask falls from 1 at step `begin` to 0 at `end`, by default after 75 % of the steps. Their
    gradients fade alike.
    """
    return Recipe(Sparsifier(pruned="fade"), Fading(begin, _end(end, steps, 0.75), rate=rate), pattern=pattern)


def mask_decay(steps: int, pattern: str = "2:4", begin: int = 0, end: int | None = None) -> Recipe:
    """The same in a straight line: Kao et al., 2022, "mask decay", linear."""
    return progressive_gradient_flow(steps, pattern, begin, end, rate=None)


def soft(
    steps: int, sparsity: float | None = None, every: int = 10, end: int | None = None, pattern: str = "unstructured",
    distribution: str = "uniform",
) -> Recipe:  # fmt: skip
    """The least are set to zero every so many steps and train on, until step `end` (75 %): He et al., 2018, section 3.2."""
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
"""Recipes that make their masks once, however long training takes."""


def _end(given: int | None, steps: int, share: float) -> int:
    return max(1, round(share * steps)) if given is None else given
