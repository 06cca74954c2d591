"""What would give a kernel, or anybody else, memory that is not there: each case runs in a process of its own."""

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import dlpack

from gossamer import Format, GossamerError, SparseTensor, einsum
from gossamer.dialects.errors import ArgumentError
from tests.sparsity.made import matrix

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def outcome(case: Callable[[], Any]) -> str:
    """What becomes of a call: "" if it gives something, the names of its error's classes, or the signal that ends it."""
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "note"
        child = os.fork()
        if not child:
            try:
                case()
                said = ""
            except BaseException as problem:  # of whatever kind: the child must not go on with the tests
                said = " ".join(each.__name__ for each in type(problem).__mro__)
            note.write_text(said)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else note.read_text()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """A child of a process with a team of threads cannot use them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def csr(rows: int = 6, columns: int = 5) -> SparseTensor:
    return SparseTensor.from_dense(matrix(rows, columns, 0.5))


SAMPLED = {
    "rows": lambda a: torch.sparse.sampled_addmm(a, torch.ones(2, 3), torch.ones(3, 5)),
    "columns": lambda a: torch.sparse.sampled_addmm(a, torch.ones(6, 3), torch.ones(3, 50)),
    "inner": lambda a: torch.sparse.sampled_addmm(a, torch.ones(6, 3), torch.ones(2, 5)),
    "types": lambda a: torch.sparse.sampled_addmm(a, torch.ones(6, 3, dtype=torch.float64), torch.ones(3, 5)),
    "all of another type": lambda a: torch.sparse.sampled_addmm(
        a, *(torch.ones(*n, dtype=torch.float64) for n in ((6, 3), (3, 5)))
    ),
    "integers": lambda a: torch.sparse.sampled_addmm(a, torch.ones(6, 3).long(), torch.ones(3, 5).long()),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_factors_that_do_not_fit_the_pattern(name: str) -> None:
    assert "ArgumentError" in outcome(lambda: SAMPLED[name](csr()))


def test_operations_check_what_they_are_given_directly() -> None:
    a = csr()
    arrays, sizes, text = [*a.components, torch.ones(5, 3)], [6, 5], f"ij {a.format}\njk\nik"
    call = torch.ops.gossamer.einsum.default
    torch.testing.assert_close(call(arrays, sizes, text), a.to_dense() @ torch.ones(5, 3))
    short, wide = a.components[0][:-1], a.components[1].int()
    for changed, message in [
        ([*arrays[:-1], torch.ones(4, 3)], "'j' is 5 and 4"),
        ([*arrays[:-1], torch.ones(5)], r"'jk' has the shape \[5\]"),
        ([*arrays[:-1], torch.ones(5, 3).double()], "convert with .to()"),
        ([short, *arrays[1:]], "positions of 'd1 : compressed' must be 7 numbers"),
        ([arrays[0], wide, *arrays[2:]], "coordinates of level 1 of CSR are torch.int32"),
        ([*arrays[:2], arrays[2][1:], arrays[3]], "values here"),
        (arrays[1:], "takes 4 arrays, got 3"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            call(changed, sizes, text)


HYBRIDS = {
    "plus": lambda a, b: a + b,
    "minus": lambda a, b: a - b,
    "times": lambda a, b: a * b,
}


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("dense", [1, 2])
def test_hybrid_coo(name: str, dense: int) -> None:
    torch.manual_seed(0)
    shape = (4, 5, 3, 2)[: 2 + dense]
    a, b = (torch.rand(shape) * (torch.rand(4, 5, *[1] * dense) > 0.5) for _ in range(2))
    sparse = [SparseTensor.from_torch(each.to_sparse(2)) for each in (a, b)]
    assert outcome(lambda: HYBRIDS[name](*sparse)) == ""
    result = HYBRIDS[name](*sparse)
    assert isinstance(result, SparseTensor)
    torch.testing.assert_close(result.to_dense(), HYBRIDS[name](a, b))


NO_MEMORY = {
    "data_ptr": lambda a: a.data_ptr(),
    "numpy": lambda a: a.numpy(),
    "asarray": lambda a: np.asarray(a),
    "from_dlpack": lambda a: torch.from_dlpack(a),
    "numpy.from_dlpack": lambda a: np.from_dlpack(a),
    "__dlpack__": lambda a: a.__dlpack__(),
    "map_": lambda a: a.map_(a, lambda x, y: x),
}


@pytest.mark.parametrize("name", NO_MEMORY)
def test_nobody_gets_memory_of_a_dense_tensor(name: str) -> None:
    assert outcome(lambda: NO_MEMORY[name](csr())).startswith("NoMemoryError GossamerError BufferError")


def test_what_torch_does_in_cpp_gets_no_null_pointer() -> None:
    assert outcome(lambda: dlpack.to_dlpack(csr())).startswith("RuntimeError")


def test_apply_changes_stored_values_and_leaves_zeros() -> None:
    a = csr()
    dense = a.to_dense()
    assert a.apply_(lambda x: 2 * x) is a
    torch.testing.assert_close(a.to_dense(), 2 * dense)
    with pytest.raises(GossamerError, match="makes zeros nonzero"):
        a.apply_(lambda x: x + 1)


@pytest.mark.parametrize("format", [Format.CSR, Format.COO, Format.bsr(2, 2)], ids=lambda f: f.name)
def test_processes_share_arrays(format: Format) -> None:
    dense = matrix(6, 4)
    a = SparseTensor.from_dense(dense, format)
    assert not a.is_shared()
    assert a.share_memory_() is a
    assert a.is_shared()
    layer = nn.Linear(4, 6)
    layer.weight = nn.Parameter(SparseTensor.from_dense(dense, format))
    x = torch.ones(2, 4)
    with torch.no_grad():
        before = layer(x)
    layer.share_memory()
    assert layer.weight.is_shared()
    torch.testing.assert_close(layer(x), before)

    def write() -> None:
        a.values().fill_(7)

    assert outcome(write) == ""
    assert bool((a.values() == 7).all())
    torch.testing.assert_close(a @ torch.ones(4), a.to_dense().sum(1))


def test_every_function_of_torch_survives_a_sparse_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it makes of it: a result, an error, a file called "mean", but no end of the process."""
    monkeypatch.chdir(tmp_path)
    a, x = csr(5, 5), torch.ones(5, 5)
    ends_programs = {"_crash", "_assert"}
    homes = {
        "Tensor": torch.Tensor,
        "torch": torch,
        "functional": nn.functional,
        "linalg": torch.linalg,
        "sparse": torch.sparse,
    }

    def calls(function: Callable[..., Any]) -> None:
        for given in ((a,), (a, a), (a, x), (a, 1), (a, 0, 1), (x, a), (a, x, x), (x, a, x), (a, (0, 1)), (a, "mean")):
            try:
                function(*given)
            except Exception:
                continue

    def all_of(home: Any, names: list[str]) -> None:
        for name in names:
            calls(getattr(home, name))

    for label, home in homes.items():
        names = [
            name for name in dir(home)
            if callable(getattr(home, name)) and not name.startswith("_") and name[0].islower() and name not in ends_programs
        ]  # fmt: skip
        whole = outcome(lambda home=home, names=names: all_of(home, names))
        if whole:
            alone = {name: outcome(lambda home=home, name=name: all_of(home, [name])) for name in names}
            pytest.fail(f"{label}: { ({name: end for name, end in alone.items() if end}) }")


