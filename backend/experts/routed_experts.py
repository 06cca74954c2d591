"""routed-experts: replaces mixtures of experts by one operation, or by a sparse region for each expert if these are pruned.

    %sums = grouped_mm(%sorted, transpose(%gate_up), %ends)
    %each = grouped_mm(silu(%gate) * %up, ...)                 →    %y = gossamer::routed_mlp(%x, %experts, %scores, ...)
    %y = sum(view(index(%each * %scores, [%inverse])), [1])

Products that are not part of such a layer become gossamer::routed_product. Routers, shared experts and losses stay as they are.

layers.py and loops.py find the layers, products.py the products. replace_experts.py, sparse_experts.py and batched_products.py
replace them.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import fx

from gossamer.backend.experts.batched_products import take_batches
from gossamer.backend.experts.cost import predicted_gain
from gossamer.backend.experts.few_tokens import measured_layer, measured_product
from gossamer.backend.experts.layers import Layer, Mixtures
from gossamer.backend.experts.loops import loops
from gossamer.backend.experts.products import GROUPED, Product
from gossamer.backend.experts.pruned_mixture import is_taken, put_pruned
from gossamer.backend.experts.replace_experts import check, layer_backward, listed, product_backward, put_layer, put_product
from gossamer.backend.experts.sparse_experts import Judged, judged, main_weight
from gossamer.backend.experts.stored_experts import StoredProducts
from gossamer.backend.graph.backward_part import JointGraph
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Static, density, zero_heavy
from gossamer.backend.graph.nodes import hint, in_training
from gossamer.backend.graph.refused import Refused
from gossamer.backend.graph.size_assertions import drop_vain_assertions
from gossamer.backend.measuring.expert_times import CLEAR
from gossamer.backend.report.report import Decision
from gossamer.dialects.errors import CompileError


class RoutedExperts:
    """Replaces mixtures of experts, and products with the weights of experts."""

    name: ClassVar[str] = "routed-experts"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Replaces layers, then other products. Returns a decision for each weight of experts."""
        statics = context.inputs.match(graph)
        batches = take_batches(graph, statics, context)
        stored = StoredProducts(graph, {} if context.exported else statics)
        mixtures = Mixtures(graph)
        taking = _Taking(graph, context, statics, stored)
        unrolled = loops(graph)
        for layer in (*mixtures.layers, *unrolled):
            taking.take_layer(layer)
        for product in mixtures.products:
            taking.take_product(product)
        taking.leave_others()
        stored.put_back()
        if taking.decisions or unrolled:
            graph.eliminate_dead_code()
        if unrolled:
            drop_vain_assertions(graph)
        return batches + taking.decisions


