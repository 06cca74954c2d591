"""Matrices whose arrays compiled code computes: Inductor writes one after the other into the same memory, uncounted."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_code

from gossamer import Format, SparseTensor, graph_attention
from gossamer.runtime.direct_call import holding, new_content, part_of
from tests.backend.harness import assert_same

N = 200
POSITIONS = torch.arange(N + 1)
BACKENDS = ["sparse", "inductor"]


def matrix(columns: Tensor, format: Format = Format.CSC) -> SparseTensor:
    """With a one in each column, or row."""
    return SparseTensor.from_parts(format, (N, N), POSITIONS, columns, torch.ones(N), check=False)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by columns": lambda q, h: matrix(q) @ h,
    "transposed": lambda q, h: matrix(q, Format.CSR).t() @ h,
    "from the right": lambda q, h: (h.t() @ matrix(q, Format.CSR)).t(),
    "scaled": lambda q, h: (matrix(q) * 2) @ h,
    "a vector": lambda q, h: (matrix(q) @ h[:, 0])[:, None] + h,
    "two matrices": lambda q, h: (matrix(q) @ matrix(q.flip(0))) @ h,
    "attention": lambda q, h: graph_attention(matrix(q, Format.CSR), h[:, None], queries=h[:, None], keys=h[:, None])[:, 0],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_structures_that_a_graph_computes_in_the_same_memory(product: str, backend: str) -> None:
    def steps(q: Tensor, h: Tensor) -> Tensor:
        for _ in range(4):
            q = (q + 3 * (h[:, 0] > 0).sum() + 1) % N
            h = torch.tanh(PRODUCTS[product](q, h)) + 0.1 * h
        return h

    q, x = torch.randperm(N), torch.randn(N, 8)
    with fresh_cache():
        found, (code,) = run_and_get_code(torch.compile(steps, backend=backend, fullgraph=True), q, x)
    assert "holding(" in code and "# reuse" in code and "= call_" in code
    assert_same(found, steps(q, x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_structure_that_is_a_part_of_an_argument(backend: str, dynamic: bool) -> None:
    def product(edges: Tensor, x: Tensor) -> Tensor:
        return matrix(edges[1]) @ x

    compiled = torch.compile(product, backend=backend, fullgraph=True, dynamic=dynamic)
    edges, x = torch.stack([torch.arange(N), torch.randperm(N)]), torch.randn(N, 8)
    assert_same(compiled(edges, x), product(edges, x))
    for change in (
        lambda: edges[1].copy_(torch.randperm(N)),
        lambda: edges.copy_(edges.roll(1, 1)),
        lambda: edges[1, :2].sort(),
    ):
        change()
        for _ in range(2):
            assert_same(compiled(edges, x), product(edges, x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_structure_that_the_graph_writes_to(backend: str) -> None:
    def step(q: Tensor, x: Tensor) -> Tensor:
        before = matrix(q) @ x
        q.copy_((q * 7 + 3) % N)
        return before + 2 * (matrix(q) @ x)

    q, x = torch.randperm(N), torch.randn(N, 8)
    twin = q.clone()
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for _ in range(3):
        assert_same(compiled(q, x), step(twin, x))
    assert torch.equal(q, twin)


def test_an_operation_in_the_body_of_a_loop() -> None:
    """Which is a function of its own in Inductor's code, run again and again."""

    def steps(q: Tensor, x: Tensor) -> Tensor:
        def body(i: Tensor, q: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q = (q * 7 + 3) % N
            return i + 1, q, torch.tanh(matrix(q) @ h) + 0.1 * h

        return torch.while_loop(lambda i, q, h: i < 4, body, (torch.tensor(0), q, x))[2]

    q, x = torch.randperm(N), torch.randn(N, 8)
    h, columns = x, q
    for _ in range(4):
        columns = (columns * 7 + 3) % N
        h = torch.tanh(matrix(columns) @ h) + 0.1 * h
    with fresh_cache():
        found, (code,) = run_and_get_code(torch.compile(steps, backend="sparse", fullgraph=True), q, x)
    assert "= call_einsum([" in code or "= call_region([" in code
    assert_same(found, h)


def test_counts_tell_what_memory_holds() -> None:
    memory = torch.arange(6)
    first, second = holding(memory, new_content()), holding(memory, new_content())
    assert first.data_ptr() == memory.data_ptr() and first._version != second._version and memory._version == 0
    part = part_of(torch.as_strided(memory.data, (3,), (1,), 3), memory)
    memory.add_(1)
    assert part.tolist() == [4, 5, 6] and part._version == memory._version
    with torch.inference_mode():
        assert holding(memory[:3].clone(), new_content()).tolist() == [1, 2, 3]
