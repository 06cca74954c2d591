"""Walks through a model layer by layer. Each layer is pruned for the inputs that the pruned layers before it give.

`prune` and `decompose` call `Walk.run`. It cuts the model into stages (stages.py), collects the moments of each layer's inputs,
and calls `visit` with the layer's least-squares problem (layer_problem.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.dialects.errors import OptionError
from gossamer.sparsity.pruning.batches import Call
from gossamer.sparsity.pruning.layer_problem import Curvature, LayerProblem, Moments
from gossamer.sparsity.pruning.layers import Layer
from gossamer.sparsity.pruning.stages import (
    Group,
    Streams,
    Tail,
    as_the_model,
    caught,
    chain_of_blocks,
    first_of,
    groups_of,
    inputs_of,
    output_of,
    with_first,
)

Visit = Callable[[Layer, LayerProblem], Tensor | None]
"""Returns a layer's new weight, or None to leave it as it is."""

Dense = dict[Layer, tuple[Tensor, Tensor | None]]
"""The weights and biases of layers before they were pruned."""
Known = Mapping[str, Sequence[Any]]
"""Layers that an earlier run has pruned: by name, the weight [outputs, inputs], the bias, and more."""


class Walk:
    """Visits layers in the order in which a model calls them.

    damping     a share of the mean of each Hessian's diagonal, which is added to the diagonal
    sequential  whether layers get their inputs from the pruned layers before them, or from the dense ones
    blocks      the blocks that are calibrated one by one; [] if the model is one stage
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], calls: Sequence[Call], *, damping: float, sequential: bool = True
    ) -> None:
        self.model, self.layers, self.calls = model, list(layers), list(calls)
        self.damping, self.sequential = damping, sequential
        self._known: Known = {}
        self._later: list[tuple[Layer, tuple[Tensor, Tensor | None]]] = []
        with torch.no_grad():
            self.blocks = chain_of_blocks(model, layers, self.calls[0])
            if not as_the_model(model, self.blocks, layers, self.calls[0]):
                self.blocks = []

    def run(self, visit: Visit, done: Callable[[], None] = lambda: None, known: Known | None = None) -> None:
        """Visits all layers. Layers whose weights are `known` only get these weights. Calls `done` after each stage."""
        self._known, self._later = known or {}, []
        with torch.no_grad():
            if self.blocks:
                self._walk_blocks(visit, done)
            else:
                self._stage(self.model, self.layers, Streams(self.calls, self.calls), visit)
                done()
        for layer, parameters in self._later:
            layer.restore(*parameters)

    def _walk_blocks(self, visit: Visit, done: Callable[[], None]) -> None:
        before, inside, after = self._parts()
        dense = self._stage(self.model, before, Streams(self.calls, self.calls), visit)
        done()
        pruned = caught(self.model, self.calls, self.blocks[0])
        streams = Streams(pruned, pruned)
        if dense:
            with as_dense(dense):
                streams.dense = caught(self.model, self.calls, self.blocks[0])
        result: object = None
        for block, own in zip(self.blocks, inside, strict=True):
            dense = self._stage(block, own, streams, visit)
            streams, result = _next(block, streams, dense)
            done()
        if after:
            self._stage(Tail(self.model, self.blocks, result), after, self._calls_of_tail(streams), visit)
            done()

    def _calls_of_tail(self, streams: Streams) -> Streams:
        def of(stream: list[Call]) -> list[Call]:
            return [Call((first_of(x), c), {}, c.tokens) for x, c in zip(stream, self.calls, strict=True)]

        pruned = of(streams.pruned)
        return Streams(pruned if streams.same else of(streams.dense), pruned)

    def _parts(self) -> tuple[list[Layer], list[list[Layer]], list[Layer]]:
        """Returns the layers before the blocks, those in each block, and those after the blocks."""
        owner = {id(module): number for number, block in enumerate(self.blocks) for module in block.modules()}
        inside: list[list[Layer]] = [[] for _ in self.blocks]
        for layer in self.layers:
            if id(layer.module) in owner:
                inside[owner[id(layer.module)]].append(layer)
        outside = [layer for layer in self.layers if id(layer.module) not in owner]
        seen = set[Layer]()
        with ExitStack() as hooks:
            for each in outside:
                hooks.enter_context(each.module.register_forward_pre_hook(lambda *_, each=each: seen.add(each)))
            caught(self.model, self.calls[:1], self.blocks[0])
        return [each for each in outside if each in seen], inside, [each for each in outside if each not in seen]

    def _stage(self, module: nn.Module, layers: Sequence[Layer], streams: Streams, visit: Visit) -> Dense:
        """Visits the layers of a stage. Returns their dense parameters, and restores these if an exception ends it."""
        dense: Dense = {}
        try:
            self._visit(module, layers, streams, visit, dense)
        except BaseException:
            for layer, parameters in dense.items():
                layer.restore(*parameters)
            raise
        return dense

    def _visit(self, module: nn.Module, layers: Sequence[Layer], streams: Streams, visit: Visit, dense: Dense) -> None:
        if not layers:
            return
        for group in groups_of(module, streams.pruned[0], layers):
            if all(layer.name in self._known for layer in group.layers):
                for layer in group.layers:
                    weight, bias = self._known[layer.name][:2]
                    self._change(layer, weight, bias, dense)
                continue
            moments = self._moments(module, group, streams, dense)
            if moments is None:
                continue
            curvatures: dict[bool, Curvature] = {}
            for layer in group.layers:
                bias = layer.bias
                if (centred := bias is not None) not in curvatures:
                    curvatures[centred] = Curvature(moments, centred=centred, damping=self.damping)
                problem = LayerProblem.of(layer.weight.clone(), curvatures[centred])
                if (after := visit(layer, problem)) is not None:
                    self._change(layer, after, problem.bias(after.to(problem.weight), bias), dense)

    def _change(self, layer: Layer, weight: Tensor, bias: Tensor | None, dense: Dense) -> None:
        before = layer.parameters()
        layer.write(weight, bias)
        if self.sequential:
            dense[layer] = before
        else:  # the next layers get their inputs from the dense layer
            self._later.append((layer, layer.parameters()))
            layer.restore(*before)

    def _moments(self, module: nn.Module, group: Group, streams: Streams, dense: Dense) -> Moments | None:
        """Returns the moments of a group's inputs in both streams, None if the data do not reach the group."""
        layer = group.layers[0]
        found = None
        shared = streams.same and not dense
        for dense_call, pruned_call in zip(streams.dense, streams.pruned, strict=True):
            given = inputs_of(module, pruned_call, group)
            wanted = given
            if not shared:
                with as_dense(dense):
                    wanted = inputs_of(module, dense_call, group)
                if [x.shape for x in wanted] != [z.shape for z in given]:  # the pruned model routes tokens to other experts
                    wanted = given
            for z, x in zip(given, wanted, strict=True):
                rows = layer.rows(z, pruned_call.tokens)
                if found is None:
                    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
                    found = Moments(rows.shape[-1], dtype, rows.device, rows.shape[:-2])
                found.add(rows, rows if x is z else layer.rows(x, dense_call.tokens))
        if found is None or not found.count:
            return None
        if not found.finite:
            raise OptionError(
                f"the batches give '{layer.name}' inputs with NaN, infinity or squares beyond {found.z_z.dtype}: leave them out"
            )
        return found


def _next(block: nn.Module, streams: Streams, dense: Dense) -> tuple[Streams, object]:
    """Returns the streams after a block, and one result of the block."""
    shared = streams.same and not dense
    result: object = None
    pruned = []
    for call in streams.pruned:
        result = call.of(block)
        pruned.append(with_first(call, output_of(result)))
    if shared:
        return Streams(pruned, pruned), result
    with as_dense(dense):
        return Streams([with_first(call, output_of(call.of(block))) for call in streams.dense], pruned), result


@contextmanager
def as_dense(dense: Dense) -> Iterator[None]:
    """Gives layers their dense weights and biases within the context."""
    pruned = {layer: layer.parameters(copy=False) for layer in dense}
    for layer, parameters in dense.items():
        layer.hold(*parameters)
    try:
        yield
    finally:
        for layer, parameters in pruned.items():
            layer.hold(*parameters)
