"""Cuts a model into stages at its blocks, so that `prune` computes and calibrates one stage at a time.

embeddings │ block 0 │ block 1 │ … │ head

A stage computes from the output of the stage before it. It does so in two streams: one with the activations of the dense model,
one with those of the pruned model. Only the activations between two stages are kept in memory. A model without a chain of
blocks is one stage.
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
    """Layers that get the same input tensor. `once` says that a call of the model calls each of them once."""

    layers: list[Layer]
    once: bool


@dataclass
class Streams:
    """Calls of a stage's module on activations of the dense and of the pruned model; the same list while they are equal."""

    dense: list[Call]
    pruned: list[Call]

    @property
    def same(self) -> bool:
        return self.dense is self.pruned


class _Stop(Exception):
    """Ends a call of the model early, because nothing after this point is needed."""


def chain_of_blocks(model: nn.Module, layers: Sequence[Layer], call: Call) -> list[nn.Module]:
    """Returns the list of blocks with the most weights in which each block takes the output of the one before; else [].

    All blocks must get the same other arguments. One call of the model checks this.
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
    """Whether calling the blocks one by one, and then the rest of the model, computes the same as the model.

    It does not if a head reads outputs of several blocks, if code between the blocks changes tensors in place, or if blocks
    remember their arguments, as a cache does.
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
        _through(blocks, others)  # these blocks may not influence the next calls; a cache does
        result = _through(blocks, first)
        found = given_outside(Tail(model, blocks, result), Call((output_of(result), call), {}))
    except Exception:  # a head that needs more than the output of the last block
        return False
    return same([output_of(last[0]), *wanted], [output_of(result), *found])


def _through(blocks: Sequence[nn.Module], call: Call) -> Any:
    """Returns the result of the last block when `call` goes to the first."""
    result: Any = None
    for block in blocks:
        result = call.of(block)
        call = with_first(call, output_of(result))
    return result


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def first_of(call: Call) -> Tensor:
    """Returns the activations among a block's arguments; LookupError if they are no tensor."""
    value = call.args[0] if call.args else call.kwargs["hidden_states"]
    if not isinstance(value, Tensor):
        raise LookupError("the first argument is no tensor")
    return value


def rest_of(call: Call) -> tuple[Any, ...]:
    """Returns the arguments of a call other than the activations."""
    return (call.args[1:], {name: value for name, value in call.kwargs.items() if call.args or name != "hidden_states"})


def with_first(call: Call, value: Tensor) -> Call:
    """Returns the call with other activations."""
    if call.args:
        return replace(call, args=(value, *call.args[1:]))
    return replace(call, kwargs={**call.kwargs, "hidden_states": value})


def output_of(result: Any) -> Tensor:
    """Returns the activations in a block's result; LookupError if it has none."""
    value = result[0] if isinstance(result, tuple | list) and result else result
    if not isinstance(value, Tensor):
        raise LookupError("the result is no tensor")
    return value


def same(a: Any, b: Any) -> bool:
    """Whether two arguments are equal. Tensors are compared by their values."""
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
    """Returns the first call of a block in each call of the model. The model computes no further than that."""
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
    """Returns the inputs of a group of layers in a call of a stage's module. It stops after the first if there is only one."""
    found: list[Tensor] = []

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = _input(args, kwargs)
        found.append(given if group.once else given.clone())  # the module may go on and change it in place
        if group.once:
            raise _Stop

    with group.layers[0].module.register_forward_pre_hook(hook, with_kwargs=True), suppress(_Stop):
        call.of(module)
    return found


def groups_of(module: nn.Module, call: Call, layers: Sequence[Layer]) -> list[Group]:
    """Returns groups of layers in the order of their calls.

    Consecutive layers with the same input tensor are one group if nothing writes to it in between.

    A layer that this call reaches several times, or not at all, is a group of its own at the end.
    """
    order: list[tuple[Layer, Tensor, int | Tensor]] = []  # with the number of writes, or the values where torch counts none

    def keep(layer: Layer) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = _input(args, kwargs)
            order.append((layer, given, given.clone() if given.is_inference() else given._version))

        return hook

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.module.register_forward_pre_hook(keep(layer), with_kwargs=True))
        call.of(module)
    times = Counter(layer for layer, *_ in order)
    groups: list[Group] = []
    last: tuple[Tensor, int | Tensor] | None = None
    for layer, given, writes in (each for each in order if times[each[0]] == 1):
        if last is not None and last[0] is given and same(last[1], writes):
            groups[-1].layers.append(layer)
        else:
            groups.append(Group([layer], True))
        last = given, writes
    return groups + [Group([layer], False) for layer in layers if times[layer] != 1]


class Tail(nn.Module):
    """A model without its blocks: its arguments are the output of the last block, and the call of the model."""

    model: nn.Module
    blocks: Sequence[nn.Module]
    result: Any

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], result: Any) -> None:
        super().__init__()
        self.__dict__.update(model=model, blocks=blocks, result=result)

    def forward(self, activations: Tensor, call: Call) -> Any:
        """Returns the model's result for the call."""
        result = activations
        if not isinstance(self.result, Tensor):
            result = type(self.result)((activations, *self.result[1:]))
        own = [vars(block).get("forward") for block in self.blocks]  # set by hooks of Accelerate, if at all
        for block in self.blocks:
            vars(block)["forward"] = lambda *args, **kwargs: result
        try:
            return call.of(self.model)
        finally:
            for block, forward in zip(self.blocks, own, strict=True):
                del vars(block)["forward"]
                if forward is not None:
                    vars(block)["forward"] = forward
