"""Finds chains: several contractions and the work between them, which one kernel computes tile by tile.

    %u = gelu(linear(%x, %up))                    chain(x, up, down, ...):   a tile of tokens goes through all stages
    %y = layer_norm(linear(%u, %down) + %x)   →     product(x, up)        gelu
                                                    product(0, down)      + x
                                                    rows(1)               sums, scale and shift

A chain ends in some node and takes in as many of the nodes before it as it can (cone.py). All its values have one row for each
token. It may compute sparse contractions, elementwise work, sums of rows, and attention within sequences.

In inference, other nodes may use values inside a chain, such as a residual, or keys that go to a cache. Those values become
further outputs. Nothing that is computed from them outside may come back into the chain. With attention, tokens may change
their order from sequence by sequence to position by position and back (token_order.py).

weights/plan.py calls `find_chains`, asks chain_cost.py which chains pay, and has build_chain.py compile them.
"""

import operator
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from gossamer.backend.chains.attention import Attention, PerHead, find_attention
from gossamer.backend.chains.cone import find_cone, rows_of, without_first_sums
from gossamer.backend.chains.token_order import swaps_tokens, token_orders
from gossamer.backend.devices.device import device_of
from gossamer.backend.devices.device_kernel import DTYPES
from gossamer.backend.graph.expressions import draws
from gossamer.backend.graph.fusable import is_elementwise, is_identity, is_row_reduction
from gossamer.backend.graph.layout import is_view, path
from gossamer.backend.graph.nodes import ancestors, equal, in_training, only_user
from gossamer.backend.regions.contractions import Contraction
from gossamer.backend.regions.grow_region import epilogue
from gossamer.backend.regions.low_rank import Inner, Product, find_low_rank, inner_at
from gossamer.backend.regions.matrix_functions import Extra, ProductBody, RowsBody
from gossamer.passes.chains.lower_sequence import MOST_TOKENS

aten = torch.ops.aten

_MOST_KEYS = 1536
"""The most keys that a query may see, on average, in attention inside a chain. A causal prefill of 2,048 tokens gains 7 %, one
of 6,144 tokens loses 13 % (Llama-like, 1,024 features, 90 % zeros, on Emerald Rapids)."""


@dataclass(frozen=True)
class Stage:
    """One step of a chain.

    body         a function on matrices: body(x, w, *extras) of a `contraction`, body(*extras) of row work, None for a `step`
    contraction  the product that the stage begins with, None if it has no weight
    step         attention, or an operation on single heads: a norm or a rotation
    operands     the values that it reads besides its weight: outputs of earlier stages, or inputs of the chain
    output       the node of the large graph that it computes
    """

    output: fx.Node
    operands: tuple[Extra, ...]
    body: fx.GraphModule | None = None
    contraction: Contraction | None = None
    step: Attention | PerHead | None = None

    @property
    def attention(self) -> Attention | None:
        """The step, if it is attention."""
        return self.step if isinstance(self.step, Attention) else None

    @property
    def columns(self) -> int:
        """Columns of the result, seen as a matrix with one row for each token."""
        width: int = self.output.meta["val"].shape[-1]
        return self.step.columns if isinstance(self.step, PerHead) else width


