"""Parts for your own recipes of `gossamer.train_sparse`, and masks for training loops that call each step themselves."""

from gossamer.sparsity.training.gradual_masks import GradualMasks
from gossamer.sparsity.training.recipe import Recipe, Sparsifier
from gossamer.sparsity.training.schedules import Cubic, Exchange, Fading, Schedule, Stepwise

__all__ = ["Cubic", "Exchange", "Fading", "GradualMasks", "Recipe", "Schedule", "Sparsifier", "Stepwise"]
