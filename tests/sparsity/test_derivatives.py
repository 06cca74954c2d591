"""Forward differentiation, torch.func and derivatives of any order through SparseTensors: what dense torch has, or an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.autograd.functional import hessian as functional_hessian
from torch.autograd.functional import jacobian
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from gossamer import GossamerError, SparseTensor, einsum, graph_attention
from gossamer.sparsity.edges.edge_extremes import extremes
from gossamer.sparsity.operations import dense_results
from tests.sparsity.made import matrix, sparse
from tests.sparsity.operations import OPERATIONS, expected

DOUBLE = torch.float64
pytestmark = [pytest.mark.filterwarnings("ignore:SparseTensor has no sparse"), pytest.mark.usefixtures("fresh_dynamo")]


def of_one(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


def plain(out: Tensor) -> Tensor:
    return out.to_dense() if isinstance(out, SparseTensor) else out


NOT_SMOOTH = {"comparison", "over sparse"}
MASKED = {"rows by mask", "masked_select"}  # have as many results as the mask has ones


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in NOT_SMOOTH])
def test_tangents_and_gradients_of_every_operation(name: str) -> None:
    """Of values and of a dense operand: forward, backward, forward over backward."""
    dense = torch.full((4, 6), 0.7, dtype=DOUBLE) if name in ("exp", "functions") else matrix(4, 6, 0.6, DOUBLE)
    a, x = sparse(dense), of_one(4, 6)
    values = a.values().clone()
    tangents = torch.randn_like(values), torch.randn_like(x)
    spread = a.with_values(tangents[0]).to_dense(), tangents[1]
    stored = a.with_values(torch.ones_like(values)).to_dense()

    def ours(values: Tensor, x: Tensor) -> Tensor:
        return plain(OPERATIONS[name](a.with_values(values), x))

    def theirs(dense: Tensor, x: Tensor) -> Tensor:
        return plain(expected(name, dense, x, a))

    torch.testing.assert_close(jvp(ours, (values, x), tangents)[1], jvp(theirs, (dense, x), spread)[1])
    own = jvp(grad(lambda v, x: ours(v, x).cos().sum(), (0, 1)), (values, x), tangents)[1]
    other = jvp(grad(lambda d, x: theirs(d, x).cos().sum(), (0, 1)), (dense, x), spread)[1]
    of_values, wanted = a.with_values(own[0]).to_dense(), other[0] * stored
    torch.testing.assert_close(of_values, wanted)
    torch.testing.assert_close(own[1], other[1])


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in MASKED])
def test_vmap_of_every_operation(name: str) -> None:
    a, xs = sparse(matrix(4, 6, 0.6)), torch.randn(2, 4, 6)
    several = torch.stack([a.values(), 2 * a.values()])
    function = lambda values, x: plain(OPERATIONS[name](a.with_values(values), x))
    one_by_one = [torch.stack([function(values, x) for values, x in zip(several, xs, strict=True)]),
                  torch.stack([function(several[0], x) for x in xs])]  # fmt: skip
    torch.testing.assert_close(vmap(function)(several, xs), one_by_one[0], equal_nan=True)
    torch.testing.assert_close(vmap(function, (None, 0))(several[0], xs), one_by_one[1], equal_nan=True)


def test_vmap_is_one_larger_product(monkeypatch: pytest.MonkeyPatch) -> None:
    a, x, y = sparse(matrix(4, 6)), torch.randn(2, 6, 3), torch.randn(5, 6)
    calls: list[str] = []
    real = dense_results.call_of

    def counting(*given: Any) -> Any:
        calls.append(given[2])
        return real(*given)

    monkeypatch.setattr(dense_results, "call_of", counting)
    dense = a.to_dense()
    calls.clear()
    torch.testing.assert_close(vmap(lambda x: a @ x)(x), dense @ x)
    torch.testing.assert_close(vmap(lambda y: a @ y)(y), y @ dense.t())
    torch.testing.assert_close(vmap(lambda x: einsum("ij,jk,jk->i", a, x, x))(x), torch.einsum("ij,bjk->bi", dense, x * x))
    assert len(calls) == 3


def test_jacobians_and_hessians() -> None:
    a, x = sparse(matrix(4, 6, dtype=DOUBLE)), of_one(6, 3)
    dense = a.to_dense()
    ours, theirs = (lambda x: torch.tanh(a @ x)), (lambda x: torch.tanh(dense @ x))
    for transform in (jacfwd, jacrev):
        torch.testing.assert_close(transform(ours)(x), transform(theirs)(x))
    for twice in (hessian, lambda function: jacfwd(jacfwd(function))):
        torch.testing.assert_close(twice(lambda x: ours(x).sum())(x), hessian(lambda x: theirs(x).sum())(x))
    out, pullback = vjp(ours, x)
    torch.testing.assert_close(pullback(out)[0], vjp(theirs, x)[1](out)[0])


@pytest.mark.parametrize("of", ["values", "x"])
def test_compiled_forward_over_backward(of: str) -> None:
    a, x = sparse(matrix(4, 6, dtype=DOUBLE)), of_one(6, 3)
    given = a.values() if of == "values" else x

    def loss(changed: Tensor) -> Tensor:
        return torch.tanh(a.with_values(changed) @ x if of == "values" else a @ changed).sum()

    def products(changed: Tensor) -> Tensor:
        return jvp(grad(loss), (changed,), (torch.ones_like(changed),))[1]

    for function in (products, hessian(loss)):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(given), function(given))


@pytest.mark.parametrize("of", ["values", "x", "both"])
def test_several_tangents_at_once(of: str) -> None:
    """By `vectorize` of torch.autograd.functional, which has transforms of its own."""
    a, x = sparse(matrix(4, 6, dtype=DOUBLE)), of_one(6)
    given = x if of == "x" else a.values().clone()
    factors = of_one(a.nnz, 6)

    def function(changed: Tensor) -> Tensor:
        product = (
            a @ changed
            if of == "x"
            else a.with_values(changed) @ (x if of == "values" else (changed[:, None] * factors).sum(0))
        )
        return torch.tanh(product)

    def loss(changed: Tensor) -> Tensor:
        return function(changed).sum()

    found = jacobian(function, given, vectorize=True, strategy="forward-mode")
    torch.testing.assert_close(found, jacobian(function, given))
    found = functional_hessian(loss, given, vectorize=True, outer_jacobian_strategy="forward-mode")
    torch.testing.assert_close(found, functional_hessian(loss, given))


def test_dual_tensors() -> None:
    a, x, tangent = sparse(matrix(4, 6)), torch.randn(6, 3), torch.randn(6, 3)
    values = a.values().clone()
    with forward_ad.dual_level():
        of_x = forward_ad.unpack_dual(a @ forward_ad.make_dual(x, tangent)).tangent
        dual = forward_ad.make_dual(values, torch.ones_like(values))
        of_values = forward_ad.unpack_dual(a.with_values(dual) @ x).tangent
        constant = forward_ad.unpack_dual(a @ x).tangent
    torch.testing.assert_close(of_x, a.to_dense() @ tangent)
    torch.testing.assert_close(of_values, a.with_values(torch.ones_like(values)) @ x)
    assert constant is None


def test_a_sparse_parameter_under_a_transform_of_something_else() -> None:
    weight, x, tangent = nn.Parameter(sparse(matrix(4, 6))), torch.randn(6, 3), torch.randn(6, 3)
    jvp(lambda x: weight @ x, (x,), (tangent,))[1].sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.values(), tangent.sum(1)[weight.coordinates(1).long()])


def test_a_module_by_the_values_of_its_sparse_weight() -> None:
    layer, weight, x = nn.Linear(6, 4), sparse(matrix(4, 6)), torch.randn(5, 6)
    found = grad(lambda v: functional_call(layer, {"weight": weight.with_values(v)}, x).square().sum())(weight.values())
    dense = grad(lambda w: functional_call(layer, {"weight": w}, x).square().sum())(weight.to_dense())
    torch.testing.assert_close(weight.with_values(found).to_dense(), dense * (weight.to_dense() != 0))


REFUSED: dict[str, Callable[[SparseTensor, Tensor], object]] = {
    "a tensor as a whole": lambda a, x: grad(lambda a: (a @ x).sum())(a),
    "a copy on the way": lambda a, x: jvp(lambda v: a.with_values(v).double() @ x.double(), (a.values(),), (a.values(),)),
    "patterns that differ": lambda a, x: vmap(lambda x: a[x[0] > 0].to_dense())(torch.eye(4)[:, None]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_differentiated_says_so(name: str) -> None:
    with pytest.raises(GossamerError, match=r"values\(\)|vmap"):
        REFUSED[name](sparse(matrix(4, 6)), torch.randn(6, 3))


@pytest.mark.parametrize(("directed", "dropout"), [(False, 0.0), (True, 0.4)])
def test_attention(directed: bool, dropout: float) -> None:
    a = sparse(matrix(4, 5, dtype=DOUBLE))
    given = [of_one(*shape).requires_grad_() for shape in ((5, 2, 2), (4, 2, 3), (5, 2, 3), (4, 2), (2, 3))]

    def attention(v: Tensor, q: Tensor, k: Tensor, t: Tensor, d: Tensor) -> Tensor:
        torch.manual_seed(1)
        d_or_none = d if directed else None
        return graph_attention(a, v, queries=q, keys=k, target=t, direction=d_or_none, slope=0.2, dropout=dropout)

    given = given if directed else [*given[:-1], torch.zeros((), dtype=DOUBLE)]
    assert gradcheck(attention, given, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(attention, given, fast_mode=True)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_extremes(kind: str) -> None:
    a, x = sparse(matrix(4, 5)), of_one(5, 3).requires_grad_()
    function = lambda x: extremes(a.positions(1), a.coordinates(1), x, kind)
    assert gradcheck(function, x, check_forward_ad=True)
    assert gradgradcheck(function, x)


IN_A_GRAPH: dict[str, Callable[[SparseTensor, Tensor, Tensor], Tensor]] = {
    "jvp": lambda a, x, t: jvp(lambda x: torch.relu(a @ x), (x,), (t,))[1],
    "jvp of values": lambda a, x, t: jvp(lambda v: torch.tanh(2 * a.with_values(v)) @ x, (a.values(),), (a.values(),))[1],
    "grad of values": lambda a, x, t: grad(lambda v: (torch.softmax(a.with_values(v), 1) @ x).sum())(a.values()),
    "vmap": lambda a, x, t: vmap(lambda x: a @ x, 1, 1)(x),
}


def test_compiled_transforms() -> None:
    a, x, t = sparse(matrix(4, 6)), torch.randn(6, 3), torch.randn(6, 3)
    for function in IN_A_GRAPH.values():
        compiled = torch.compile(function, backend="sparse", options={"dense": "eager", "strict": True}, fullgraph=True)
        torch.testing.assert_close(compiled(a, x, t), function(a, x, t))


def test_transforms_of_a_compiled_function() -> None:
    a, x, t = sparse(matrix(4, 6)), torch.randn(6, 3), torch.randn(6, 3)
    dense = a.to_dense()
    compiled = torch.compile(lambda x: torch.relu(a @ x), backend="sparse", options={"dense": "eager"})
    torch.testing.assert_close(jvp(compiled, (x,), (t,))[1], jvp(lambda x: torch.relu(dense @ x), (x,), (t,))[1])
