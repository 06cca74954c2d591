"""The methods of `prune`. Each chooses which weights of a layer to keep, and computes their new values.

"magnitude"  the largest |w|
"wanda"      the largest |w_ij| |z_j| of each row (Sun et al., 2023)
"sparsegpt"  prunes columns in order; later columns compensate for the pruned ones (sparsegpt.py)
"admm"       the mask by ADMM, the values by least squares (admm.py)
"best"       "sparsegpt" with refitted values, or "admm", whichever has the smaller error
"""

from collections.abc import Callable

from torch import Tensor

from gossamer.dialects.option_check import check_name
from gossamer.sparsity.pruning.admm import admm, refit
from gossamer.sparsity.pruning.layer_problem import LayerProblem
from gossamer.sparsity.pruning.patterns import EqualRows, Pattern, Unstructured, mask_of
from gossamer.sparsity.pruning.sparsegpt import sparsegpt

Method = Callable[[LayerProblem, Pattern, float], Tensor]


def magnitude(problem: LayerProblem, pattern: Pattern, density: float) -> Tensor:
    """Keeps the largest weights, with their values. It uses no data."""
    return problem.weight * mask_of(pattern, problem.weight.square(), density)


def wanda(problem: LayerProblem, pattern: Pattern, density: float) -> Tensor:
    """Keeps the weights with the largest |w_ij| |z_j|; for "unstructured" equally many in each row, as in the paper."""
    rows = EqualRows() if isinstance(pattern, Unstructured) else pattern
    return problem.weight * mask_of(rows, (problem.weight * problem.curvature.scale.unsqueeze(-2)).square(), density)


def best(problem: LayerProblem, pattern: Pattern, density: float) -> Tensor:
    """Returns the result of SparseGPT, refitted, or that of ADMM: the more accurate one."""
    found = (refit(problem, sparsegpt(problem, pattern, density)), admm(problem, pattern, density))
    return min(found, key=problem.error)


METHODS: dict[str, Method] = {"best": best, "admm": admm, "sparsegpt": sparsegpt, "wanda": wanda, "magnitude": magnitude}


def method_of(name: str) -> Method:
    """Returns the method with this name; OptionError if there is none."""
    check_name("method", name, METHODS)
    return METHODS[name]
