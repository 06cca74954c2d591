"""Stages: a model cut where its activations are few, so that one piece at a time is calibrated and only that is computed.

embeddings │ block 0 │ block 1 │ … │ head

A stage computes from what the one before gave it, in two streams: what the dense model would compute, and what the pruned model
does. Between stages only these activations are kept. A model without a chain of blocks is one stage, computed from its inputs.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.sparsity.pruning.batches import Call
from gossamer.sparsity.pruning.layers import Layer


@dataclass
class Group:
    """Layers that are given the same tensor; `once` where a call of the model calls them once."""

    layers: list[Layer]
    once: bool


@dataclass
class Streams:
    """Calls of a stage's module: on what the dense model computes and on what the pruned one does; one list while equal."""

    dense: list[Call]
    pruned: list[Call]

    @property
    def same(self) -> bool:
        return self.dense is self.pruned


class _Stop(Exception):
    """Nothing behind this call is needed."""


def chain_of_blocks(model: nn.Module, layers: Sequence[Layer], call: Call) -> list[nn.Module]:
    """The blocks with the most layers that are called in order, each on what the one before gave; [] if there are none.

    Besides their first argument all blocks must be given the same. Found out by one call of the model.
    """
    wanted = {id(layer.module): layer.parameter.numel() for layer in layers}
    candidates = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1]
    held = {id(m): sum(wanted.get(id(inner), 0) for inner in m.modules()) for m in candidates}
    for each in sorted(candidates, key=lambda m: -held[id(m)]):
        if 2 * held[id(each)] >= sum(wanted.values()) and _is_chain(model, list(each), call):
            return list(each)
    return []


def _is_chain(model: nn.Module, blocks: list[nn.Module], call: Call) -> bool:
    seen: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = []
    with ExitStack() as hooks:
        for block in blocks:
            keep = block.register_forward_hook(
                lambda m, args, kwargs, out: seen.append((m, args, kwargs, out)), with_kwargs=True
            )
            hooks.enter_context(keep)
        call.of(model)
    if [id(m) for m, *_ in seen] != [id(block) for block in blocks] or not all(args or kwargs for _, args, kwargs, _ in seen):
        return False
    try:
        others = [rest_of(Call(args, kwargs)) for _, args, kwargs, _ in seen]
        passed = all(first_of(Call(a, k)) is output_of(before[3]) for (_, a, k, _), before in zip(seen[1:], seen, strict=False))
    except LookupError:
        return False
    return passed and all(same(other, others[0]) for other in others[1:])


def as_the_model(model: nn.Module, blocks: Sequence[nn.Module], layers: Sequence[Layer], call: Call) -> bool:
    """Whether a chain of blocks, called one by one and then its tail, computes what the model does.

    It does not where a head reads what several blocks gave, where something is changed in place between them, or where they
    remember what they were called with, as a cache does.
    """
    if not blocks:
        return True
    within = {id(module) for block in blocks for module in block.modules()}
    outside = [layer.module for layer in layers if id(layer.module) not in within]

    def given_outside(module: nn.Module, call: Call) -> list[Tensor]:
        given: list[Tensor] = []
        with ExitStack() as hooks:
            for each in outside:
                keep = each.register_forward_pre_hook(lambda _, args, kw: given.append(_input(args, kw)), with_kwargs=True)
                hooks.enter_context(keep)
            call.of(module)
        return given

    last: list[Any] = []
    with blocks[-1].register_forward_hook(lambda _, __, result: last.append(result)):
        wanted = given_outside(model, call)
    (first,) = caught(model, [call], blocks[0])
    given = first_of(first)
    others = with_first(first, given / 2 if given.is_floating_point() else given)
    try:
        _through(blocks, others)  # of which what follows must not know
        result = _through(blocks, first)
        found = given_outside(Tail(model, blocks, result), Call((output_of(result), call), {}))
    except Exception:  # a head that cannot do with what the last block gives
        return False
    return same([output_of(last[0]), *wanted], [output_of(result), *found])


