"""Replaces mixtures of experts in exported programs: the kernels of an operation take its place.

    gossamer::routed_mlp(x, experts, scores, gate_up, …)    →    positions, order = exported([experts], "…")
                                                                 h = exported([order, x, gate_up, positions], "…")
                                                                 y = exported([scores, h, down, positions, order], "…")

The weights stay operands. In Python, an expert that does not exist is an error; here the nearest existing one is used.
"""

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import fx

from gossamer.backend.deploy.exported_region import Arranged, ExportedRegion, Way, call
from gossamer.backend.experts.replace_experts import mixture, routed_product
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.run.computed import known
from gossamer.backend.run.listed_experts import listed_mlp
from gossamer.dialects.errors import CompileError
from gossamer.dialects.experts import RoutedHiddenOp, RoutedProductOp, RoutedSumOp
from gossamer.dialects.open_ops import SortKeysOp
from gossamer.runtime.experts.activations import hidden_size
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity.compiler.op_ir import op_ir
from gossamer.sparsity.compiler.op_kernels import kernel_on, schedule_of
from gossamer.sparsity.experts.expert_weights import Weight
from gossamer.sparsity.experts.kernels import float_kernel, served

aten, prims = torch.ops.aten, torch.ops.prims


def export_experts(graph: fx.Graph, inputs: Inputs) -> int:
    """Replaces operations on experts in a graph by calls of kernels, in place. Returns the number of these calls.

    Raises CompileError if an operation cannot be exported.
    """
    made = 0
    for node in list(graph.nodes):
        if node.target in _EXPORTS:
            made += _EXPORTS[node.target](node, inputs)
    return made


@dataclass(frozen=True, eq=False)
class _Weight:
    """A weight [rows, columns] of floats for each expert.

    node    the weights, stored row by row, or column by column if `turned`
    bias    the biases, or None
    """

    node: fx.Node
    turned: bool
    bias: fx.Node | None
    rows: int
    columns: int

    @classmethod
    def of(cls, emit: Emitter, x: fx.Node, node: fx.Node, bias: fx.Node | None) -> "_Weight":
        """Returns the weight from the operands of an operation on x. Raises CompileError if no kernel reads it."""
        value = node.meta["val"]
        if value.dtype != x.meta["val"].dtype or not served(x.meta["val"], Weight(value, None, None)):
            raise CompileError(
                f"no kernel multiplies experts of {value.dtype} with tokens of {x.meta['val'].dtype}: export the model with "
                'options={"disable": ["routed-experts"]}, which leaves its experts to torch'
            )
        _, rows, columns = value.shape
        if turned := not value.is_contiguous():
            node = emit(aten.permute.default, node, [0, 2, 1])
        if bias is not None:
            bias = emit(prims.convert_element_type.default, bias, torch.float32)
        return cls(node, turned, bias, rows, columns)

    def operands(self, positions: fx.Node) -> list[fx.Node]:
        """Returns the operands that a region takes for the weight."""
        return [self.node, *([self.bias] if self.bias is not None else []), positions]

    def takes(self, first: int) -> Iterator[int | tuple[int, ...]]:
        """Yields what a kernel takes for the weight: weight, scales, bias, positions. Its operands begin at the number
        `first`."""
        yield first
        yield 0, self.rows, 1
        yield (0, self.rows) if self.bias is None else first + 1
        yield first + 1 + (self.bias is not None)


def _mlp(node: fx.Node, inputs: Inputs) -> int:
    arguments: Any = node.args
    x, experts, scores, gate_up, _, gate_up_bias, down, _, down_bias, activation, layout, _ = arguments
    emit = Emitter(node)
    weights = _Weight.of(emit, x, gate_up, gate_up_bias), _Weight.of(emit, x, down, down_bias)
    y = _put_mlp(emit, x, experts, scores, weights, activation, layout)
    _replace(node, {0: y})
    return 3


def _listed(node: fx.Node, inputs: Inputs) -> int:
    arguments: Any = node.args
    x, experts, scores, leaves, numbers, activation, layout, _, key = arguments
    given = [inputs.value(leaf) for leaf in leaves]
    if any(each is None for each in given) or any(isinstance(each, fx.Node) for each in numbers):
        raise CompileError("the weights of experts are computed from inputs, which cannot be exported")
    emit, names = Emitter(node), ("gate_up", "gate_up_bias", "down", "down_bias")
    values = known(key).current(given, numbers)
    first, first_bias, second, second_bias = (
        None if value is None else _constant(emit, node, f"{node.name}_{name}", value)
        for name, value in zip(names, values, strict=True)
    )
    assert first is not None and second is not None
    weights = _Weight.of(emit, x, first, first_bias), _Weight.of(emit, x, second, second_bias)
    node.replace_all_uses_with(_put_mlp(emit, x, experts, scores, weights, activation, layout))
    node.graph.erase_node(node)
    return 3