@dataclass(frozen=True)
class Chain:
    """A part of a graph that one kernel computes.

    stages       its steps, in order
    inputs       the values from outside, a matrix first
    members      the nodes of the large graph that it computes, in order
    results      the stages whose outputs nodes outside use; the last one ends the chain
    leaving      a list for each node that nodes outside use: the output of a stage, then the views of it that lead to this node
    by_position  inputs and outputs whose rows come position by position
    """

    stages: tuple[Stage, ...]
    inputs: tuple[Extra, ...]
    members: tuple[fx.Node, ...]
    results: tuple[Stage, ...]
    leaving: tuple[list[fx.Node], ...] = ()
    by_position: frozenset[fx.Node] = frozenset()

    @property
    def output(self) -> fx.Node:
        """The last node of the chain."""
        return self.members[-1]

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The outputs of `results`."""
        return tuple(stage.output for stage in self.results)

    @property
    def contractions(self) -> list[Contraction]:
        """The products, in order."""
        return [stage.contraction for stage in self.stages if stage.contraction is not None]

    @property
    def low_rank(self) -> list[Inner]:
        """The products with dense factors beside them."""
        sparse = {contraction.node for contraction in self.contractions}
        return [inner for node in self.members if node not in sparse and (inner := inner_at(node)) is not None]

    @property
    def attention(self) -> Attention | None:
        """The first attention. All attention of a chain is over the same sequences."""
        return next((stage.attention for stage in self.stages if stage.attention is not None), None)


def find_chains(graph: fx.Graph, sparse: dict[fx.Node, Contraction]) -> list[Chain]:
    """Returns the chains of a graph, in its order. `sparse` are the contractions to be sparse, by their nodes.

    A chain has at least two of them, or one with a product of low rank beside it.
    """
    sparse = {node: c for node, c in sparse.items() if device_of(c.weight.device).chains}
    # A chain's tile would be mostly empty with few tokens, and the schedules for few tokens leave low ranks to torch.
    low_rank = {} if all(map(few_tokens, sparse.values())) else find_low_rank(graph, sparse)
    products: dict[fx.Node, Product] = {**low_rank, **sparse}
    attention = [found for found in find_attention(graph) if not _is_long(found)]
    order = {node: number for number, node in enumerate(graph.nodes)}
    chains: list[Chain] = []
    claimed: dict[fx.Node, set[fx.Node]] = {}
    if not sparse or len(products) < 2:
        return chains
    several = not in_training(graph)
    for output in reversed(graph.nodes):
        if output in claimed or output.op != "call_function":
            continue
        for reorder in (True, False):
            cone = find_cone(output, products, attention, claimed, reorder, several)
            if sum(node in products for node in cone) < 2 or cone.isdisjoint(sparse):
                break
            nodes = without_first_sums(sorted(cone, key=order.__getitem__), products, attention)
            chain = _cut(nodes, products, attention)
            if chain is not None:
                chains.append(chain)
                before = set(ancestors(nodes))
                claimed |= dict.fromkeys(nodes, before)
                break
            if not any(swaps_tokens(node) for node in cone):
                break
    return chains[::-1]


def chain_of(nodes: list[fx.Node], products: Mapping[fx.Node, Product]) -> Chain | None:
    """Returns the chain of these nodes; None if they make none. They are in order, have no attention, and end in a product."""
    return _cut(nodes, dict(products), [])


def few_tokens(contraction: Contraction) -> bool:
    """Whether a product has so few tokens that a schedule for few tokens computes it."""
    tokens = contraction.tokens
    return tokens is not None and 0 < tokens <= MOST_TOKENS and not (contraction.dynamic or contraction.quantized)


def _is_long(attention: Attention) -> bool:
    """Whether sequences are too long for a chain. Torch's attention is faster per pair of tokens, and so wins on long ones."""
    length = attention.sizes[1]
    return isinstance(length, int) and length > _MOST_KEYS * (1 + attention.causal)


def _cut(nodes: list[fx.Node], products: dict[fx.Node, Product], attention: list[Attention]) -> Chain | None:
    """Returns the chain of these nodes, which are in order; None if a kernel cannot compute them.

    Reasons: attention over different sequences, contradicting token orders, a last node that computes nothing, inputs or
    outputs of unknown kinds, and random numbers that would be drawn in another order.
    """
    inside = set(nodes)
    within = [found for found in attention if found.node in inside]
    if any(found.sizes != within[0].sizes for found in within):
        return None
    orders, stages = token_orders(nodes, products, within), _stages(nodes, products, within)
    if orders is None or not stages or stages[-1].output is not nodes[-1] or not _holds_types(stages):
        return None
    inputs, leaving = _inputs(nodes, stages, within), _leaving(nodes, {stage.output for stage in stages})
    if inputs is None or leaving is None or not _keeps_draws(nodes, leaving):
        return None
    results = [stage for stage in stages if stage.output in {views[0] for views in leaving}]
    ends = [*(o.node for o in inputs if o.kind in ("matrix", "column")), *(stage.output for stage in results)]
    by_position = frozenset(node for node in ends if orders.get(node, False))
    return Chain(tuple(stages), inputs, tuple(nodes), tuple(results), tuple(leaving), by_position)


