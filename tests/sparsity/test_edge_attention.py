"""Attention over edges as one operation: against dense torch in every shape and kind of score, gradients, memory, tracing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer import Format, GossamerError, SparseTensor, graph_attention
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.runtime.target import host
from gossamer.sparsity.compiler import attention_ir
from gossamer.sparsity.compiler.compile_kernel import compile_region
from gossamer.sparsity.edges import edge_attention
from gossamer.sparsity.edges.dropout_mask import kept
from gossamer.sparsity.edges.edge_attention import SEEDS, attend_edges

ADDITIVE = ("target", "source")
PRODUCT = ("queries", "keys")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def pattern(rows: int, columns: int, density: float = 0.3, dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor, Tensor]:
    """A mask with an empty and a full row where there is room for them, and its arrays in CSR."""
    mask = torch.rand(rows, columns) < density
    if rows > 2:
        mask[1], mask[2] = False, True
    positions = torch.cat([torch.zeros(1), mask.sum(1).cumsum(0)]).to(dtype)
    return mask, positions, mask.nonzero()[:, 1].to(dtype)


def terms_of(
    names: tuple[str, ...], shape: tuple[int, int, int, int, int], entries: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    rows, columns, heads, _, size = shape
    shapes = {
        "target": (rows, heads), "source": (columns, heads), "edge": (entries, heads), "shared edge": (entries,),
        "queries": (rows, heads, size), "keys": (columns, heads, size), "weight": (entries,), "direction": (heads, size),
    }  # fmt: skip
    return {name.split()[-1]: torch.randn(shapes[name], dtype=dtype) for name in names}


def dense(
    mask: Tensor, values: Tensor, scale: float = 1, slope: float = 1, kept: Tensor | None = None, **terms: Tensor
) -> Tensor:
    """The same with masked dense matrices."""

    def at_entries(x: Tensor) -> Tensor:
        return x.new_zeros(*mask.shape, *x.shape[1:]).index_put(mask.nonzero(as_tuple=True), x)

    scores = values.new_zeros(*mask.shape, values.shape[1])
    if "queries" in terms:
        products = scale * torch.einsum("ihd,jhd->ijh", terms["queries"], terms["keys"])
        if "direction" in terms:
            joined = F.leaky_relu(terms["queries"][:, None] + terms["keys"], slope)
            products, slope = scale * torch.einsum("ijhd,hd->ijh", joined, terms["direction"]), 1
        scores = products * at_entries(terms["weight"])[:, :, None] if "weight" in terms else products
    if "target" in terms:
        scores = scores + terms["target"][:, None]
    if "source" in terms:
        scores = scores + terms["source"]
    if "edge" in terms:
        edge = at_entries(terms["edge"])
        scores = scores + (edge[:, :, None] if edge.dim() == 2 else edge)
    scores = F.leaky_relu(scores, slope).masked_fill(~mask[:, :, None], -torch.inf)
    weights = torch.where(mask.any(1)[:, None, None], scores, 0).softmax(1) * mask.any(1)[:, None, None]
    if kept is not None:
        weights = weights * at_entries(kept)
    return torch.einsum("ijh,jhf->ihf", weights, values)


def agree(
    shape: tuple[int, int, int, int, int], names: tuple[str, ...], dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    """Sums and all gradients of one problem (rows, columns, heads, features, size)."""
    rows, columns, heads, features, _ = shape
    mask, positions, coordinates = pattern(rows, columns, options.pop("density", 0.3), options.pop("integers", torch.int32))
    values = torch.randn(columns, heads, features, dtype=dtype).requires_grad_()
    terms = {name: term.requires_grad_() for name, term in terms_of(names, shape, coordinates.numel(), dtype).items()}
    torch.manual_seed(1)
    out = attend_edges(positions, coordinates, values, **terms, **options)
    if dropout := options.pop("dropout", 0.0):
        torch.manual_seed(1)
        options["kept"] = kept(torch.randint(*SEEDS, (1,)), coordinates.numel(), shape[2], dropout, dtype)
    expected = dense(mask, values, **options, **terms)
    torch.testing.assert_close(out, expected, rtol=2e-4, atol=2e-5)
    inputs, upstream = [values, *terms.values()], torch.randn_like(expected)
    found, wanted = (torch.autograd.grad(each, inputs, upstream) for each in (out, expected))
    for name, a, b in zip(["values", *terms], found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"gradient of {name}: {text}")


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((9, 7, 8, 8, 0), ADDITIVE),
        ((9, 7, 1, 7, 0), ADDITIVE),
        ((1, 1, 3, 5, 0), (*ADDITIVE, "edge")),
        ((9, 7, 4, 16, 16), PRODUCT),
        ((9, 7, 5, 3, 12), (*PRODUCT, "weight", "shared edge")),
        ((9, 7, 6, 48, 20), (*PRODUCT, "weight", "edge")),
        ((4, 9, 1, 300, 270), (*PRODUCT, *ADDITIVE)),
        ((9, 7, 7, 1, 0), ()),
        ((9, 7, 3, 5, 5), (*PRODUCT, "direction")),
        ((9, 7, 2, 16, 40), (*PRODUCT, "direction", "edge")),
    ],
)
def test_against_dense(shape: tuple[int, int, int, int, int], names: tuple[str, ...]) -> None:
    agree(shape, names, scale=0.3, slope=0.2 if {"source", "direction"} & {*names} else 1.0)


@pytest.mark.parametrize("heads", [1, 8])
def test_rows_of_several_blocks(heads: int) -> None:
    agree((4, 2500, heads, 8, 0), ADDITIVE, slope=0.2, density=0.5)


@pytest.mark.parametrize(
    ("shape", "names"),
    [((9, 7, 3, 5, 0), ADDITIVE), ((4, 2500, 1, 8, 0), ("source",)), ((9, 7, 8, 8, 4), (*PRODUCT, "direction"))],
)
def test_dropout_is_the_same_in_backward(shape: tuple[int, int, int, int, int], names: tuple[str, ...]) -> None:
    agree(shape, names, slope=0.2, dropout=0.6)


def test_dropout_keeps_the_share_it_should() -> None:
    """Over many weights: their number, their sums by head, and no two calls alike."""
    entries, heads, dropout = 20000, 4, 0.3
    positions, coordinates = torch.tensor([0, entries]), torch.arange(entries)
    values = torch.eye(4).repeat(entries // 4, 1)[:, None].expand(-1, heads, -1)
    first, second = (attend_edges(positions, coordinates, values, dropout=dropout)[0] for _ in range(2))
    deviation = (dropout / (1 - dropout) / (entries / 4)) ** 0.5 / 4  # of a sum of entries / 4 weights
    assert ((first - 1 / 4).abs() < 5 * deviation).all()
    assert (first != second).all()
    bits = kept(torch.tensor([7]), entries, heads, 0.5, torch.float64) - 1
    for shift in (1, 2, heads, 64):
        flat = bits.flatten()
        assert (flat[shift:] * flat[:-shift]).mean().abs() < 5 / flat.numel() ** 0.5


def test_wide_integers() -> None:
    agree((9, 7, 2, 64, 0), ("source", "shared edge"), integers=torch.int64)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_rows_of_any_length(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        agree((3000, 40, 8, 8, 0), ADDITIVE, slope=0.2)
    finally:
        torch.set_num_threads(before)


def test_gradcheck() -> None:
    _, positions, coordinates = pattern(4, 5, 0.5)
    names = (*ADDITIVE, *PRODUCT, "weight", "edge")
    terms = terms_of(names, (4, 5, 3, 2, 2), coordinates.numel(), torch.float64)
    values = torch.randn(5, 3, 2, dtype=torch.float64)

    def function(values: Tensor, *given: Tensor) -> Tensor:
        return attend_edges(positions, coordinates, values, **dict(zip(terms, given, strict=True)), scale=0.7, slope=0.3)

    inputs = [each.requires_grad_() for each in (values, *terms.values())]
    assert torch.autograd.gradcheck(function, inputs, check_batched_grad=True)


def test_entries_that_occur_twice_count_twice() -> None:
    positions, coordinates = torch.tensor([0, 3]), torch.tensor([0, 0, 1])
    out = attend_edges(positions, coordinates, torch.tensor([[[3.0]], [[9.0]]]))
    assert out.item() == pytest.approx(5)


def test_scores_that_are_large_infinite_or_masked() -> None:
    positions, coordinates = torch.tensor([0, 2, 4, 6]), torch.tensor([0, 1, 0, 1, 0, 1])
    values = torch.tensor([[[1.0]], [[2.0]]])
    edge = torch.tensor([3e38, -3e38, -torch.inf, 5.0, -torch.inf, -torch.inf])
    out = attend_edges(positions, coordinates, values, edge=edge).flatten()
    assert out[:2].tolist() == [1, 2]
    assert out[2].isnan()  # as torch.softmax of nothing but -inf


def test_narrow_floats_are_computed_with_in_f32() -> None:
    mask, positions, coordinates = pattern(9, 7)
    values, target, source = (torch.randn(n, 2, *rest).bfloat16() for n, *rest in ((7, 8), (9,), (7,)))
    out = attend_edges(positions, coordinates, values, target=target, source=source, slope=0.2)
    expected = dense(mask, values.float(), slope=0.2, target=target.float(), source=source.float())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected.bfloat16(), rtol=1e-2, atol=1e-2)


def test_no_memory_for_edges_times_heads() -> None:
    """Forward and backward take memory for nodes x heads x features, and none for edges x heads, whatever the degree."""
    nodes, degree, heads, features = 2000, 500, 16, 4
    edges = nodes * degree
    coordinates = torch.randint(0, nodes, (edges,), dtype=torch.int32)
    positions = torch.arange(0, edges + 1, degree, dtype=torch.int32)
    values = torch.randn(nodes, heads, features).requires_grad_()
    target, source = (torch.randn(nodes, heads).requires_grad_() for _ in range(2))

    def step() -> None:
        attend_edges(positions, coordinates, values, target=target, source=source, slope=0.2).sum().backward()

    step()  # compiles, and builds the transpose
    assert _more_memory(step) < edges * heads * 4 / 8


def _more_memory(step: Callable[[], None]) -> int:
    """By how many bytes the process grows at most while it takes a step."""

    def status(name: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = status("VmRSS")
    step()
    return status("VmHWM") - before


def test_compiled_it_is_one_operation_and_its_gradient() -> None:
    _, positions, coordinates = pattern(9, 7)
    graphs: list[str] = []

    def backend(gm: Any, inputs: Any) -> Any:
        from functorch.compile import aot_module_simplified, make_boxed_func

        def keep(graph: Any, _: Any) -> Any:
            graphs.append(graph.code)
            return make_boxed_func(graph.forward)

        return aot_module_simplified(gm, inputs, fw_compiler=keep)

    def layer(values: Tensor, target: Tensor, source: Tensor) -> Tensor:
        return attend_edges(positions, coordinates, values, target=target, source=source, slope=0.2).flatten(1).relu()

    inputs = [torch.randn(shape).requires_grad_() for shape in ((7, 2, 4), (9, 2), (7, 2))]
    expected = torch.autograd.grad(layer(*inputs).square().sum(), inputs)
    torch._dynamo.reset()
    found = torch.autograd.grad(torch.compile(layer, backend=backend, fullgraph=True)(*inputs).square().sum(), inputs)
    torch.testing.assert_close(found, expected)
    assert ["attend_edges_backward" in code for code in graphs] == [False, True]
    assert graphs[0].count("gossamer.attend_edges.") == 1


def test_kernels_are_shared_by_patterns_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[RegionKernel] = []
    real = edge_attention._forward_kernel
    monkeypatch.setattr(edge_attention, "_forward_kernel", lambda attention: kernels.append(real(attention)) or kernels[-1])
    for rows, columns in ((9, 7), (4, 20)):
        _, positions, coordinates = pattern(rows, columns)
        attend_edges(positions, coordinates, torch.randn(columns, 2, 8), source=torch.randn(columns, 2))
    assert kernels[0] is kernels[1]
    assert kernels[0].schedule == "attend-edges"


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"target": torch.zeros(8, 2)}, r"target is \[8, 2\] torch.float32, must be \[i=9, h=2\]"),
        ({"source": torch.zeros(7, 2, dtype=torch.float64)}, "torch.float64, must be"),
        ({"queries": torch.zeros(9, 2, 4)}, "queries and keys together"),
        ({"weight": torch.zeros(3)}, "queries and keys together"),
    ],
)
def test_what_does_not_fit_is_refused(terms: dict[str, Tensor], message: str) -> None:
    _, positions, coordinates = pattern(9, 7)
    with pytest.raises(GossamerError, match=message):
        attend_edges(positions, coordinates, torch.randn(7, 2, 8), **terms)


def test_contract_ir_says_what_is_read() -> None:
    attention = attention_ir.Attention(
        ("values", "source"), 2, 8, 0, False, False, 1.0, 0.2, 0.0, attention_ir.Format.CSR, torch.float32
    )
    assert '"kernel.attend_edges"' in attention_ir.forward(attention)
    text = attention_ir.gradient(attention, "source", ("source", "values"), None)
    assert 'side = "source"' in text
    assert "resultSegmentSizes = array<i32: 0, 0, 0, 0, 0, 1, 0, 1>" in text


@pytest.mark.parametrize("format", [Format.CSR, Format.CSC, Format.COO, Format.bsr(3, 3)], ids=lambda format: format.name)
def test_for_users_in_any_format(format: Format) -> None:
    matrix = torch.randint(1, 4, (9, 6)) * (torch.rand(9, 6) < 0.5).float()
    if format == Format.bsr(3, 3):
        matrix = torch.block_diag(*[torch.ones(3, 3)] * 2, torch.ones(3, 0))
    mask = matrix != 0
    pattern = SparseTensor.from_dense(matrix, format)
    values, keys, queries = torch.randn(6, 2, 8), torch.randn(6, 2, 4), torch.randn(9, 2, 4)
    out = graph_attention(pattern, values, queries=queries, keys=keys, scale=0.5, weighted=True)
    torch.testing.assert_close(out, dense(mask, values, 0.5, queries=queries, keys=keys, weight=matrix[mask]))


def test_for_users_with_gradients_of_the_pattern() -> None:
    pattern = nn.Parameter(SparseTensor.from_dense(torch.rand(5, 5)))
    values, keys, queries = (torch.randn(5, 1, 4) for _ in range(3))

    def layer(pattern: SparseTensor, values: Tensor) -> Tensor:
        return graph_attention(pattern, values, queries=queries, keys=keys, weighted=True).square().sum()

    (found,) = torch.autograd.grad(layer(pattern, values), pattern)
    torch._dynamo.reset()
    (again,) = torch.autograd.grad(torch.compile(layer, backend="aot_eager", fullgraph=True)(pattern, values), pattern)
    weight = pattern.detach().to_dense().requires_grad_()
    everyone = torch.ones(5, 5, dtype=torch.bool)
    out = dense(everyone, values, queries=queries, keys=keys, weight=weight.flatten())
    (expected,) = torch.autograd.grad(out.square().sum(), weight)
    torch.testing.assert_close(found.to_dense(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(again.to_dense(), expected, rtol=1e-4, atol=1e-5)


def test_for_users_what_does_not_fit_is_refused() -> None:
    pattern = SparseTensor.from_dense(torch.ones(3, 4))
    with pytest.raises(GossamerError, match=r"\[3, 4\] does not go with values of \[3, 1, 2\]"):
        graph_attention(pattern, torch.zeros(3, 1, 2))
    with pytest.raises(GossamerError, match="products of queries and keys: give queries and keys"):
        graph_attention(pattern, torch.zeros(4, 1, 2), weighted=True)
    other: Any = torch.ones(3, 4)
    for given in (other, other.to_sparse_csr(), other.to_sparse()):
        with pytest.raises(GossamerError, match="pattern is a Tensor, must be a SparseTensor"):
            graph_attention(given, torch.zeros(4, 1, 2))
    for dtype in (torch.int64, torch.bool, torch.complex64):  # which would be computed with in float32
        with pytest.raises(GossamerError, match="must be floats"):
            graph_attention(pattern, torch.zeros(4, 1, 2, dtype=dtype))


@pytest.mark.parametrize("bits", [128, 256])
def test_narrower_vectors(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(contract: str, schedule: str) -> RegionKernel:
        return compile_region(contract, schedule=schedule, target=replace(host(), vector_bits=bits))

    monkeypatch.setattr(edge_attention, "compile_region", compiled)
    for kernels in (edge_attention._forward_kernel, edge_attention._gradient_kernel):
        kernels.cache_clear()
    try:
        agree((9, 7, 6, 24, 5), (*PRODUCT, *ADDITIVE, "edge"), slope=0.2, scale=0.3)
    finally:
        for kernels in (edge_attention._forward_kernel, edge_attention._gradient_kernel):
            kernels.cache_clear()
