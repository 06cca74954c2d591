"""Finds weights of linear layers that are Kronecker products although the model stores them whole, and takes them apart.

    linear(x, w, bias)      →      linear(x, kron(a, b), bias)        with a and b computed from w, again whenever it changes

Only exact factors count: their product differs from the weight only by rounding. If the weight changes and is no such product
any more, the whole graph is compiled. compile_module.py has smaller/compile.py call `plan`. rewrite.py then uses the factors.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gossamer.backend.graph.nodes import argument, hint
from gossamer.backend.graph.writes import written
from gossamer.backend.report.options import STRUCTURED_WEIGHTS, Options
from gossamer.backend.report.report import Decision
from gossamer.backend.smaller.build import SmallerGraph
from gossamer.backend.smaller.plan import Plan
from gossamer.backend.smaller.recipe import Known, Recipe
from gossamer.backend.structures.matrices import Given, Kronecker

_ROUNDINGS = 4
"""An element may differ from the product of its two factors by so many roundings. The left factor has rounded quotients."""

_UNKNOWN_TOKENS = 32


def plan(graph: fx.Graph, statics: Mapping[int, str], values: Sequence[Any], options: Options) -> Plan | None:
    """Returns the graph with factors for weights; None if there are none, or they do not pay. See `smaller.plan.plan`."""
    if options.schedule != "auto" or STRUCTURED_WEIGHTS in options.disable:
        return None
    placeholders = graph.find_nodes(op="placeholder")
    names = {placeholders[n]: name for n, name in statics.items()}
    known = {placeholders[n]: values[n] for n in statics if _is_plain(values[n])}
    splits, decisions, changed = dict[fx.Node, tuple[int, int]](), list[Decision](), written(graph)
    for node in graph.find_nodes(op="call_function", target=F.linear):
        weight = argument(node, 1, "weight")
        if weight not in known or weight in changed or weight in splits or (split := _split(known[weight])) is None:
            continue
        gain = _gain(node, tuple(known[weight].shape), split)
        rows, columns = (size // part for size, part in zip(known[weight].shape, split, strict=True))
        what = f"its weight is kron of {rows}x{columns} and {split[0]}x{split[1]}"
        shape = tuple(known[weight].shape)
        if gain >= options.min_gain:
            splits[weight] = split
            decisions.append(Decision(names[weight], "linear", shape, 1.0, "factors", "dense products", False, what, gain))
    return Plan(_with_factors(graph, splits, known), decisions) if splits else None


def _is_plain(value: object) -> bool:
    if not isinstance(value, Tensor) or type(value) not in (Tensor, torch.nn.Parameter) or not value.is_cpu:
        return False
    trains = value.requires_grad and torch.is_grad_enabled()
    return value.dim() == 2 and value.dtype in (torch.float32, torch.float64) and not trains


def _split(weight: Tensor) -> tuple[int, int] | None:
    """Returns the rows and columns of the right factor of a weight; None if it is no Kronecker product."""
    weight = weight.detach()
    for rows, columns in product(*(_divisors(size) for size in weight.shape)):
        if _may_split(weight, rows, columns) and not bool(_rest(weight, rows, columns).any()):
            return rows, columns
    return None


def _divisors(size: int) -> list[int]:
    return [each for each in range(2, size // 2 + 1) if size % each == 0]


def _may_split(weight: Tensor, rows: int, columns: int) -> bool:
    """Whether four elements suit a Kronecker product: two of the first and two of the last block must be proportional."""
    first, last = weight[0, 0] * weight[-1, -1], weight[rows - 1, columns - 1] * weight[-rows, -columns]
    return bool((first - last).abs() <= 16 * torch.finfo(weight.dtype).eps * first.abs()) and bool(first != 0)


def _right(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Returns the right factor: the block with the largest element."""
    i, j = divmod(int(weight.abs().argmax()), weight.shape[1])
    i, j = i // rows * rows, j // columns * columns
    return weight[i : i + rows, j : j + columns].clone()


def _left(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Returns the left factor: each block's element at the place of the largest one in its own, divided by the largest."""
    i, j = divmod(int(weight.abs().argmax()), weight.shape[1])
    return weight[i % rows :: rows, j % columns :: columns] / weight[i, j]


def _rest(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Returns where a weight differs from the Kronecker product of its factors. NaN differs."""
    made = torch.kron(_left(weight, rows, columns), _right(weight, rows, columns))
    return ~((made - weight).abs() <= _ROUNDINGS * torch.finfo(weight.dtype).eps * weight.abs())


def _gain(node: fx.Node, shape: tuple[int, ...], split: tuple[int, int]) -> float:
    """Predicts how many times faster than with the whole weight the product is."""
    (rows, columns), (r, c) = shape, split
    x = argument(node, 0, "input").meta["example_value"]
    tokens = prod(_UNKNOWN_TOKENS if (known := hint(size)) is None else known for size in x.shape[:-1])
    factors = Kronecker(Given(node, columns // c, rows // r, turned=True), Given(node, c, r, turned=True))
    return Given(node, columns, rows, turned=True).cost(tokens) / factors.cost(tokens)


def _with_factors(graph: fx.Graph, splits: Mapping[fx.Node, tuple[int, int]], known: Mapping[fx.Node, Tensor]) -> SmallerGraph:
    """Returns a copy of the graph that takes factors in place of weights, and multiplies with their Kronecker products."""
    recipe, made = Recipe(graph, known), fx.Graph()
    env, inputs, zeros = dict[fx.Node, fx.Node](), list[tuple[Known, fx.Node, fx.Node]](), list[Known]()
    whole, last = dict[fx.Node, fx.Node](), None
    placeholders = graph.find_nodes(op="placeholder")
    for node in placeholders:
        last = env[node] = made.node_copy(node)
    for weight, (rows, columns) in splits.items():
        source = recipe.of(weight)
        assert source is not None
        zeros.append(recipe(_rest, source, rows, columns))
        for function in (_left, _right):
            with made.inserting_after(last):
                last = made.placeholder(f"factor_{len(inputs)}")
            inputs.append((recipe(function, source, rows, columns), last, weight))
    for weight, number in zip(splits, range(0, len(inputs), 2), strict=True):
        whole[weight] = made.call_function(torch.kron, (inputs[number][1], inputs[number + 1][1]))
        whole[weight].meta["example_value"] = weight.meta["example_value"]
    for node in graph.nodes:
        if node.op != "placeholder":
            linear = node.target is F.linear and argument(node, 1, "weight") in whole
            places = {**env, **whole} if linear else env
            env[node] = made.node_copy(node, places.__getitem__)
    for weight in splits:
        if not env[weight].users:
            made.erase_node(env.pop(weight))
    module, leaves = recipe.finish([each for each, _, _ in inputs], zeros)
    return SmallerGraph(
        made,
        [n for n, node in enumerate(placeholders) if node in env],
        [placeholders.index(leaf) for leaf in leaves],
        module,
        [(each.value, node, weight) for each, node, weight in inputs],
    )
