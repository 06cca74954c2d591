"""Rewrites products with structured matrices so that they multiply with the factors. The whole matrix is never made.

    w = torch.kron(a, b)                    h = unflatten(x, -1, (q, s)) @ b.T
    y = F.linear(x, w, bias)         →      y = flatten((h.transpose(-1, -2) @ a.T).transpose(-1, -2), -2) + bias

This runs on Dynamo's graph, before autograd, so that gradients do not make the whole matrix, either. reader.py recognises
structured matrices, and matrices.py has the products with each kind.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.modes import changes_mode
from gossamer.backend.graph.nodes import ancestors, argument, hint
from gossamer.backend.graph.writes import written
from gossamer.backend.report.options import STRUCTURED_WEIGHTS, Options
from gossamer.backend.report.report import Decision, record
from gossamer.backend.structures.matrices import BlockDiagonal, Emit, Given, Matrix, Scaled
from gossamer.backend.structures.reader import MATMUL, Reader
from gossamer.runtime.torch_internals import FakeTensor

_UNKNOWN_TOKENS = 32
"""The size that is assumed for each size that is unknown at compile time."""


def use_factors(module: fx.GraphModule, inputs: Inputs, options: Options) -> None:
    """Rewrites one of Dynamo's graphs in place, and records the decisions. `inputs` are those of the graph."""
    graph = module.graph
    if STRUCTURED_WEIGHTS in options.disable or options.schedule != "auto" or not _may_have(graph):
        return
    placeholders = graph.find_nodes(op="placeholder")
    statics = {placeholders[n]: static.tensor for n, static in inputs.statics.items()}
    names = {placeholders[n]: name for n, name in inputs.names.items()}
    rewriter = _Rewriter(graph, statics, names, options.min_gain)
    decisions = list[Decision]()
    try:
        for node in [*graph.nodes][::-1]:  # users first: x @ (a @ b) before a @ b
            if (found := rewriter.rewrite(node)) is not None:
                decisions.append(found)
    except Exception as error:  # after any error, the other products stay as they are
        if options.strict:
            raise
        warnings.warn(
            f"gossamer: the search for structured matrices failed ({type(error).__name__}: {error}). The others stay whole; "
            f'options={{"disable": ["{STRUCTURED_WEIGHTS}"]}} leaves them whole from the start.',
            stacklevel=2,
        )
    if decisions:
        module.recompile()
        record(decisions, [], {}, graphs=0)


def _may_have(graph: fx.Graph) -> bool:
    """Whether a graph makes structured matrices at all, and has one mode throughout."""
    targets = {node.target for node in graph.nodes}
    makes = targets & {torch.kron, "kron", torch.block_diag, torch.diag, "diag", torch.diag_embed, "diag_embed", torch.einsum}
    return bool(makes) and not any(map(changes_mode, graph.nodes))


