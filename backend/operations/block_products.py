"""Turns batches of small products that follow each other, as in Monarch matrices, into products with sparse weights.

    %h = bmm(permute(view(%x, [T, 32, 16]), [1, 0, 2]), %a)       [32, T, 8]          %h = mm(%x, D(%a))       D(%a) [512, 256]
    %y = bmm(permute(%h, [2, 1, 0]), %b)                          [8, T, 64]     →    %y = mm(%h, D(%b))       D(%b) [256, 512]
    view(permute(%y, [1, 2, 0]), [T, 512])                                            in one kernel

D(%a) is a block diagonal matrix. Its rows are in the order of x's features, its columns in the order in which the result is
used. So no value is transposed between the products.

To find these orders, the pass numbers the elements of a value and follows the numbers through all views. A number tells the
token and the feature of its element.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from gossamer.backend.devices.device import device_of
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.expressions import computed_from
from gossamer.backend.graph.fusable import is_elementwise
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import known_values, written_by
from gossamer.backend.graph.nodes import COPIES, VIEWS, ancestors, arguments, hints, in_training
from gossamer.backend.regions.contractions import contraction_at
from gossamer.backend.regions.cost import predicted, usual_tokens
from gossamer.backend.regions.decide import refusal
from gossamer.backend.report.report import Decision
from gossamer.passes.framework.family import Matrix
from gossamer.runtime.elements import WEIGHTS

aten = torch.ops.aten

_VIEWS = VIEWS | COPIES | {aten.unsqueeze.default, aten.squeeze.dim, aten.permute.default, aten.transpose.int}

_FEWEST = 64
"""Least number of tokens for which one kernel is faster than a batch of products. With fewer, reading the weights takes the
time."""

_LARGEST = 1 << 23
"""Most elements of a value whose views the pass follows."""

_PRIMES = ((3, 5, 7, 11, 13), (5, 11, 3, 13, 7))
"""Two sets of sizes that stand for open sizes. Views that mix tokens and features give different orders for the two."""


class BlockProducts:
    """Turns batches of products with static matrices into sparse products, where at least two follow each other."""

    name: ClassVar[str] = "block-products"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Makes sparse products of batches where that is faster. Returns a decision for each batch that follows another."""
        if in_training(graph) or context.options.schedule != "auto":
            return []
        statics, written = context.inputs.match(graph), written_by(graph)
        lasting = {node: static for node, static in statics.items() if node not in written}
        values, _ = known_values(graph, lasting, context.reads_constants)
        static = computed_from(graph, values)
        found = dict[fx.Node, _Batch]()
        for node in graph.nodes:
            if node.target is aten.bmm.default and (batch := _Batch.at(node, static, found)) is not None:
                found[node] = batch
        decisions = list[Decision]()
        for row in _rows(found):
            for batch in row:
                batch.emit()
            gain = _gain(row, values)
            pays = gain is not None and gain >= context.options.min_gain
            for batch in row if pays else reversed(row):
                (batch.finish if pays else batch.undo)()
            how = "one sparse weight" if pays else "left to torch: a sparse kernel is not faster"
            for batch in row:
                count, rows, columns = batch.sizes
                reason = f"{count} blocks of {rows}x{columns}, {len(row)} such products in a row: {how}"
                name = next((statics[node].name for node in ancestors([batch.weight]) if node in statics), str(batch.weight))
                schedule = "blocks" if pays else None
                decisions.append(Decision(name, "blocks", batch.sizes, 1.0, None, schedule, False, reason, gain))
        graph.eliminate_dead_code()
        return decisions


