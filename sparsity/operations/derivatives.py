"""Differentiates operations, backward and forward, nested in any way: in eager code, by torch.func and in graphs.

An operation says what it keeps, and gives two formulas of operations that can be differentiated themselves:

    setup(ctx, inputs, outputs) -> tensors     the tensors to keep of a call; numbers become attributes of ctx
    backward(ctx, gradient) -> gradients       a gradient or None for each tensor among the inputs
    tangent(ctx, tangents) -> tangent          the tangent of the result, from those of the inputs (None for constants)

torch.library.register_autograd takes only the first formula (torch 2.13). With it tangents would be lost silently, torch.func
would refuse the operation, and its handling of lists would take longer than a small product.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gossamer.runtime.direct_call import KERNELS
from gossamer.runtime.operations import LIBRARY, Node, untraced
from gossamer.runtime.torch_internals import (
    AutoDispatchBelowAutograd,
    after_autograd_keyset,
    enable_single_level_autograd_function,
    enter_gradient_batch,
    forward_level,
    gradient_batch,
    gradients_of_batch,
    is_gradient_batch,
    leave_gradient_batch,
    refusal,
    set_forward_gradients,
    transforms_active,
)
from gossamer.runtime.torch_names import SPARSE_TENSORS, TRANSFORMS
from gossamer.sparsity.operations.dispatch import is_plain, watched

Setup = Callable[[Any, Sequence[Any], Sequence[Tensor]], Sequence[Tensor]]
Backward = Callable[[Any, Tensor], Sequence[Tensor | None]]
Tangent = Callable[[Any, Sequence[Tensor | None]], Tensor | None]
Operation = Callable[..., Any]
Formula = Callable[..., Sequence[Tensor | None]]

_single_level = refusal(TRANSFORMS) or enable_single_level_autograd_function


@dataclass(frozen=True)
class Derivative:
    """The derivatives of an operation's output with number `result`.

    keeps  names of arguments whose tensors are kept, such as "positions values result"; "result" stands for all outputs.
           Arguments that are no tensors become attributes of ctx. Or a function of the type `Setup`
    """

    keeps: str | Setup
    backward: Backward
    tangent: Tangent
    result: int = 0

    def __call__(self, name: str) -> Operation:
        """Registers the derivatives of gossamer::name, whose kernels are registered already.

        Returns a function that calls the operation, without torch's dispatcher if nothing observes operations.
        """
        backward, tangent, result = self.backward, self.tangent, self.result
        operation, kernel = getattr(torch.ops.gossamer, name).default, KERNELS[name]
        setup = _keeping(self.keeps, operation) if isinstance(self.keeps, str) else self.keeps
        listed = "Tensor[]" in str(operation._schema).partition("->")[2]

        class Differentiated(Node):
            @staticmethod
            def forward(ctx: Any, compute: Operation, inputs: Sequence[Any], *_: Tensor) -> Any:
                ctx.set_materialize_grads(False)
                output = compute()
                outputs = (output,) if isinstance(output, Tensor) else tuple(output)
                ctx.at, ctx.count = result % len(outputs), len(outputs)
                ctx.mark_non_differentiable(*(each for number, each in enumerate(outputs) if number != ctx.at))
                kept = setup(ctx, inputs, outputs)
                ctx.save_for_backward(*kept)
                ctx.save_for_forward(*kept)
                return output if isinstance(output, Tensor) else outputs

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
                gradient = gradients[ctx.at]
                if gradient is None:
                    return (None,) * len(ctx.needs_input_grad)
                return None, None, *_one_by_one(partial(backward, ctx), [gradient])

            @staticmethod
            def jvp(ctx: Any, _compute: None, _inputs: None, *tangents: Tensor | None) -> Any:
                if transforms_active():  # tangents may have tangents; torch turns their tracking off here
                    with set_forward_gradients(True):
                        found = tangent(_Primal(ctx), tangents)
                else:
                    (found,) = _one_by_one(lambda *own: [tangent(ctx, own)], tangents)
                return found if ctx.count == 1 else tuple(found if number == ctx.at else None for number in range(ctx.count))

        named: Any = type(name, (Differentiated,), {})  # the name that `grad_fn` shows
        apply = named.apply

        def on_autograd(keyset: Any, *inputs: Any) -> Any:
            compute, tensors = partial(_below, operation, keyset, inputs), _tensors(inputs)
            if transforms_active():  # the innermost one handles this operation
                with _single_level():
                    output = apply(partial(_seen_outside, compute), inputs, *tensors)
            elif forward_level._current_level >= 0 or _needs_gradient(tensors):
                output = apply(compute, inputs, *tensors)
            else:
                return compute()
            return [*output] if listed else output

        def call(*inputs: Any) -> Any:
            tensors = _tensors(inputs)
            if torch.compiler.is_compiling() or not all(map(is_plain, tensors)) or watched():
                return operation(*inputs)
            return apply(partial(kernel, *inputs), inputs, *tensors) if _needs_gradient(tensors) else kernel(*inputs)

        if (refuse := refusal(SPARSE_TENSORS)) is not None:
            on_autograd = call = refuse
        LIBRARY.impl(name, untraced(on_autograd), "Autograd", with_keyset=True)
        return call


def _one_by_one(formula: Formula, given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Returns what a formula gives for gradients or tangents, or for each of several at once.

    `is_grads_batched` of torch.autograd.grad and `vectorize` of torch.autograd.functional give several. Torch's own rule for
    these takes no operation with lists.
    """
    if not any(map(_is_batch, given)):
        return formula(*given)
    level = enter_gradient_batch() - 1
    leave_gradient_batch()
    return _of_levels(formula, given, level)