def _stages(nodes: list[fx.Node], products: Mapping[fx.Node, Product], attention: list[Attention]) -> list[Stage]:
    """Returns the stages that compute these nodes: products, attention, and row work for all others, in order."""
    inside, taken = set(nodes), set[fx.Node]()
    order = {node: number for number, node in enumerate(nodes)}
    low_rank = {node: product for node, product in products.items() if isinstance(product, Inner)}
    stages = list[Stage]()
    for node in nodes:
        product = products.get(node)
        if isinstance(product, Contraction) and node not in taken:
            closed = _Closed(inside, taken)
            members = epilogue(node, closed)
            members += _beside({*members}, low_rank, closed)
            stages.append(_product(product, sorted(members, key=order.__getitem__)))
            taken.update(members)
    for found in attention:
        stages += _attention(found)
        taken.update(found.members)
    groups = _groups([node for node in nodes if node not in taken], low_rank)
    stages += [_rows(group) for group in groups if not all(_vanishes(node) for node in group)]
    outputs = {stage.output for stage in stages}
    # Operands come before the output in the graph, so that this order has each stage after those that it reads.
    return sorted((_resolved(stage, outputs, inside) for stage in stages), key=lambda stage: order[stage.output])


def _beside(members: Container[fx.Node], low_rank: Mapping[fx.Node, Inner], closed: Container[fx.Node]) -> list[fx.Node]:
    """Returns the products of low rank that the epilogue `members` reads, and the elementwise nodes between."""
    found = list[fx.Node]()
    for node in low_rank:
        path = [node]
        while (user := only_user(path[-1])) and user not in members and (is_elementwise(user) or is_identity(user)):
            path.append(user)
        if user in members and not any(each in closed for each in path):
            found += path
    return found


def _inputs(nodes: list[fx.Node], stages: list[Stage], attention: list[Attention]) -> tuple[Extra, ...] | None:
    """Returns the values from outside, a matrix first; None if a stage reads a value that a chain cannot pass to it."""
    inside, outputs = set(nodes), {stage.output for stage in stages}
    read = [operand for stage in stages for operand in stage.operands]
    if any(o.node in outputs and o.kind in ("scalar", "vector") for o in read):
        return None  # with a single token, a column [1, 1] is taken for a number
    inputs = dict.fromkeys(o for o in read if o.node not in outputs)
    first = next((o for o in inputs if o.kind == "matrix"), None)
    if first is None or any(o.node in inside or o.node.meta["val"].dtype not in DTYPES for o in inputs):
        return None
    if len({o.node for o in inputs}) < len(inputs):
        return None  # with a single token, [1, 1] is a number for some stages, and a matrix for others
    if not all(_has_rows(o, nodes[-1], attention) for o in inputs):
        return None
    return first, *(o for o in inputs if o is not first)


def _holds_types(stages: list[Stage]) -> bool:
    """Whether a chain can hold the values of these stages.

    These are floats, and float64 only if all are. Only quantized products may read int8 values.
    """
    contractions = [stage.contraction for stage in stages if stage.contraction is not None]
    quantized = any(contraction.quantized for contraction in contractions)
    read = {o.node.meta["val"].dtype for stage in stages for o in stage.operands if quantized or o.kind in ("matrix", "column")}
    dtypes = {stage.output.meta["val"].dtype for stage in stages}
    if not dtypes <= {*DTYPES, *([torch.int8] if quantized else [])}:
        return False
    if torch.float64 in (held := dtypes | read | {contraction.given for contraction in contractions}) and len(held) > 1:
        return False
    return all(
        user.target is aten._int_mm.default or is_identity(user)
        for stage in stages
        if stage.output.meta["val"].dtype is torch.int8
        for user in stage.output.users
    )


def _leaving(nodes: list[fx.Node], outputs: Container[fx.Node]) -> list[list[fx.Node]] | None:
    """Returns `Chain.leaving`; None if nodes outside use a value that is no output of a stage and no view of one."""
    inside, found = set(nodes), list[list[fx.Node]]()
    for node in nodes:
        if node is not nodes[-1] and all(user in inside for user in node.users):
            continue
        views = [node]
        while views[0] in inside and views[0] not in outputs and (is_view(views[0]) or _vanishes(views[0])):
            views.insert(0, path(views[0])[-2] if is_view(views[0]) else views[0].all_input_nodes[0])
        if views[0] in outputs:
            found.append(views)
        elif views[0] in inside:
            return None
    return found