def test_einsum_of_types_that_differ_is_refused_before_kernels() -> None:
    a, y = csr(), torch.ones(5, 2, dtype=torch.float64)
    assert "GossamerError" in outcome(lambda: einsum("ij,jk->ik", a, y))


def test_a_dense_tensor_of_one_dimension_too_many() -> None:
    assert "Error" in outcome(lambda: torch.sparse.sampled_addmm(csr(), torch.ones(1, 6, 3), torch.ones(1, 3, 5)))


def _zero_gradients() -> None:
    """Products and sums before a step, whose gradient torch makes of zeros that lie nowhere."""
    a, x = csr(), torch.ones(5, 3, requires_grad=True)
    values = a.values().clone().requires_grad_()
    a = a.with_values(values)
    for result in (a @ x, a @ x[:, 0], a.sum(1), torch.sparse.softmax(a, 1) @ x, (a.clone().sgn_() * 1).to_dense()):
        found = torch.autograd.grad(torch.sgn(result).sum(), [values, x], allow_unused=True)
        assert all(gradient is None or not gradient.any() for gradient in found)


def _zeros_without_memory() -> None:
    a = csr()
    nothing = torch._efficientzerotensor((5, 3))
    assert not (a @ nothing).any() and not (a @ nothing).any()
    stored = a.with_values(torch._efficientzerotensor((a.nnz,)))
    assert not (stored @ torch.ones(5, 3)).any()
    assert torch.equal(torch._foreach_add([stored], [a])[0].to_dense(), a.to_dense())


def test_zeros_that_lie_nowhere() -> None:
    assert outcome(_zero_gradients) == ""
    assert outcome(_zeros_without_memory) == ""


def test_values_that_are_views_of_conjugates() -> None:
    a = SparseTensor.from_dense(matrix(4, 6) * (1 + 2j))
    for values in (a.values().conj(), a.values().conj().imag):
        b, dense = a.with_values(values), a.with_values(values.resolve_conj().resolve_neg().clone()).to_dense()
        assert torch.equal(torch._foreach_mul([b], [a.with_values(values)])[0].to_dense(), dense * dense)