@dataclass
class _Batch:
    """A bmm of a value with static matrices, one for each block.

    node      the bmm
    weight    the static factor, [blocks, rows, columns], or [blocks, columns, rows] if `left`
    left      whether the weight is the left factor
    root      the value [..., features] that the other factor is a view of
    before    the batch whose result `root` is, if any
    order     the feature of `root` that each row of each block multiplies
    used      the last view [tokens, ...] of the result with the order of its features, or None
    made      the nodes that `emit` added
    product   the sparse product that `emit` added
    """

    node: fx.Node
    weight: fx.Node
    left: bool
    root: fx.Node
    before: "_Batch | None"
    order: "_Order"
    used: "tuple[fx.Node, _Order] | None" = None
    made: list[fx.Node] = field(default_factory=list)
    product: fx.Node | None = None

    @classmethod
    def at(cls, node: fx.Node, static: set[fx.Node], found: "dict[fx.Node, _Batch]") -> "_Batch | None":
        """Returns the batch of a bmm; None unless one factor is static and the other a view of features."""
        left, right = arguments(node)
        if (left in static) == (right in static):
            return None
        weight, x = (left, right) if left in static else (right, left)
        sizes = weight.meta["val"].shape
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            return None
        for root, before in _roots(x, found):
            order = _features(root, before, x, weight is left)
            if order is not None:
                batch = cls(node, weight, weight is left, root, before, order)
                batch.used = batch._used()
                return batch
        return None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The number of blocks, and the rows and columns of each."""
        count, rows, columns = map(int, self.weight.meta["val"].shape)
        return (count, columns, rows) if self.left else (count, rows, columns)

    def natural(self, numbers: Tensor) -> Tensor:
        """Returns elements [tokens, blocks x columns] of the result in the layout of the bmm's result."""
        count, _, columns = self.sizes
        batches = numbers.view(-1, count, columns).transpose(0, 1)
        return batches.mT if self.left else batches

    def _used(self) -> "tuple[fx.Node, _Order] | None":
        """Returns `used`: the last view of the result that keeps tokens together, and its order.

        The kernels for blocks write neighbouring results. So a view in another order is left to torch, unless elementwise
        operations read it and then another batch, because one kernel computes all of these.
        """
        best, node, path = None, self.node, list[fx.Node]()
        while len(node.users) == 1 and (user := next(iter(node.users))).target in _VIEWS:
            node = user
            path.append(node)
            if (order := self._order(path)) is not None and (len(order[0]) < 2 or _is_between(node)):
                best = node, order
        return best

    def _order(self, path: Sequence[fx.Node]) -> "_Order | None":
        """Returns the feature of the result at each place of a token after these views; None if they mix tokens."""
        width, orders = self.sizes[0] * self.sizes[2], list[Tensor]()
        for sizes in _PRIMES:
            shape = _sizes(self.node, sizes)
            if shape is None:
                return None
            numbers = torch.arange(shape.numel(), dtype=torch.int32).view(-1, width)
            seen = _followed(self.natural(numbers), path, sizes)
            if seen is None or not torch.equal(rows := seen.reshape(-1, width), rows[:1] + numbers[:, :1]):
                return None
            orders.append(rows[0].long())
        return _radix(orders[0]) if torch.equal(*orders) else None

    def emit(self) -> None:
        """Adds the sparse product to the graph. Nothing uses it yet."""
        make = Emitter(self.node)

        def emit(*args: Any, **options: Any) -> fx.Node:
            self.made.append(make(*args, **options))
            return self.made[-1]

        count, rows, columns = self.sizes
        root = self.before.product if self.before is not None else self.root
        assert root is not None
        if root.meta["val"].dim() != 2:
            root = emit(aten.reshape.default, root, [-1, count * rows])
        weight = emit(aten.permute.default, self.weight, [0, 2, 1]) if self.left else self.weight
        value = weight.meta["val"]
        places = emit(aten.arange.start_step, 0, count, 1, dtype=torch.int64, device=value.device)
        own = emit(
            aten.eq.Tensor, emit(aten.reshape.default, places, [count, 1, 1, 1]), emit(aten.unsqueeze.default, places, 1)
        )
        zero = emit(aten.full.default, [], 0.0, dtype=value.dtype, device=value.device)
        blocks = emit(aten.where.self, own, emit(aten.unsqueeze.default, weight, 2), zero)  # [count, rows, count, columns]
        sizes, turns = self.order
        matrix = emit(aten.permute.default, emit(aten.reshape.default, blocks, [*sizes, -1]), [*turns, len(sizes)])
        if self.used is not None:
            sizes, turns = self.used[1]
            back = [turns.index(place) + 1 for place in range(len(turns))]
            wide = emit(aten.reshape.default, matrix, [-1, *(sizes[turn] for turn in turns)])
            matrix = emit(aten.permute.default, wide, [0, *back])
        self.product = emit(aten.mm.default, root, emit(aten.reshape.default, matrix, [count * rows, count * columns]))

    def finish(self) -> None:
        """Replaces the batch by the product."""
        assert self.product is not None
        count, _, columns = self.sizes
        if self.used is not None:
            emit = Emitter(self.used[0])
            self.used[0].replace_all_uses_with(emit(aten.view.default, self.product, list(self.used[0].meta["val"].shape)))
            return
        emit = Emitter(self.node)
        parts = emit(aten.view.default, self.product, [-1, count, columns])
        self.node.replace_all_uses_with(emit(aten.permute.default, parts, [1, 2, 0] if self.left else [1, 0, 2]))

    def undo(self) -> None:
        """Removes the product from the graph."""
        for node in reversed(self.made):
            self.node.graph.erase_node(node)


