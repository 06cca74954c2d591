"""The backward part of a forward pattern: what enters and leaves it, against autograd on the pattern alone."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import checkpoint

from gossamer.backend.graph.backward_part import BackwardPart, JointGraph
from gossamer.backend.graph.nodes import hint
from gossamer.backend.graph.refused import Refused

aten = torch.ops.aten


def made(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_(grad)


class Traced:
    """The joint graph of a function, and the values of its nodes."""

    def __init__(self, function: Callable[..., Any], *inputs: Tensor, decomposed: bool = False, dynamic: bool = False) -> None:
        torch.compiler.reset()
        found: list[fx.GraphModule] = []

        def keep(joint: fx.GraphModule, given: Any, **more: Any) -> Any:
            found.append(joint)
            return default_partition(joint, given, **more)

        def plain(graph: fx.GraphModule, given: Any) -> Any:
            return make_boxed_func(graph.forward)

        table = select_decomp_table() if decomposed else None
        backend = aot_autograd(fw_compiler=plain, bw_compiler=plain, partition_fn=keep, decompositions=table)
        out = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        self.graph = found[0].graph
        self.module = found[0]
        self.joint = JointGraph(self.graph)

    def nodes(self, *targets: Any) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.target in targets and not n.meta.get("autograd_backward")]

    def between(self, inputs: Sequence[fx.Node], output: fx.Node) -> set[fx.Node]:
        """The forward nodes on a way from an input to the output."""
        after: set[fx.Node] = set()
        for node in self.graph.nodes:
            if not {*inputs, *after}.isdisjoint(node.all_input_nodes) and node not in inputs:
                after.add(node)
        found, pending = {output}, [output]
        while pending:
            more = [n for n in pending.pop().all_input_nodes if n in after and n not in found]
            found.update(more)
            pending += more
        return found

    def part(self, inputs: Sequence[fx.Node], output: fx.Node) -> BackwardPart:
        return self.joint.part(self.between(inputs, output), inputs, output)

    def check(self, inputs: Sequence[fx.Node], output: fx.Node, wanted: Sequence[fx.Node]) -> BackwardPart:
        """Compares what leaves for each input with autograd on the pattern alone, for random values."""
        found = self.part(inputs, output)
        assert [each for each in inputs if found.gradients[each]] == list(wanted)
        assert found.upstream is not None
        values = self._values()
        pattern = {piece for node in self.between(inputs, output) for piece in self.joint.operation(node)}
        alone = {each: values[each].detach().requires_grad_(each in wanted) for each in inputs}
        for node in self.graph.nodes:
            if node in pattern and node not in alone and node.all_input_nodes:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: alone.get(n, values[n]))
                alone[node] = node.target(*args, **kwargs)
        upstream = values[found.upstream].reshape(alone[output].shape)
        exact = torch.autograd.grad(alone[output], [alone[each] for each in wanted], upstream)
        for each, gradient in zip(wanted, exact, strict=True):
            total = sum(values[part] for part in found.gradients[each])
            torch.testing.assert_close(total, gradient, rtol=2e-3, atol=2e-3)
        return found

    def _values(self) -> dict[fx.Node, Any]:
        """What the nodes of the joint graph compute for random inputs."""
        values: dict[fx.Node, Any] = {}

        class Keeping(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                values[n] = super().run_node(n)
                return values[n]

        given = []
        for node in self.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            given.append(hint(value) if not isinstance(value, Tensor) else torch.randn([hint(n) or 0 for n in value.shape]))
        with torch.no_grad():
            Keeping(self.module).run(*given)
        return values


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.125 + bias, -1) @ v


def tensors(length: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return made(2, 4, length, 8), made(2, 4, length, 8) + 1, made(2, 4, length, 8) + 2


def ends(traced: Traced, *more: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """The operands of attention that is written out, and its last product."""
    scored, product = traced.nodes(aten.bmm.default)
    return [*scored.args, product.args[1], *more], product  # type: ignore[list-item]


def bias_of(traced: Traced) -> fx.Node:
    (added,) = traced.nodes(aten.add.Tensor)
    return added.args[1]  # type: ignore[return-value]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("shape", [(8, 8), (2, 4, 8, 8), (4, 1, 1), (1, 1, 1, 8)])
def test_gradients_of_all_operands_are_found(shape: tuple[int, ...], decomposed: bool, dynamic: bool) -> None:
    traced = Traced(attention, *tensors(), made(*shape), decomposed=decomposed, dynamic=dynamic)
    inputs, output = ends(traced, bias_of(traced))
    found = traced.check(inputs, output, inputs)
    assert len(found.nodes) >= 8


@pytest.mark.parametrize("decomposed", [False, True])
def test_dropout_belongs_to_it_with_what_it_draws(decomposed: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(torch.softmax(q @ k.mT, -1), 0.3) @ v

    traced = Traced(function, *tensors(), decomposed=decomposed)
    inputs, output = ends(traced)
    found = traced.part(inputs, output)
    assert all(found.gradients.values())
    assert any("dropout_backward" in str(node.meta["original_aten"]) for node in found.nodes)


def test_inputs_without_gradients_have_none() -> None:
    q, k, v = tensors()
    traced = Traced(attention, q, k.detach(), v, made(8, 8, grad=False))
    inputs, output = ends(traced, bias_of(traced))
    traced.check(inputs, output, [inputs[0], inputs[2]])
    traced = Traced(attention, q.detach(), k.detach(), v.detach(), made(8, 8))
    inputs, output = ends(traced, bias_of(traced))
    traced.check(inputs, output, inputs[3:])


def test_one_tensor_may_be_all_operands() -> None:
    """The sums of its gradients carry the number of the last operation, which is the product."""

    def function(x: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(x, x).softmax(-1), x)

    traced = Traced(function, made(2, 8, 8))
    scored, product = traced.nodes(aten.bmm.default)
    found = traced.check([scored.args[0]], product, [scored.args[0]])  # type: ignore[list-item]
    (x,) = found.gradients
    assert len(found.gradients[x]) == 1 and found.gradients[x][0].meta["is_gradient_acc"]


def test_sums_with_gradients_of_others_lie_outside() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT, -1) @ v + q.tanh() * k + v

    traced = Traced(function, *tensors())
    inputs, output = ends(traced)
    found = traced.check(inputs, output, inputs)
    assert not any(node.meta.get("is_gradient_acc") for node in found.nodes)


def test_recomputed_activations_and_autocast() -> None:
    def recomputed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return checkpoint(attention, q, k, v, bias, use_reentrant=False)

    def cast(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(q, k, v, bias).float()

    traced = Traced(recomputed, *tensors(), made(8, 8))
    inputs, output = ends(traced, bias_of(traced))
    traced.check(inputs, output, inputs)
    traced = Traced(cast, *tensors(), made(8, 8))
    inputs, output = ends(traced, bias_of(traced))
    assert all(traced.part(inputs, output).gradients.values())


def test_writing_in_place_belongs_to_it_with_what_is_added() -> None:
    """Its gradients carry numbers that no forward node has."""

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = q @ k.mT
        scores /= 4
        scores += bias
        scores.masked_fill_(torch.ones(8, 8).triu(1) == 1, -1e9)
        return scores.softmax(-1) @ v

    for decomposed in (False, True):
        traced = Traced(function, *tensors(), made(4, 8, 8), decomposed=decomposed)
        (added,) = traced.nodes(aten.add.Tensor)
        inputs, output = ends(traced, added.args[1])  # type: ignore[arg-type]
        found = traced.part(inputs, output)
        assert all(found.gradients.values())
        assert found.gradients[inputs[3]][0].meta["val"].shape == (4, 8, 8)


def test_sizes_that_only_values_say() -> None:
    def function(x: Tensor, kept: Tensor) -> Tensor:
        q = x[kept > 0].view(-1, 2, 8).transpose(0, 1)
        return torch.softmax(q @ q.mT, -1) @ (q * 2)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        traced = Traced(function, made(9, 16), made(9, grad=False))
    scored, product = traced.nodes(aten.bmm.default)
    found = traced.part([*scored.args, product.args[1]], product)  # type: ignore[list-item]
    assert all(found.gradients.values())


class Doubled(torch.autograd.Function):
    """A softmax with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Passed(Doubled):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize("own", [Doubled, Passed])
