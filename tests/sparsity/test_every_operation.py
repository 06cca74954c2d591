"""Every operation in every format, eager and compiled in one graph, against dense torch."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._dynamo.utils import counters

from gossamer import Format, FormatError, SparseTensor
from gossamer.backend import sparse as backend
from tests.sparsity.made import FORMATS, matrices, matrix, sparse
from tests.sparsity.operations import GIVE_SPARSE, OPERATIONS, TOO_FULL_FOR_2_4, expected

pytestmark = [pytest.mark.filterwarnings("ignore:SparseTensor has no sparse"), pytest.mark.usefixtures("fresh_dynamo")]


TRIED = [name for name in FORMATS if name not in ("CSR", "BSC", "loose", "interleaved COO", "dense")]
"""Those left out differ little from others."""


def check(name: str, result: Tensor, oracle: Tensor) -> None:
    """The same numbers, sparse where it should be."""
    assert isinstance(result, SparseTensor) == (name in GIVE_SPARSE)
    plain = result.to_dense() if isinstance(result, SparseTensor) else result
    torch.testing.assert_close(plain, oracle, equal_nan=True)


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=3, derandomize=True)
@given(dense=matrices(), seed=st.integers(0, 9))
def test_eager(name: str, dense: Tensor, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randint(-3, 4, dense.shape).float()
    for format in TRIED:
        a = sparse(dense, format)
        try:
            result = OPERATIONS[name](a, x)
        except FormatError:
            assert format == "2:4"
            assert name in TOO_FULL_FOR_2_4
        else:
            check(name, result, expected(name, dense, x, a))


def compiled(functions: list[Callable[..., Tensor]], *arguments: Tensor) -> list[Tensor]:
    """Their results in one graph without a break, by our backend."""
    graphs = 0

    def counting(gm: fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return backend(gm, inputs, options={"dense": "eager", "strict": True})

    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Gossamer")
        together = torch.compile(lambda *a: [function(*a) for function in functions], backend=counting, fullgraph=True)
        results = together(*arguments)
    assert graphs == 1
    assert not counters["graph_break"]
    return results


COMPILED = ["COO", "CSR int32", "CSC", "DCSR", "DCSC", "BSR", "2:4", "hybrid"]
IN_TURN = 8  # of so many operations a format compiles one, for time's sake: with 1 each compiles all


@pytest.mark.parametrize("format", COMPILED)
def test_compiled(format: str) -> None:
    dense = matrix(4, 6, 0.6)
    a, x = sparse(dense, format), torch.randn(4, 6)
    turn = list(OPERATIONS)[COMPILED.index(format) % IN_TURN :: IN_TURN]
    names = [name for name in turn if format != "2:4" or name not in TOO_FULL_FOR_2_4]
    for first in range(0, len(names), 8):
        some = names[first : first + 8]
        results = compiled([OPERATIONS[name] for name in some], a, x)
        for name, result in zip(some, results, strict=True):
            check(name, result, expected(name, dense, x, a))


DIFFERENTIABLE = [name for name in OPERATIONS if name not in ("comparison", "over sparse")]
OF_TWO = {"intersection", "union", "difference", "cat of columns", "stack"}


@pytest.mark.parametrize("format", ["CSR", "BSR"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name: str, format: str) -> None:
    """With respect to stored values and the dense operand, as dense torch has them."""
    if format == "BSR" and name in OF_TWO:
        pytest.skip("which zeros fill up blocks depends on the values, and to_format drops them")
    dense = torch.ones(4, 6) if name in ("exp", "functions") else matrix(4, 6, 0.6)
    a = sparse(dense, format)
    stored = a.with_values(torch.ones_like(a.values())).to_dense() != 0
    values, x, weights = a.values().clone().requires_grad_(), torch.randn(4, 6, requires_grad=True), torch.randn(400)

    def loss(out: Tensor) -> Tensor:
        plain = out.to_dense() if isinstance(out, SparseTensor) else out
        return (plain.flatten() * weights[: plain.numel()]).sum()

    loss(OPERATIONS[name](a.with_values(values), x)).backward()
    ours, of_x = values.grad, x.grad
    dense.requires_grad_()
    x.grad = None
    loss(expected(name, dense, x, a)).backward()
    assert ours is not None and dense.grad is not None
    torch.testing.assert_close(a.with_values(ours).to_dense(), dense.grad * stored, rtol=1e-4, atol=1e-5)
    assert (of_x is None) == (x.grad is None)
    if of_x is not None:
        torch.testing.assert_close(of_x, x.grad, rtol=1e-4, atol=1e-5)


RANK_3 = {
    "COO(3)": Format.coo(3),
    "CSF": Format.csf(3),
    "batched CSR": Format.parse("#sparse_tensor.encoding<{map = (i, j, k) -> (i : dense, j : dense, k : compressed)}>"),
    "CSR of vectors": Format.parse("#sparse_tensor.encoding<{map = (i, j, k) -> (i : dense, j : compressed, k : dense)}>"),
}
OF_RANK_3: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "batched product": lambda a, x: torch.bmm(a, x.transpose(1, 2)),
    "times": lambda a, x: a * x[0],
    "amax of rows": lambda a, x: a.amax(2),
    "amax of planes": lambda a, x: a.amax((0, 1)),
    "prod": lambda a, x: a.abs().prod(1),
    "sum": lambda a, x: a.sum((0, 2)),
    "cat": lambda a, x: torch.cat([a, a], 2).to_dense(),
    "stack": lambda a, x: torch.stack([a, 2 * a], 0).to_dense(),
    "flatten": lambda a, x: a.flatten(1).to_dense(),
    "select": lambda a, x: a[1],
    "slice": lambda a, x: a[:, 1:, ::2].to_dense(),
    "permute": lambda a, x: a.permute(2, 0, 1).to_dense(),
    "squeeze": lambda a, x: a[:1].squeeze(0).to_dense(),
}


@pytest.mark.parametrize("format", RANK_3)
def test_three_dimensions(format: str) -> None:
    dense, x = matrix(6, 5).view(2, 3, 5), torch.randn(2, 3, 5)
    a = SparseTensor.from_dense(dense, RANK_3[format])
    functions = list(OF_RANK_3.values())
    for function in functions:
        torch.testing.assert_close(function(a, x), function(dense, x))
    if format == "CSF":
        for result, function in zip(compiled(functions, a, x), functions, strict=True):
            torch.testing.assert_close(result, function(dense, x))
    stored = a.with_values(torch.ones_like(a.values())).to_dense() != 0
    for dim in range(3):
        soft = torch.softmax(dense.where(stored, -torch.inf), dim).where(stored, 0)
        torch.testing.assert_close(torch.softmax(a, dim).to_dense(), soft)


@pytest.mark.parametrize(
    ("dtype", "format"),
    [
        (torch.float64, "DCSR"), (torch.float16, "COO"), (torch.bfloat16, "CSR int32"), (torch.int32, "COO"),
        (torch.int8, "COO"),
    ],
)  # fmt: skip
def test_types(dtype: torch.dtype, format: str) -> None:
    dense, x = matrix(5, 8, dtype=dtype), torch.randint(-3, 4, (8, 3)).to(dtype)
    a = sparse(dense, format)
    equal = torch.testing.assert_close
    equal(a @ x, (dense.double() @ x.double()).to(dtype))
    equal((a + a.t().t()).to_dense(), 2 * dense)
    equal((a * x[:, 0]).to_dense(), dense * x[:, 0])
    equal(a.sum(1), dense.sum(1))
    equal(torch.cat([a, a]).amax(0), dense.amax(0))
    equal((-a).amin(), -dense.amax())
    equal(a.prod(1), dense.prod(1))
    if dtype.is_floating_point:
        stored = a.with_values(torch.ones_like(a.values())).to_dense() != 0
        soft = torch.softmax(dense.double().where(stored, -torch.inf), 1).where(stored, 0)
        equal(a.softmax(1).to_dense(), soft.nan_to_num().to(dtype))
