"""Parts of recipes of your own for `gossamer.train_sparse`, and masks for loops that call each step themselves."""

from gossamer.sparsity.training.gradual_masks import GradualMasks
from gossamer.sparsity.training.recipe import Recipe, Sparsifier
from gossamer.sparsity.training.schedules import Cubic, Exchange, Fading, Schedule, Stepwise

__all__ = ["Cubic", "Exchange", "Fading", "GradualMasks", "Recipe", "Schedule", "Sparsifier", "Stepwise"]