def test_custom_functions_are_refused(own: Any) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return own.apply(q @ k.mT) @ v

    traced = Traced(function, *tensors())
    inputs, output = ends(traced)
    with pytest.raises(Refused, match=r"computed in part by something else|custom function"):
        traced.part(inputs, output)


def test_values_inside_that_are_used_elsewhere_are_refused() -> None:
    def weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.softmax(q @ k.mT, -1)
        return p @ v, p

    def watched(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.softmax(q @ k.mT, -1)
        return p @ v, p.detach().amax()

    for function, reason in ((weights, "in part by something else"), (watched, "used elsewhere")):
        traced = Traced(function, *tensors())
        inputs, output = ends(traced)
        with pytest.raises(Refused, match=reason):
            traced.part(inputs, output)


def test_hooks_on_gradients_inside_are_refused() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = torch.softmax(q @ k.mT, -1)
        p.register_hook(lambda gradient: gradient * 3)
        return p @ v

    with torch._dynamo.config.patch(compiled_autograd=False):
        traced = Traced(function, *tensors())
    inputs, output = ends(traced)
    with pytest.raises(Refused, match="in part by something else"):
        traced.part(inputs, output)


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: F.silu(x) * y,
        lambda x, y: F.layer_norm(x, (8,)) * y,
        lambda x, y: torch.where(x > 0, x, 2.0) * y,
        lambda x, y: (x.exp() / x.exp().sum(-1, keepdim=True)) * y,
        lambda x, y: F.leaky_relu(x + y, 0.2),
        lambda x, y: x[torch.tensor([0, 1, 1])] * y[torch.tensor([2, 1, 0])],
    ],
)
def test_other_patterns(function: Callable[..., Tensor], decomposed: bool) -> None:
    traced = Traced(function, made(4, 8), made(4, 8) + 1, decomposed=decomposed)
    inputs = traced.graph.find_nodes(op="placeholder")[:2]
    output = traced.graph.output_node().args[0][0]  # type: ignore[index]
    traced.check(inputs, output, inputs)