def _through(blocks: Sequence[nn.Module], call: Call) -> Any:
    """What the last block gives, where the first is called so."""
    result: Any = None
    for block in blocks:
        result = call.of(block)
        call = with_first(call, output_of(result))
    return result


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def first_of(call: Call) -> Tensor:
    """The activations that a block is given; LookupError if they are no tensor."""
    value = call.args[0] if call.args else call.kwargs["hidden_states"]
    if not isinstance(value, Tensor):
        raise LookupError("the first argument is no tensor")
    return value


def rest_of(call: Call) -> tuple[Any, ...]:
    """The other arguments."""
    return (call.args[1:], {name: value for name, value in call.kwargs.items() if call.args or name != "hidden_states"})


def with_first(call: Call, value: Tensor) -> Call:
    """The call with other activations."""
    if call.args:
        return replace(call, args=(value, *call.args[1:]))
    return replace(call, kwargs={**call.kwargs, "hidden_states": value})


def output_of(result: Any) -> Tensor:
    """The activations that a block gives; LookupError if there are none."""
    value = result[0] if isinstance(result, tuple | list) and result else result
    if not isinstance(value, Tensor):
        raise LookupError("the result is no tensor")
    return value


def same(a: Any, b: Any) -> bool:
    """Whether two arguments are equal, tensors within them by content."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    try:
        return a is b or bool(a == b)
    except (RuntimeError, ValueError):
        return False


def caught(model: nn.Module, calls: Sequence[Call], block: nn.Module) -> list[Call]:
    """The calls of a block when the model is called."""
    found: list[Call] = []

    def keep(tokens: Tensor | None) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(Call(args, kwargs, tokens))
            raise _Stop

        return hook

    for call in calls:
        with block.register_forward_pre_hook(keep(call.tokens), with_kwargs=True), suppress(_Stop):
            call.of(model)
    return found


def inputs_of(module: nn.Module, call: Call, group: Group) -> list[Tensor]:
    """What a group of layers is given when a stage's module is called; it goes no further than it must."""
    found: list[Tensor] = []

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(_input(args, kwargs))
        if group.once:
            raise _Stop

    with group.layers[0].module.register_forward_pre_hook(hook, with_kwargs=True), suppress(_Stop):
        call.of(module)
    return found


def groups_of(module: nn.Module, call: Call, layers: Sequence[Layer]) -> list[Group]:
    """The layers in the order in which they are called, those together that are given the same tensor.

    A layer that this call reaches several times, or not at all, is a group of its own, at the end.
    """
    order: list[tuple[Layer, Tensor]] = []

    def keep(layer: Layer) -> Callable[..., None]:
        return lambda _, args, kwargs: order.append((layer, _input(args, kwargs)))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.module.register_forward_pre_hook(keep(layer), with_kwargs=True))
        call.of(module)
    times = Counter(layer for layer, _ in order)
    groups: list[Group] = []
    last: Tensor | None = None
    for layer, given in {layer: given for layer, given in order if times[layer] == 1}.items():
        if groups and last is given:
            groups[-1].layers.append(layer)
        else:
            groups.append(Group([layer], True))
        last = given
    return groups + [Group([layer], False) for layer in layers if times[layer] != 1]


class Tail(nn.Module):
    """A model whose blocks are done: called with what the last one gives, and the call of the model."""

    model: nn.Module
    blocks: Sequence[nn.Module]
    result: Any

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], result: Any) -> None:
        super().__init__()
        self.__dict__.update(model=model, blocks=blocks, result=result)

    def forward(self, activations: Tensor, call: Call) -> Any:
        """What the model gives for the call."""
        result = activations
        if not isinstance(self.result, Tensor):
            result = type(self.result)((activations, *self.result[1:]))
        own = [vars(block).get("forward") for block in self.blocks]  # as Accelerate's hooks put it there
        for block in self.blocks:
            vars(block)["forward"] = lambda *args, **kwargs: result
        try:
            return call.of(self.model)
        finally:
            for block, forward in zip(self.blocks, own, strict=True):
                del vars(block)["forward"]
                if forward is not None:
                    vars(block)["forward"] = forward
