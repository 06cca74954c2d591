"""Decides which nodes of an ATen graph a region's epilogue can compute, and how it reads their operands."""

import operator
from typing import Literal

import torch
from torch import fx

from gossamer.backend.graph.nodes import COPIES, VIEWS, arguments, equal, equal_sizes
from gossamer.runtime.torch_internals import OpOverload

aten = torch.ops.aten
prims = torch.ops.prims

Kind = Literal["scalar", "vector", "column", "matrix", "mask", "position", "factor"]

ELEMENTWISE: set[OpOverload] = {
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default, aten.minimum.default),
    *(aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar, aten.rsub.Scalar, aten.pow.Tensor_Scalar),
    *(aten.neg.default, aten.abs.default, aten.exp.default, aten.erf.default, aten.tanh.default),
    *(aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default, aten.round.default),
    *(aten.relu.default, aten.sigmoid.default, aten.gelu.default, aten.silu.default, aten.leaky_relu.default),
    *(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.hardtanh.default),
    *(aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.where.self),
    *(prims.convert_element_type.default, aten._to_copy.default),
}
_OF_BOOLS = {
    *(aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.where.self, aten.add.Tensor, aten.mul.Tensor),
    *(prims.convert_element_type.default, aten._to_copy.default),
}
"""The operations whose result may be bools. Kernels would compare bools as numbers of one bit with a sign, where True is -1."""
_ROW_REDUCTIONS = {
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.var_mean.correction,
    aten.native_layer_norm.default,
}  # fmt: skip
_MEMORY_FORMATS = (None, torch.contiguous_format, torch.preserve_format)


def is_elementwise(node: fx.Node) -> bool:
    """Whether a kernel can compute this node on one element of the product at a time."""
    if node.op != "call_function" or node.target not in ELEMENTWISE:
        return False
    if node.target is aten.pow.Tensor_Scalar:
        return node.args[1] in (2, 3)
    if node.target is aten._to_copy.default and set(node.kwargs) != {"dtype"}:
        return False
    if node.meta["val"].dtype is torch.bool and node.target not in _OF_BOOLS:
        return False
    # To convert f64 to f16 or bf16, LLVM calls a function that torch's libraries do not have.
    narrow = node.meta["val"].dtype in (torch.float16, torch.bfloat16)
    values = (n.meta["val"] for n in node.all_input_nodes)  # these may be sizes
    return not (narrow and any(isinstance(each, torch.Tensor) and each.dtype is torch.float64 for each in values))


def is_identity(node: fx.Node, axis: int = -1) -> bool:
    """Whether this node keeps all values and the dimension of the features. A region on matrices leaves such nodes out."""
    if node.op != "call_function" or node.target not in VIEWS | COPIES:
        return False
    source, value = node.all_input_nodes[0].meta["val"], node.meta["val"]
    if axis != -1 and not equal_sizes(source.shape, value.shape):
        return False
    if node.target in VIEWS:
        return source.dim() > 0 and value.dim() > 0 and equal(source.shape[-1], value.shape[-1])
    return node.kwargs.get("memory_format") in _MEMORY_FORMATS


def is_row_reduction(node: fx.Node) -> bool:
    """Whether this node reduces the last dimension of a tensor (sum, mean, norm, maximum or minimum), with keepdim=True."""
    if node.op != "call_function" or node.target not in _ROW_REDUCTIONS:
        return False
    given = arguments(node)
    x = given[0].meta["val"]
    if not isinstance(x.shape[-1], int) or not x.dtype.is_floating_point:
        return False
    if node.target is aten.native_layer_norm.default:
        only_the_result = all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
        return len(given[1]) == 1 and only_the_result
    dims = given[1] if len(given) > 1 else None
    keeps = given[2] if len(given) > 2 else node.kwargs.get("keepdim", False)
    return dims in ([-1], [x.dim() - 1]) and keeps is True and node.kwargs.get("dtype") in (None, x.dtype)


def constant_of(node: fx.Node) -> float | int | bool | None:
    """Returns the number that a tensor is full of, or None if the graph does not show one."""
    value, dtypes = None, list[torch.dtype]()
    while node.op == "call_function" and node.target in VIEWS | COPIES | {prims.convert_element_type.default}:
        dtypes.insert(0, node.meta["val"].dtype)
        node = arguments(node)[0]
    if node.op == "call_function" and node.target is aten.full.default:
        value = node.args[1]
    elif node.op == "call_function" and node.target is aten.scalar_tensor.default:
        value = node.args[0]
    if not isinstance(value, int | float):
        return None
    number = torch.tensor(value, dtype=node.meta["val"].dtype)
    for dtype in dtypes:
        number = number.to(dtype)
    return number.item()


def kind_of(node: fx.Node, shape: torch.Size, axis: int = -1) -> Kind | None:
    """Returns how an elementwise node of a shape reads an operand, or None if a region cannot read it.

    axis  the dimension of the features; by default the last one
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    sizes = tuple(value.shape)
    if equal_sizes(sizes, shape):
        return "matrix"
    if all(equal(size, 1) for size in sizes):
        return "scalar"
    behind = axis % len(shape) - len(shape)  # the axis of features, counted from the end, as in all operands
    if -behind <= len(sizes) and equal(sizes[behind], shape[behind]):
        others = [*sizes[:behind], *sizes[len(sizes) + behind + 1 :]]
        if all(equal(size, 1) for size in others):
            return "vector"
    if behind != -1:
        return None
    return "column" if equal(sizes[-1], 1) and equal_sizes(sizes[:-1], shape[:-1]) else None