class _Rewriter:
    """Rewrites the products of one graph."""

    def __init__(
        self, graph: fx.Graph, statics: Mapping[fx.Node, Tensor], names: Mapping[fx.Node, str], min_gain: float
    ) -> None:
        self._statics, self._names, self._min_gain = statics, names, min_gain
        self._graph, self._reader, self._written = graph, Reader(statics), written(graph)
        self._erased = set[fx.Node]()

    def rewrite(self, node: fx.Node) -> Decision | None:
        """Rewrites a product with a structured matrix if that pays. Returns the decision; None if it is no such product."""
        for spelling in _spellings(node) if node.users else ():
            if spelling.factor.op == "placeholder":
                continue
            matrix = self._reader.matrix(spelling.factor)
            if matrix is None or not matrix.structure or not self._is_plain(spelling):
                continue
            if self._stays_static(matrix):
                return None
            matrix = matrix.transposed if spelling.transposed else matrix
            tokens = _tokens(spelling.x, matrix)
            gain = (Given(spelling.factor, matrix.rows, matrix.columns).cost(tokens) + matrix.made) / matrix.cost(tokens)
            pays = gain >= self._min_gain and self._put(node, spelling, matrix)
            decision = self._decision(node, spelling.factor, matrix, gain, pays)
            if pays:
                self._erase_dead(node)
            return decision
        return None

    def _is_plain(self, spelling: "_Spelling") -> bool:
        """Whether both factors have one type, and no node writes to a value that the matrix is made of."""
        values = [each.meta["example_value"] for each in (spelling.x, spelling.factor)]
        types = {(value.dtype, value.device) for value in values}
        fake = isinstance(values[0], FakeTensor)
        return fake and len(types) == 1 and not self._written.intersection(ancestors([spelling.factor]))

    def _stays_static(self, matrix: Matrix) -> bool:
        """Whether a matrix is a block diagonal of weights that are not trained. Sparse kernels compute such products."""
        if isinstance(matrix, Scaled):
            return self._stays_static(matrix.matrix)
        blocks = matrix.blocks if isinstance(matrix, BlockDiagonal) else ()
        leaves = [block.node for block in blocks if isinstance(block, Given) and block.node in self._statics]
        trained = torch.is_grad_enabled() and any(self._statics[leaf].requires_grad for leaf in leaves)
        return bool(blocks) and len(leaves) == len(blocks) and not trained

    def _put(self, node: fx.Node, spelling: "_Spelling", matrix: Matrix) -> bool:
        """Replaces the product by one with the factors. Returns False if torch cannot trace that for these sizes."""
        made, x = list[fx.Node](), spelling.x
        emit, turn = self._emit(node, x, made), spelling.left and x.meta["example_value"].dim() > 1
        try:
            y = matrix.multiplied(emit, emit(torch.transpose, x, -1, -2) if turn else x)
            if turn:
                y = emit(torch.transpose, y, -1, -2)
            if spelling.bias is not None:
                y = emit(torch.add, y, spelling.bias)
            if y.meta["example_value"].dtype != (wanted := node.meta["example_value"].dtype):  # a bias under autocast
                y = emit(Tensor.to, y, wanted)
            y = emit(Tensor.contiguous, y)
        except Exception:  # torch asked for an unknown size
            y = None
        if y is None or not _alike(y.meta["example_value"], node.meta["example_value"]):
            for each in reversed(made):
                self._graph.erase_node(each)
            return False
        node.replace_all_uses_with(y)
        return True

    def _emit(self, node: fx.Node, x: fx.Node, made: list[fx.Node]) -> Emit:
        def emit(function: Any, *args: Any) -> fx.Node:
            with self._graph.inserting_before(node):
                call = self._graph.call_function(function, args)
            made.append(call)
            call.meta = {key: value for key, value in node.meta.items() if key != "example_value"}
            with x.meta["example_value"].fake_mode:
                call.meta["example_value"] = function(*fx.map_arg(args, lambda each: _in_mode_of(each, x)))
            return call

        return emit

    def _erase_dead(self, product: fx.Node) -> None:
        """Erases a product without users, and the matrices that only it needed."""
        pending = [product]
        while pending:
            node = pending.pop()
            if node.users or node.op not in ("call_function", "call_method") or node in self._written or node in self._erased:
                continue
            inputs = node.all_input_nodes
            self._graph.erase_node(node)
            self._erased.add(node)
            pending += inputs

    def _decision(self, node: fx.Node, factor: fx.Node, matrix: Matrix, gain: float, pays: bool) -> Decision:
        leaves = [each for each in ancestors([factor]) if each in self._names]
        name = max(leaves, key=lambda leaf: leaf.meta["example_value"].numel(), default=None)
        called = self._names[name] if name is not None else str(factor)
        op = "linear" if node.target is F.linear else "matmul"
        shape = matrix.rows, matrix.columns
        if pays:
            return Decision(called, op, shape, 1.0, "factors", "dense products", False, f"x times {matrix.structure}", gain)
        return Decision.dense(called, op, shape, 1.0, f"{matrix.structure}: the whole matrix is as fast", gain)


@dataclass(frozen=True)
class _Spelling:
    """One way to read a product.

    x, factor   the factors; `factor` is a matrix
    bias        added to the product, if any
    transposed  whether x is multiplied with the transpose of `factor`
    left        whether `factor` is the left factor
    """

    x: fx.Node
    factor: fx.Node
    bias: fx.Node | None = None
    transposed: bool = False
    left: bool = False


def _spellings(node: fx.Node) -> list[_Spelling]:
    """Returns the ways to read a node as a product."""
    if node.target is F.linear:
        x, weight, bias = argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")
        return [_Spelling(x, weight, bias, transposed=True)]
    if node.target not in MATMUL or len(node.args) != 2 or node.kwargs:
        return []
    left, right = node.args
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return []
    return [_Spelling(left, right), _Spelling(right, left, transposed=True, left=True)]


def _in_mode_of(node: fx.Node, x: fx.Node) -> Any:
    """Returns the fake value of a node, in the fake mode of `x`. Inputs that Dynamo does not know have another mode."""
    value, mode = node.meta["example_value"], x.meta["example_value"].fake_mode
    if not isinstance(value, FakeTensor) or value.fake_mode is mode:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _tokens(x: fx.Node, matrix: Matrix) -> float:
    sizes = list(x.meta["example_value"].shape)
    elements = prod(_UNKNOWN_TOKENS if (known := hint(size)) is None else known for size in sizes)
    return max(1.0, elements / matrix.rows)


def _alike(made: Tensor, old: Tensor) -> bool:
    strides = zip(old.shape, made.stride(), old.stride(), strict=True) if made.dim() == old.dim() else ()
    same = all(first == second for size, first, second in strides if not isinstance(size, int) or size != 1)
    return made.shape == old.shape and same and made.dtype == old.dtype