def _roots(x: fx.Node, found: dict[fx.Node, _Batch]) -> "list[tuple[fx.Node, _Batch | None]]":
    """Returns the values that x is a view of, the furthest first, each with the batch whose result it is, if any."""
    path, results = [x], {node if batch.used is None else batch.used[0]: batch for node, batch in found.items()}
    while path[-1] not in results and path[-1].target in _VIEWS:
        path.append(path[-1].all_input_nodes[0])
    return [(node, results.get(node)) for node in reversed(path)]


def _is_between(node: fx.Node) -> bool:
    """Whether elementwise operations read a value, and a batch of products reads their result."""
    pending, seen = [user for user in node.users if is_elementwise(user)], set[fx.Node]()
    while pending:
        user = pending.pop()
        if user.target is aten.bmm.default:
            return True
        if user not in seen and (user.target in _VIEWS or is_elementwise(user)):
            seen.add(user)
            pending += user.users
    return False


def _features(root: fx.Node, before: _Batch | None, x: fx.Node, left: bool) -> "_Order | None":
    """Returns the feature of the root for each element of x [blocks, tokens, rows]; None if the views mix tokens."""
    path = list[fx.Node]()
    node = x
    while node is not root:
        path.append(node)
        node = node.all_input_nodes[0]
    path.reverse()
    if before is None:
        width = root.meta["val"].shape[-1] if root.meta["val"].dim() > 1 else None
    else:
        width = before.sizes[0] * before.sizes[2]
    if not isinstance(width, int):
        return None
    results = list[Tensor]()
    for sizes in _PRIMES:
        shape = _sizes(root, sizes)
        if shape is None:
            return None
        numbers = torch.arange(shape.numel(), dtype=torch.int32)
        start = numbers.view(shape)
        if before is not None and before.used is None:
            start = before.natural(numbers.view(-1, width))
        seen = _followed(start, path, sizes)
        if seen is None:
            return None
        seen = seen.mT if left else seen
        tokens = torch.arange(seen.shape[1], dtype=torch.int32).view(1, -1, 1)
        first = seen[:, :1]
        if shape.numel() != seen.shape[1] * width or not torch.equal(seen, first + tokens * width) or int(first.max()) >= width:
            return None
        results.append(first[:, 0].long())
    return _radix(results[0].flatten()) if torch.equal(*results) and results[0].numel() == width else None


_Order = tuple[list[int], list[int]]
"""A permutation of features that transposes dimensions: the sizes of the dimensions, and their order that sorts the
features."""


