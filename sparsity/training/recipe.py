"""`Recipe`: which weights to keep (Sparsifier), when masks change (Schedule), how dense each layer is, and in which pattern.

Recipe(Sparsifier(grows="gradient"), Exchange(0, 7500, 100), "erdos-renyi-kernel", "unstructured", 0.9)       RigL
"""

from dataclasses import dataclass, field, replace

from gossamer.dialects.errors import OptionError
from gossamer.dialects.option_check import check_share, did_you_mean
from gossamer.sparsity.pruning.patterns import NM, VNM, Pattern, Unstructured, pattern_of
from gossamer.sparsity.training.distributions import DISTRIBUTIONS
from gossamer.sparsity.training.schedules import Cubic, Exchange, Fading, Schedule, Stepwise

SALIENCIES = ("magnitude", "first-order", "second-order", "random", "zeros")
_GROWTHS = (None, "gradient", "random")
_PRUNED = ("stay", "return", "train", "fade")


@dataclass(frozen=True)
class Sparsifier:
    """Says which weights to keep, and what happens to the pruned weights.

    saliency  the score of a weight; those with the largest scores are kept
              "magnitude"     |w|
              "first-order"   the mean of (w g)^2 over steps (Molchanov et al., 2019, section 3.1, formula 8)
              "second-order"  w^2 / 2 times the mean of g^2, Fisher's diagonal (LeCun et al., 1990; Theis et al., 2018)
              "random"        a random number
              "zeros"         no score: keeps the elements that are not zero when training starts
    grows     where new nonzeros appear: "gradient" (Evci et al., 2020), "random" (Mocanu et al., 2018), or None for nowhere
    pruned    what happens to pruned weights:
              "stay"    they stay zero
              "return"  they are set to zero once, then train on (He et al., 2018)
              "train"   they train on under a mask; gradients go straight through it
              "fade"    they train on under a mask that fades; gradients are scaled by it
    decay     decay * w is added to the gradient of pruned weights (Zhou et al., 2021)
    frozen_variance  the first and the last step at which masks may begin, once Adam's variance has settled (recipe "step")
    backward_mask    the number of steps between new N:M masks of the backward pass (recipe "bi-mask"); 0 for no such mask
    """

    saliency: str = "magnitude"
    grows: str | None = None
    pruned: str = "stay"
    decay: float = 0.0
    frozen_variance: tuple[int, int] | None = None
    backward_mask: int = 0

    @property
    def is_latent(self) -> bool:
        """Whether pruned weights keep their values under a mask."""
        return self.pruned in ("train", "fade")


@dataclass(frozen=True)
class Recipe:
    """A sparsifier, a schedule, a distribution, a pattern, and a share of zeros, which `train_sparse` follows.

    pattern       "unstructured", "rows" (equally many in each row), "2:4", "32x1" (blocks), "64:2:8" (V:N:M)
    distribution  "uniform", "global", "erdos-renyi", "erdos-renyi-kernel"
    sparsity      the share of zeros in all layers together. None if the pattern determines it, or to keep existing zeros

    OptionError if the parts contradict each other.
    """

    sparsifier: Sparsifier
    schedule: Schedule
    distribution: str = "uniform"
    pattern: str = "unstructured"
    sparsity: float | None = None
    rule: Pattern = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", pattern_of(self.pattern))
        for name, given, known in (
            ("saliency", self.sparsifier.saliency, SALIENCIES), ("growth", self.sparsifier.grows, _GROWTHS),
            ("fate of what is pruned", self.sparsifier.pruned, _PRUNED), ("distribution", self.distribution, DISTRIBUTIONS),
        ):  # fmt: skip
            if given not in known:
                hint = did_you_mean(given, map(str, known))
                raise OptionError(f"{name} '{given}' is not known{hint}: there are {', '.join(map(str, known))}")
        if self.sparsity is not None or (self.rule.density is None and self.sparsifier.saliency != "zeros"):
            check_share("sparsity", self.sparsity)
        if self.sparsity is not None and self.rule.density is not None and abs(1 - self.rule.density - self.sparsity) > 1e-6:
            raise OptionError(
                f"sparsity is {self.sparsity}, and pattern '{self.pattern}' has {1 - self.rule.density:g}: leave out sparsity"
            )
        for refused, reason in self._refusals():
            if refused:
                raise OptionError(reason)

    def at(self, step: int) -> Pattern:
        """Returns the pattern at a step. The N of N:M may still be larger than in the end."""
        rule = self.rule
        return replace(rule, n=self.schedule.kept(step, rule.n, rule.m)) if isinstance(rule, NM) else rule

    def _refusals(self) -> list[tuple[bool, str]]:
        sparsifier, schedule = self.sparsifier, self.schedule
        fixed, moving = self.rule.density is not None, isinstance(schedule, Exchange)
        needs_gradients = sparsifier.saliency in ("first-order", "second-order")
        return [
            (fixed and self.distribution != "uniform", f"'{self.pattern}' makes layers equally dense: take 'uniform'"),
            (fixed and isinstance(schedule, Cubic), f"'{self.pattern}' has one density: a cubic schedule needs another"),
            (fixed and sparsifier.grows is not None, f"nonzeros cannot move freely in '{self.pattern}': take another"),
            (
                self.distribution == "global" and (not isinstance(self.rule, Unstructured) or moving),
                "distribution 'global' sorts single elements: it needs 'unstructured', and nonzeros that do not move",
            ),
            (moving != (sparsifier.grows is not None), "nonzeros that grow need an Exchange as schedule, and it needs them"),
            (moving and sparsifier.pruned != "stay", "where nonzeros grow, what is pruned must 'stay' zero"),
            (
                needs_gradients and schedule.begin < 1,
                f"saliency '{sparsifier.saliency}' is known after a step of training: the schedule must begin at 1 or later",
            ),
            (isinstance(schedule, Stepwise) and not isinstance(self.rule, NM), "a stepwise schedule lowers the N of N:M"),
            (
                isinstance(schedule, Fading) and sparsifier.pruned != "fade",
                "a fading schedule needs a sparsifier whose pruned weights 'fade'",
            ),
            (bool(sparsifier.decay) and sparsifier.pruned != "train", "decay is for pruned weights that 'train' on"),
            (sparsifier.backward_mask > 0 and not (isinstance(self.rule, NM) and sparsifier.pruned == "train"),
             "a mask for the way back is one of N:M, for pruned weights that 'train' on"),
            (sparsifier.frozen_variance is not None and sparsifier.pruned != "train",
             "the variance freezes for pruned weights that 'train' on"),
            (isinstance(self.rule, VNM) and sparsifier.saliency == "random", "columns of V:N:M are chosen by saliency"),
        ]  # fmt: skip
