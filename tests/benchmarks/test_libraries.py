"""Libraries compute the operations that they say they have; graphs are as large as they say; memory of a huge one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import graphs, registry
from benchmarks.measure import race
from benchmarks.operations import Library, Operation, having, to_scipy
from benchmarks.registry import Settings, WrongResult
from benchmarks.workloads import gat, gcn, huge, sddmm, spgemm, spmm, spmv

pytest.importorskip("scipy")
QUICK = Settings(2, 1e-6)
EAGER = ("coo", "csr", "mkl", "pyg", "reference", "scipy", "sparse-dot-mkl", "sparse-eager")
BUILD = {
    "spmv": lambda: spmv.build("cora"),
    "spmm": lambda: spmm.build("cora", 5),
    "sddmm": lambda: sddmm.build("cora", 5),
    "spgemm": lambda: spgemm.build("cora"),
    "gcn": lambda: gcn.build("cora"),
    "gcn of words": lambda: gcn.build("cora-words"),
    "gat": lambda: gat.build("cora"),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "matrix", lambda name: graphs.power_law(50, 200))
    monkeypatch.setattr(graphs, "sizes", lambda name: graphs.Sizes(50, 200, 24, 3, 8))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("case", BUILD)
def test_libraries_compute_the_operation(case: str) -> None:
    problem = BUILD[case]()
    found = {name: each for name, each in having(problem.name).items() if name in EAGER and not each.missing()}
    outcomes = race(problem, found, settings=QUICK, baselines=registry.BASELINES["libraries"])
    assert {"csr"} < set(outcomes)
    wrong = {name: outcome for name, outcome in outcomes.items() if "median_ms" not in outcome and "skipped" not in outcome}
    assert not wrong
    assert all("csr" in outcome["speedup"] for outcome in outcomes.values() if "median_ms" in outcome)


def test_libraries_have_operations_that_are_measured() -> None:
    for name, found in registry.plugins("libraries").items():
        assert isinstance(found, Library)
        assert found.ways, name
        assert set(found.ways) <= set(registry.names("workloads")), name
    assert next(iter(registry.plugins("libraries"))) == "csr"  # the baseline


@pytest.mark.usefixtures("small")
def test_a_sparse_result_is_compared_entry_by_entry() -> None:
    problem = spgemm.build("cora")
    expected, work = problem.reference()
    assert work.flops == 2 * sum(int(count) ** 2 for count in np.diff(problem.matrix.indptr))
    assert problem.error(expected.astype(np.float32), expected) < 1e-6
    spoilt = expected.copy()
    spoilt.data[3] += 1
    assert problem.error(spoilt, expected) == pytest.approx(1 / expected.max())
    with pytest.raises(WrongResult, match=r"shape \(49, 50\), not \(50, 50\)"):
        problem.error(expected[1:], expected)


def test_sparse_matrices_of_all_libraries_are_scipys() -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    for matrix in (dense.to_sparse_csr(), dense.to_sparse()):
        assert to_scipy(matrix).toarray().tolist() == dense.tolist()


def test_graphs_are_as_large_as_they_say() -> None:
    found = graphs.matrix("cora")
    assert (found.shape, found.nnz) == ((2708, 2708), 10_556)
    assert (found != found.T).nnz == 0 and found.diagonal().sum() == 0
    degrees = np.sort(np.diff(found.indptr))
    assert degrees[-27:].sum() > 0.15 * found.nnz  # the first percent of the nodes: even ones would have that much
    assert graphs.poisson(3).toarray()[4].tolist() == [0, -1, 0, -1, 4, -1, 0, -1, 0]
    root = (np.diff(found.indptr) + 1) ** 0.5
    np.testing.assert_allclose(graphs.normalised(found) @ root, root, rtol=1e-5)


def test_meshes_are_numbered_by_neighbourhood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MESH_NODES", 2000)
    monkeypatch.setattr(graphs, "DUAL_CELLS", 2000)
    for found, degree in ((graphs.mesh(), 14), (graphs.dual(), 4)):
        assert np.diff(found.indptr).mean() == pytest.approx(degree, abs=1.5)
        rows = np.repeat(np.arange(found.shape[0]), np.diff(found.indptr))
        assert np.abs(rows - found.indices).mean() < found.shape[0] / 8


@pytest.mark.parametrize("step", huge.STEPS)
def test_a_huge_graph_in_small_is_right(step: str) -> None:
    call, needed = huge.steps(40 * huge.DEGREE)[step]
    found = call()
    positions, columns, values = huge.adjacency(40 * huge.DEGREE)
    assert positions.dtype == columns.dtype == torch.int64
    dense = torch.sparse_csr_tensor(positions, columns, values, (40, 40), check_invariants=True).to_dense()
    if step == "check":
        torch.testing.assert_close(found.to_dense(), dense)
    elif step == "backward":
        result, _, gradient = found
        torch.testing.assert_close(gradient, dense.t() @ result.detach())
    else:
        assert found.shape == (40, huge.COLUMNS)
    assert needed >= columns.nbytes + values.nbytes


def test_exact_operations_are_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    problem = Operation("spmv", graphs.poisson(3), (torch.ones(9),), lambda a, x: seen.append((a.dtype, x.dtype)), 1.0, 1)
    problem.reference()
    assert seen == [(np.float64, np.float64)]