def _radix(numbers: Tensor) -> _Order | None:
    """Returns the permutation that these numbers from 0 form; None if it does not transpose dimensions."""
    sizes, steps, rest = list[int](), list[int](), numbers
    while len(rest) > 1:
        step = int(rest[1] - rest[0])
        runs = (rest.diff() != step).nonzero()
        size = int(runs[0]) + 1 if len(runs) else len(rest)
        lines = rest.view(-1, size) if len(rest) % size == 0 else rest.view(1, -1)
        if not torch.equal(lines, lines[:, :1] + step * torch.arange(lines.shape[1])):
            return None
        sizes.insert(0, size)
        steps.insert(0, step)
        rest = lines[:, 0]
    turns = sorted(range(len(sizes)), key=lambda place: -steps[place])
    ascending = torch.arange(len(numbers)).view([sizes[turn] for turn in turns])
    return (sizes, turns) if torch.equal(numbers.view(sizes).permute(turns), ascending) else None


def _rows(found: dict[fx.Node, _Batch]) -> list[list[_Batch]]:
    """Returns groups of two or more batches for many tokens. Each batch takes the result of an earlier one of its group, maybe
    after elementwise operations."""
    rows = list[list[_Batch]]()
    for batch in found.values():
        tokens = hints(batch.node.meta["val"].shape)
        if tokens is not None and tokens[2 if batch.left else 1] < _FEWEST:
            continue
        pending, before = [batch.root], set[fx.Node]()
        while pending:
            node = pending.pop()
            if node in found:
                before.add(node)
            elif node.target in _VIEWS or is_elementwise(node):
                pending += node.all_input_nodes
        joined = [row for row in rows if any(each.node in before for each in row)]
        rows = [row for row in rows if row not in joined] + [[*chain(*joined), batch]]
    return [row for row in rows if len(row) > 1]


def _gain(row: Sequence[_Batch], values: dict[fx.Node, Tensor]) -> float | None:
    """Returns how many times faster the sparse products are than the batches, predicted; None if there is no kernel."""
    batched, sparse = 0.0, 0.0
    for batch in row:
        assert batch.product is not None
        contraction = contraction_at(batch.product, values)
        if contraction is None or refusal(contraction) is not None:
            return None
        device, (count, rows, columns) = device_of(contraction.weight.device), batch.sizes
        found, tokens = predicted(contraction, contraction.tokens), usual_tokens(contraction)
        block = Matrix(rows, columns, 1, WEIGHTS[contraction.weight.dtype], device.bits, features=device.features)
        moved = device.transpose_us(count * (rows + columns) * tokens * contraction.weight.dtype.itemsize)
        batched += count * device.predict(block, tokens).dense_us + moved
        sparse += found.sparse_us
    return batched / sparse


def _followed(numbers: Tensor, path: Sequence[fx.Node], sizes: Sequence[int]) -> Tensor | None:
    """Returns the numbered elements of a value after the views of `path`; None if a shape is unknown."""
    for node in path:
        shape = _sizes(node, sizes)
        if shape is None or shape.numel() != numbers.numel():
            return None
        if node.target is aten.permute.default:
            numbers = numbers.permute(arguments(node)[1])
        elif node.target is aten.transpose.int:
            numbers = numbers.transpose(*arguments(node)[1:])
        elif node.target not in COPIES:
            numbers = numbers.reshape(shape)
    return numbers


def _sizes(node: fx.Node, sizes: Sequence[int]) -> torch.Size | None:
    """Returns the shape of a value with these sizes in place of its symbols; None if it is too large or depends on more
    symbols."""
    found = list[int]()
    for size in node.meta["val"].shape:
        if isinstance(size, int):
            found.append(size)
            continue
        free = sorted(size.node.expr.free_symbols, key=str)
        number = size.node.expr.subs(dict(zip(free, sizes, strict=False))) if len(free) <= 1 else None
        if number is None or not number.is_integer:
            return None
        found.append(int(number))
    shape = torch.Size(found)
    return shape if 0 < shape.numel() <= _LARGEST else None
