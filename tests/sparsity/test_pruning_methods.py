"""Each method of pruning against the equation that its paper defines it by, in float64."""

import pytest
import torch
from torch import Tensor

from gossamer import OptionError
from gossamer.sparsity.pruning.admm import admm, refit
from gossamer.sparsity.pruning.budgets import allocate
from gossamer.sparsity.pruning.layer_problem import Curvature, LayerProblem, Moments
from gossamer.sparsity.pruning.methods import METHODS, wanda
from gossamer.sparsity.pruning.patterns import EqualRows, Unstructured, pattern_of
from gossamer.sparsity.pruning.sparsegpt import sparsegpt


@pytest.fixture
def samples() -> tuple[Tensor, Tensor]:
    """z and x, correlated, [200, 24] each."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(24, 24, generator=generator, dtype=torch.float64)
    x = torch.randn(200, 24, generator=generator, dtype=torch.float64) @ mixed
    return x + 0.3 * torch.randn(x.shape, generator=generator, dtype=torch.float64), x


WEIGHT = torch.randn(8, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def problem_of(z: Tensor, x: Tensor, *, centred: bool = False, damping: float = 1e-9) -> LayerProblem:
    moments = Moments(z.shape[1], torch.float64)
    for part in range(0, len(z), 50):
        rows = z[part : part + 50]
        moments.add(rows, rows if x is z else x[part : part + 50])
    return LayerProblem.of(WEIGHT, Curvature(moments, centred=centred, damping=damping))


def test_the_target_is_the_least_squares_solution_and_the_bias_goes_with_it(samples: tuple[Tensor, Tensor]) -> None:
    z, x = samples[0] + 1, samples[1]
    problem, bias = problem_of(z, x, centred=True), torch.ones(8, dtype=torch.float64)
    with_ones = torch.cat([z, torch.ones(len(z), 1, dtype=torch.float64)], 1)
    best = torch.linalg.lstsq(with_ones, x @ WEIGHT.t() + bias).solution.t()
    torch.testing.assert_close(problem.target, best[:, :-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(problem.bias(problem.target, bias), best[:, -1], rtol=1e-5, atol=1e-4)


def test_the_error_is_that_of_the_outputs(samples: tuple[Tensor, Tensor]) -> None:
    z, _ = samples
    problem = problem_of(z, z)
    pruned = METHODS["magnitude"](problem, Unstructured(), 0.5)
    lost = (z @ (pruned - WEIGHT).t()).square().sum() / (z @ WEIGHT.t()).square().sum()
    assert problem.error(pruned) == pytest.approx(float(lost), rel=1e-6)


def test_sparsegpt_is_least_squares_on_the_columns_that_are_still_to_come(samples: tuple[Tensor, Tensor]) -> None:
    """With masks chosen column by column, each step solves for the columns to the right, those to the left being fixed."""
    z, _ = samples
    problem = problem_of(z, z)
    pruned = sparsegpt(problem, EqualRows(), 0.5)
    for row in range(len(WEIGHT)):
        current = WEIGHT[row].clone()
        for column in range(24):
            if pruned[row, column] != 0:
                continue
            fixed = current[:column]
            rest = z @ WEIGHT[row] - z[:, :column] @ fixed
            current[column] = 0
            current[column + 1 :] = torch.linalg.lstsq(z[:, column + 1 :], rest[:, None]).solution.flatten()
        torch.testing.assert_close(pruned[row], current, rtol=1e-4, atol=1e-6)


def test_wanda_keeps_the_largest_products_of_weights_and_norms(samples: tuple[Tensor, Tensor]) -> None:
    z, _ = samples
    pruned = wanda(problem_of(z, z), Unstructured(), 0.25)
    scores = WEIGHT.abs() * z.norm(dim=0)
    smallest_kept = scores.sort(1).values[:, -6:-5]
    torch.testing.assert_close(pruned, torch.where(scores >= smallest_kept, WEIGHT, 0))


@pytest.mark.parametrize("pattern", ["unstructured", "rows", "2:4", "4x2", "4:2:8"])
def test_admm_ends_in_a_fixed_point(samples: tuple[Tensor, Tensor], pattern: str) -> None:
    """Least squares on its support: the gradient is 0 there. And it is no worse than SparseGPT."""
    z, x = samples
    problem, rule = problem_of(z, x, damping=0.01), pattern_of(pattern)
    density = rule.density or 0.5
    pruned = admm(problem, rule, density)
    mask = pruned != 0
    assert mask.double().mean() == pytest.approx(density)
    gradient = (pruned - problem.target) @ problem.curvature.hessian
    assert (gradient * mask).abs().max() < 1e-3 * (problem.target @ problem.curvature.hessian).abs().max()
    assert problem.error(pruned) <= problem.error(sparsegpt(problem, rule, density))


def test_refitting_is_least_squares_row_by_row(samples: tuple[Tensor, Tensor]) -> None:
    z, _ = samples
    pruned = WEIGHT * EqualRows().mask(WEIGHT.square(), 0.5)
    found = refit(problem_of(z, z), pruned, steps=200, tolerance=1e-12)
    for row in range(len(WEIGHT)):
        kept = pruned[row] != 0
        expected = torch.linalg.lstsq(z[:, kept], (z @ WEIGHT[row])[:, None]).solution.flatten()
        torch.testing.assert_close(found[row, kept], expected, rtol=1e-5, atol=1e-6)
        assert (found[row, ~kept] == 0).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(10, 26), (16, 32), (1, 5)])
def test_masks_are_of_their_pattern(method: str, shape: tuple[int, int]) -> None:
    """Also where a matrix does not consist of whole groups or blocks."""
    rows, columns = shape
    moments = Moments(columns)
    z = torch.randn(64, columns, generator=torch.Generator().manual_seed(2))
    moments.add(z, z)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    problem = LayerProblem.of(weight, Curvature(moments, centred=True, damping=0.01))
    for pattern in ("unstructured", "rows", "2:4", "1:8", "4x2", "32x1", "4:2:8"):
        rule = pattern_of(pattern)
        mask = METHODS[method](problem, rule, 0.5) != 0
        padded = torch.nn.functional.pad(mask, (0, -columns % rule.columns, 0, -rows % rule.rows))
        groups = (
            padded.unflatten(1, (-1, rule.columns)).unflatten(0, (-1, rule.rows)).transpose(1, 2)
        )  # a tile: [rows, columns]
        if ":" in pattern:
            n = int(pattern.split(":")[-2])
            assert (groups.sum(-1) <= n).all()
            assert (groups.any(-2).sum(-1) <= (4 if pattern.count(":") == 2 else n)).all()
        elif "x" in pattern:
            whole = torch.nn.functional.pad(torch.ones_like(mask), (0, padded.shape[1] - columns, 0, padded.shape[0] - rows))
            whole = whole.unflatten(1, (-1, rule.columns)).unflatten(0, (-1, rule.rows)).transpose(1, 2)
            assert (~groups.flatten(-2).any(-1) | (groups == whole).flatten(-2).all(-1)).all()
        elif pattern == "rows" or method == "wanda":
            assert len(set(mask.sum(1).tolist())) == 1
        assert 0 < mask.double().mean() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ties", [[], [-1.0], [-1.0, float("inf")], [float("nan"), 2.0], [0.0]])
def test_the_largest_are_kept_among_equal_ones(dtype: torch.dtype, ties: list[float]) -> None:
    """As many as asked for, and none of the others is larger; NaN counts as the largest, as it does for torch.topk."""
    for size in (1, 2, 17, 300):
        scores = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
        for n, value in enumerate(ties):
            scores[torch.rand(size, generator=torch.Generator().manual_seed(n)) < 0.4] = value
        for count in {0, 1, size // 2, size - 1, size}:
            mask = Unstructured().mask(scores[None], count / size)[0]
            expected = scores.double().nan_to_num(nan=torch.inf).topk(count).values.sort().values
            assert torch.equal(scores[mask].double().nan_to_num(nan=torch.inf).sort().values, expected)


@pytest.mark.parametrize("name", ["", "dense", "4:2", "0:4", "2:4:8:16", "8:6:16", "4x", "4x0", "-2:4"])
def test_patterns_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match="pattern"):
        pattern_of(name)


def test_a_budget_goes_where_it_saves_most() -> None:
    """Two layers of one size and cost, one ten times as sensitive; against all choices."""
    densities = [0.1 * step for step in range(1, 11)]
    losses = [[scale * (1 - d) ** 2 for d in densities] for scale in (10.0, 1.0)]
    costs = [densities, densities]
    first, second = allocate(losses, costs, cost=1.0)
    possible = [(i, j) for i in range(10) for j in range(10) if densities[i] + densities[j] <= 1.0 + 1e-9]
    least = min(losses[0][i] + losses[1][j] for i, j in possible)
    assert losses[0][first] + losses[1][second] <= 1.1 * least
    first, second = allocate(losses, costs, loss=1.0)
    assert losses[0][first] + losses[1][second] <= 1.0
    assert densities[first] > densities[second]
    with pytest.raises(OptionError, match=r"no choice of densities reaches a latency of 0\.1"):
        allocate(losses, costs, cost=0.1)