class _Taking:
    """The replacements in one graph."""

    def __init__(self, graph: fx.Graph, context: GraphContext, statics: dict[fx.Node, Static], stored: StoredProducts) -> None:
        self.decisions: list[Decision] = []
        self._context, self._statics, self._stored = context, statics, stored
        self._joint = JointGraph(graph) if in_training(graph) else None
        self._measuring = context.measuring if self._joint is None and not context.exported else None
        grouped = [node for node in graph.nodes if str(node.target) in GROUPED]
        self._pruned: dict[fx.Node, Judged] = {
            node: found
            for node in grouped
            if not context.exported and (found := judged(node, self._statics, context)) is not None
        }
        self._taken: set[fx.Node] = set()

    def take_layer(self, layer: Layer) -> None:
        """Replaces a whole layer: by one region if both weights are sparse, else by the operation unless one weight is
        sparse."""
        products = (layer.up, layer.down)
        if all(map(self._is_sparse, products)) and is_taken(layer) and self._take_pruned(layer):
            return
        if any(self._is_sparse(product) or self._is_loop_of_sparse(product) for product in products):
            return
        if any(product.bare in self._stored for product in products):
            return  # stored products are faster than an operation on all elements
        try:
            for product in products:
                check(product)
                self._check_gain(product)
            backward = layer_backward(layer, self._joint)
            how = None if self._joint is not None else listed(layer, self._statics, self._context.options.verify)
        except Refused:
            return  # take_product handles the products one by one
        ratio = measured_layer(layer, self._statics, self._measuring)
        if self._left(products, ratio):
            return
        put_layer(layer, backward, how)
        for product in products:
            self._note(product, layer.routing.top, f"{layer.gate.activation}, one operation for the layer", ratio)

    def _take_pruned(self, layer: Layer) -> bool:
        """Replaces a layer whose products are sparse. Returns False if that fails; then its products are handled one by one."""
        up, down = (self._pruned[product.bare] for product in (layer.up, layer.down))
        try:
            self.decisions += put_pruned(layer, up, down, self._statics, self._context)
        except CompileError:
            return False
        for product in (layer.up, layer.down):
            self._taken.add(product.bare)
            del self._pruned[product.bare]
        return True

    def take_product(self, product: Product) -> None:
        """Replaces a product, unless its layer was replaced."""
        if product.bare in self._taken:
            return
        if self._is_sparse(product):
            self.decisions.append(self._pruned.pop(product.bare).put(self._statics, self._context))
            return
        if product.bare in self._stored:
            return
        try:
            check(product)
            self._check_gain(product)
            if not product.flat:
                raise Refused("its rows do not lie one after the other")
            backward = product_backward(product, self._joint)
        except Refused as problem:
            self.decisions.append(self._decision(product, f"left to torch: {problem}", None))
            return
        ratio = measured_product(product, self._statics, self._measuring)
        if self._left((product,), ratio):
            return
        put_product(product, backward)
        self._note(product, product.routing.top if product.routing else None, "its product alone", ratio)

    def leave_others(self) -> None:
        """Notes why the remaining products with pruned weights stay dense."""
        for found in self._pruned.values():
            found.forget()
            reason = found.reason or "no kernel for grouped_mm of other than a matrix, with a bias or another type of result"
            self.decisions.append(found.dense(reason))

    def _check_gain(self, product: Product) -> None:
        """Raises Refused if torch is predicted to be as fast, or the option `schedule` is "reference"."""
        if self._context.options.schedule == "reference":
            raise Refused("the option schedule asks for the reference")
        gain, least = predicted_gain(product), self._context.options.min_gain
        if gain is not None and gain < least:
            raise Refused(f"so few rows leave no gain of {least:g}x")

    def _is_sparse(self, product: Product) -> bool:
        found = self._pruned.get(product.bare)
        return found is not None and found.reason is None

    def _is_loop_of_sparse(self, product: Product) -> bool:
        """Whether the product belongs to a loop over pruned experts. Each of these may become a separate region."""
        if product.x is not None or self._joint is not None:
            return False
        statics = (main_weight(weight, self._statics) for weight in product.pieces.weights or (product.weight,))
        return any(static is not None and zero_heavy(static.tensor) for static in statics)

    def _left(self, products: Sequence[Product], ratio: float | None) -> bool:
        """Whether products with a few rows stay as they are, because torch was faster as measured. Notes the decisions."""
        if ratio is None or ratio <= CLEAR or 1 / ratio >= self._context.options.min_gain:
            return False
        reason = "left to torch: the operation was measured to be slower with so few rows"
        for product in products:
            self.decisions.append(self._decision(product, reason, None, ratio=ratio))
            self._taken.add(product.bare)
        return True

    def _note(self, product: Product, top: int | None, how: str, ratio: float | None) -> None:
        """Notes the decisions about the weights of a product that was replaced."""
        chosen = f", {top} for each token" if top is not None else ""
        reason = f"{product.experts} experts{chosen}, {how}"
        for weight in dict.fromkeys(product.pieces.weights) or (product.weight,):
            self.decisions.append(self._decision(product, reason, "routed rows", weight, ratio))
        self._taken.add(product.bare)

    def _decision(
        self, product: Product, reason: str, format: str | None, weight: fx.Node | None = None, ratio: float | None = None
    ) -> Decision:
        """Returns the decision about a product. `ratio` is the operation's time divided by torch's, if it was measured."""
        weight = weight or product.weight
        pruned = self._pruned.pop(product.bare, None)
        if pruned is not None:
            pruned.forget()
        static = main_weight(weight, self._statics)
        shape = tuple(hint(size) or 0 for size in weight.meta["val"].shape)
        name, share = (weight.name, 1.0) if static is None else (static.name, density(static.tensor))
        schedule = None if format is None else "routed"
        gain = predicted_gain(product) if ratio is None else 1 / ratio
        return Decision(name, "experts", shape, share, format, schedule, format is not None, reason, gain, ratio is not None)
