"""The walk through a model: layer by layer, each pruned for what the layers before, pruned already, give it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gossamer.sparsity.pruning.batches import Call
from gossamer.sparsity.pruning.layer_problem import Curvature, LayerProblem, Moments
from gossamer.sparsity.pruning.layers import Layer
from gossamer.sparsity.pruning.stages import (
    Group,
    Streams,
    Tail,
    caught,
    chain_of_blocks,
    first_of,
    groups_of,
    inputs_of,
    output_of,
    with_first,
)

Visit = Callable[[Layer, LayerProblem], Tensor | None]
"""Gives a layer's new weight, None to leave it as it is."""


class Walk:
    """Visits layers in the order in which a model calls them.

    damping     of the layers' problems
    sequential  whether a layer sees what the pruned layers before it give; otherwise what the dense ones do
    blocks      the blocks that are calibrated one by one, [] where the model is walked as a whole
    reached     the layers that the data reached
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], calls: Sequence[Call], *, damping: float, sequential: bool = True
    ) -> None:
        self.model, self.layers, self.calls = model, list(layers), list(calls)
        self.damping, self.sequential = damping, sequential
        self.reached: list[Layer] = []
        with torch.no_grad():
            self.blocks = chain_of_blocks(model, layers, self.calls[0])

    def run(self, visit: Visit, done: Callable[[str], None] = lambda _: None) -> None:
        """Visits all layers; `done` hears the name of each stage when it is finished."""
        streams = Streams(self.calls, self.calls)
        with torch.no_grad():
            if not self.blocks:
                self._stage(self.model, self.layers, streams, visit)
                return done("model")
            before, inside, after = self._parts()
            dense = self._stage(self.model, before, streams, visit)
            done("before the blocks")
            pruned = caught(self.model, self.calls, self.blocks[0])
            streams = Streams(pruned, pruned)
            if dense:
                with as_dense(dense):
                    streams.dense = caught(self.model, self.calls, self.blocks[0])
            for number, (block, own) in enumerate(zip(self.blocks, inside, strict=True)):
                dense = self._stage(block, own, streams, visit)
                streams, result = _next(block, streams, dense)
                done(f"block {number}")
            if after:
                tail = Tail(self.model, self.blocks, result)
                calls = [[Call((first_of(x), c), {}, c.tokens) for x, c in zip(s, self.calls, strict=True)] for s in (streams.dense, streams.pruned)]
                self._stage(tail, after, Streams(calls[0], calls[0] if streams.same else calls[1]), visit)
                done("after the blocks")

    def _parts(self) -> tuple[list[Layer], list[list[Layer]], list[Layer]]:
        """The layers before, in each of, and after the blocks."""
        owner = {id(module): number for number, block in enumerate(self.blocks) for module in block.modules()}
        inside: list[list[Layer]] = [[] for _ in self.blocks]
        for layer in self.layers:
            if id(layer.module) in owner:
                inside[owner[id(layer.module)]].append(layer)
        outside = [layer for layer in self.layers if id(layer.module) not in owner]
        seen = set[Layer]()
        hooks = [each.module.register_forward_pre_hook(lambda *_, each=each: seen.add(each)) for each in outside]
        caught(self.model, self.calls[:1], self.blocks[0])
        for hook in hooks:
            hook.remove()
        return [each for each in outside if each in seen], inside, [each for each in outside if each not in seen]

    def _stage(
        self, module: nn.Module, layers: Sequence[Layer], streams: Streams, visit: Visit
    ) -> dict[Layer, tuple[Tensor, Tensor | None]]:
        """Visits the layers of a stage; what was dense of those that changed."""
        dense: dict[Layer, tuple[Tensor, Tensor | None]] = {}
        if not layers:
            return dense
        for group in groups_of(module, streams.pruned[0], layers):
            moments = self._moments(module, group, streams, dense)
            if moments is None:
                continue
            curvatures: dict[bool, Curvature] = {}
            for layer in group.layers:
                self.reached.append(layer)
                bias = layer.bias
                if (centred := bias is not None) not in curvatures:
                    curvatures[centred] = Curvature(moments, centred=centred, damping=self.damping)
                before = layer.weight.clone()
                problem = LayerProblem.of(before, curvatures[centred])
                after = visit(layer, problem)
                if after is not None:
                    if self.sequential:
                        dense[layer] = layer.parameters()
                    layer.write(after, problem.bias(after, bias))
        return dense

    def _moments(
        self, module: nn.Module, group: Group, streams: Streams, dense: dict[Layer, tuple[Tensor, Tensor | None]]
    ) -> Moments | None:
        """What the layers of a group are given in both streams; None if the data do not reach them."""
        layer = group.layers[0]
        found = None
        shared = streams.same and not dense
        for dense_call, pruned_call in zip(streams.dense, streams.pruned, strict=True):
            given = inputs_of(module, pruned_call, group)
            wanted = given
            if not shared:
                with as_dense(dense):
                    wanted = inputs_of(module, dense_call, group)
                if [x.shape for x in wanted] != [z.shape for z in given]:  # routed otherwise
                    wanted = given
            for z, x in zip(given, wanted, strict=True):
                rows = layer.rows(z, pruned_call.tokens)
                if found is None:
                    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
                    found = Moments(rows.shape[1], dtype, rows.device)
                found.add(rows, rows if x is z else layer.rows(x, dense_call.tokens))
        return found


def _next(block: nn.Module, streams: Streams, dense: dict[Layer, tuple[Tensor, Tensor | None]]) -> tuple[Streams, object]:
    """The streams behind a block, and an example of what it gives."""
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
def as_dense(dense: dict[Layer, tuple[Tensor, Tensor | None]]) -> Iterator[None]:
    """Inside, layers have their dense weights and biases."""
    pruned = {layer: layer.parameters(copy=False) for layer in dense}
    for layer, parameters in dense.items():
        layer.hold(*parameters)
    try:
        yield
    finally:
        for layer, parameters in pruned.items():
            layer.hold(*parameters)