def _constant(emit: Emitter, node: fx.Node, name: str, value: torch.Tensor) -> fx.Node:
    assert node.graph.owning_module is not None
    node.graph.owning_module.register_buffer(name, value.detach())
    with node.graph.inserting_before(node):
        made = node.graph.get_attr(name)
    made.meta["val"] = emit.fake(value.detach())
    return made


def _put_mlp(
    emit: Emitter, x: fx.Node, experts: fx.Node, scores: fx.Node, weights: tuple[_Weight, _Weight], activation: str, layout: str
) -> fx.Node:
    first, second = weights
    top, dtype = _top(experts), x.meta["val"].dtype
    positions, order = _routes(emit, experts, first.node.meta["val"].shape[0])
    width = hidden_size(first.rows, layout)
    kernel = float_kernel(RoutedHiddenOp, dtype, first.columns, top, first.turned, activation=activation, layout=layout, keep=0)
    arranged = Arranged((((None, width), dtype),), (1, *first.takes(2), 0), (0, (0, first.rows)))
    hidden = _call(emit, kernel, arranged, [order, x, *first.operands(positions)])[0]
    scores = emit(prims.convert_element_type.default, scores, torch.float32)
    kernel = float_kernel(RoutedSumOp, dtype, second.columns, top, second.turned)
    operands = [scores, hidden, *second.operands(positions), order]
    arranged = Arranged((((None, second.rows), torch.float32),), (1, *second.takes(2), len(operands) - 1, 0), (0,), (0,))
    return emit(prims.convert_element_type.default, _call(emit, kernel, arranged, operands)[0], dtype)


def _product(node: fx.Node, inputs: Inputs) -> int:
    arguments: Any = node.args
    x, experts, values, _, bias = arguments
    emit = Emitter(node)
    weight, top, dtype = _Weight.of(emit, x, values, bias), _top(experts), x.meta["val"].dtype
    positions, order = _routes(emit, experts, values.meta["val"].shape[0])
    own = 1 if x.meta["val"].dim() == 3 else top
    rows = emit(aten.reshape.default, x, [-1, weight.columns])
    kernel = float_kernel(RoutedProductOp, dtype, weight.columns, own, weight.turned)
    arranged = Arranged((((None, weight.rows), dtype),), (1, *weight.takes(2), 0), (0,))
    y = _call(emit, kernel, arranged, [order, rows, *weight.operands(positions)])[0]
    node.replace_all_uses_with(emit(aten.reshape.default, y, [-1, top, weight.rows]))
    node.graph.erase_node(node)
    return 2


def _routes(emit: Emitter, experts: fx.Node, count: int) -> tuple[fx.Node, fx.Node]:
    """Emits the routes: where the slots of each expert begin in the order, and the order."""
    keys = emit(aten.clamp_max.default, emit(aten.clamp_min.default, experts, 0), count - 1)
    keys = emit(prims.convert_element_type.default, emit(aten.reshape.default, keys, [-1]), torch.int64)
    types = (torch.int64,) * 3
    kernel = kernel_on(torch.device("cpu"), op_ir, (SortKeysOp, types, (), ()), schedule_of(SortKeysOp))
    assert isinstance(kernel, RegionKernel)
    positions, order = _call(
        emit, kernel, Arranged((((count + 1,), torch.int64), ((None,), torch.int64)), (0,), (0, 1)), [keys]
    )
    return positions, order


def _call(emit: Emitter, kernel: RegionKernel, arranged: Arranged, operands: Sequence[fx.Node]) -> list[fx.Node]:
    key = hashlib.sha256(f"{kernel.key} {arranged}".encode()).hexdigest()[:16]
    region = ExportedRegion(key, arranged, (Way(inf, kernel, ()),)).shared()
    called = call(emit, region, operands)
    return [emit(operator.getitem, called, number) for number in range(len(arranged.results))]


def _top(experts: fx.Node) -> int:
    top = experts.meta["val"].shape[1]
    if not isinstance(top, int):
        raise CompileError("the number of experts for each token is open, and cannot be exported")
    return top


def _replace(node: fx.Node, results: dict[int, fx.Node]) -> None:
    for user in list(node.users):
        assert user.target is operator.getitem
        number: Any = user.args[1]
        if number in results:
            user.replace_all_uses_with(results[number])
            node.graph.erase_node(user)
    node.graph.eliminate_dead_code()


_EXPORTS: dict[Any, Callable[[fx.Node, Inputs], int]] = {mixture: _mlp, listed_mlp: _listed, routed_product: _product}