def _of_levels(formula: Formula, given: Sequence[Tensor | None], level: int) -> Sequence[Tensor | None]:
    """Does this for batches of several nested calls, of which `level` is the innermost."""
    if level == 0:
        return formula(*given)
    split = {at: gradients_of_batch(each, level, 0, 0) for at, each in enumerate(given) if each is not None and _is_batch(each)}
    split = {at: each for at, each in split.items() if len(each)}  # it is empty if all in this batch are the same
    if not split:
        return _of_levels(formula, given, level - 1)
    count = len(next(iter(split.values())))
    results = [
        _of_levels(formula, [split[at][number] if at in split else each for at, each in enumerate(given)], level - 1)
        for number in range(count)
    ]
    return [None if found[0] is None else gradient_batch(torch.stack(found), 0, level) for found in zip(*results, strict=True)]


def _is_batch(given: Tensor | None) -> bool:
    return given is not None and is_gradient_batch(given)


def _keeping(names: str, operation: Any) -> Setup:
    arguments = [argument.name for argument in operation._schema.arguments]

    def setup(ctx: Any, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        given = dict(zip(arguments, inputs, strict=False))
        for name, value in given.items():
            if not _tensors([value]):
                setattr(ctx, name, value)
        given["result"] = outputs
        return _tensors(given[name] for name in names.split())

    return setup


class _Primal:
    """The context of a node, with saved tensors without the tangents that are being computed."""

    def __init__(self, ctx: Any) -> None:
        self.__dict__.update(ctx.__dict__)
        self.needs_input_grad = ctx.needs_input_grad
        unpack = partial(forward_ad.unpack_dual, level=0)  # graphs open the level, but do not set torch's default for it
        self.saved_tensors = [each if each is None else unpack(each).primal for each in ctx.saved_tensors]


def _tensors(inputs: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors among the inputs of a call, also those in lists."""
    listed = (each if isinstance(each, list | tuple) else (each,) for each in inputs)
    return [each for several in listed for each in several if isinstance(each, Tensor)]


def _needs_gradient(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(each.requires_grad for each in tensors)


def _below(operation: Any, keyset: Any, inputs: Sequence[Any]) -> Any:
    """Runs the operation without derivatives."""
    with AutoDispatchBelowAutograd():
        return operation.redispatch(keyset & after_autograd_keyset, *inputs)


def _seen_outside(compute: Operation) -> Any:
    """Runs it so that an outer function transform still differentiates it."""
    with torch.enable_grad(), set_forward_gradients(True):
        return compute()