def _keeps_draws(nodes: list[fx.Node], leaving: list[list[fx.Node]]) -> bool:
    """Whether random numbers are drawn in the order of the graph, though users of results move behind the chain."""
    inside, moved, drawn = set(nodes), {views[-1] for views in leaving}, False
    for node in nodes[0].graph.nodes if len(leaving) > 1 else ():
        moves = node not in inside and not moved.isdisjoint(node.all_input_nodes)
        if node is nodes[-1] or (drawn and not moves and draws(node)):
            return node is nodes[-1]
        if moves:
            moved.add(node)
            drawn |= draws(node)
    return True


def _has_rows(operand: Extra, output: fx.Node, attention: list[Attention]) -> bool:
    """Whether an input has as many rows as the chain needs: one a token, or one a position for tables of positions."""
    if operand.kind not in ("matrix", "column", "position"):
        return True
    counts = [rows_of(output)]
    if operand.kind == "position":
        counts.append(attention[0].call.values[0].shape[2])
    return any(equal(rows_of(operand.node), count) for count in counts)


def _vanishes(node: fx.Node) -> bool:
    """Whether a node computes nothing: it returns the values of its operand, perhaps with rows in another order."""
    return is_identity(node) or swaps_tokens(node)


def _attention(found: Attention) -> Iterator[Stage]:
    """Yields the stages of norms and rotations of heads, then that of attention itself."""
    for step in found.per_head:
        yield Stage(step.node, (Extra(step.heads.matrix, "matrix"), *step.extras), step=step)
    operands = [Extra(heads.matrix, "matrix") for heads in found.operands]
    operands += [Extra(found.mask, "mask")] if found.mask is not None else []
    yield Stage(found.output, tuple(operands), step=found)


def _product(contraction: Contraction, members: list[fx.Node]) -> Stage:
    body = ProductBody(contraction)
    for member in members:
        if member is not contraction.node:
            body.append(member)
    operands = (Extra(contraction.x, "matrix"), *body.extras)
    return Stage(members[-1], operands, body.finish(members[-1]), contraction)


def _rows(group: list[fx.Node]) -> Stage:
    body = RowsBody()
    for member in group:
        (body.keep if swaps_tokens(member) else body.append)(member)
    return Stage(group[-1], tuple(body.extras), body.finish(group[-1]))


@dataclass(frozen=True)
class _Closed:
    """Contains every node that no stage may take: those outside the chain, and those of earlier stages."""

    inside: set[fx.Node]
    taken: set[fx.Node]

    def __contains__(self, node: object) -> bool:
        return node not in self.inside or node in self.taken


def _groups(nodes: list[fx.Node], low_rank: Mapping[fx.Node, Inner]) -> Iterator[list[fx.Node]]:
    """Yields parts of these nodes with one output each. The nodes are in order.

    The operand of a product of low rank is an output of its own: the product reads each of its elements several times.
    """
    left, whole = dict.fromkeys(nodes), {product.x for product in low_rank.values()}
    while left:
        output = next(reversed(left))
        if is_row_reduction(output) and any(user.target is operator.getitem for user in output.users):
            del left[output]  # its results are in several groups, or outside: each group computes it
            continue
        group = {output}
        for node in reversed(left):
            if node is not output and node not in whole and node.users and all(user in group for user in node.users):
                group.add(node)
        yield [node for node in left if node in group]
        left = {node: None for node in left if node not in group}


def _resolved(stage: Stage, outputs: Container[fx.Node], inside: Container[fx.Node]) -> Stage:
    """Returns the stage with its operands behind views: outputs of stages, or values from outside."""
    operands = []
    for operand in stage.operands:
        node = operand.node
        while node in inside and node not in outputs and _vanishes(node):
            node = node.all_input_nodes[0]
        operands.append(Extra(node, operand.kind))
    return replace(stage, operands=tuple(operands))
