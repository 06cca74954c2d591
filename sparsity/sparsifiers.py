"""Sparsifiers choose which elements of a dense tensor to keep, and in which format. `gossamer.sparsify` applies them.

    w = gossamer.sparsify(weight, "magnitude", density=0.1)            a SparseTensor
    model = gossamer.sparsify(model, "nm", n=2, m=4)                   every linear layer under a mask
    model = gossamer.sparsify(model, "nm", skip=["lm_head", "*.gate"]) but these

A sparsifier is a function that takes a dense tensor and returns a SparseTensor of its shape.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from gossamer.dialects.errors import OptionError
from gossamer.dialects.format import Format
from gossamer.dialects.option_check import check_name, check_share, did_you_mean
from gossamer.runtime.modules.when_held import say_held
from gossamer.sparsity.pruning.choose_layers import Layers, chosen_layers, is_transposed, none_chosen, weight_names
from gossamer.sparsity.pruning.mask import Mask, parametrize_pruned
from gossamer.sparsity.pruning.norm_hooks import remover_of_norm
from gossamer.sparsity.pruning.parametrizations import register_parametrization
from gossamer.sparsity.pruning.patterns import NM, Block, Unstructured
from gossamer.sparsity.pruning.stored_layers import is_stored
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor
from gossamer.sparsity.torch_functions.open_experts import expert_weights
from gossamer.sparsity.torch_functions.plain_model import plain_model, plain_name

Sparsifier = Callable[..., SparseTensor]
Named = TypeVar("Named", bound=Sparsifier)
Model = TypeVar("Model", bound=nn.Module)

_SPARSIFIERS: dict[str, Sparsifier] = {}


def register_sparsifier(name: str) -> Callable[[Named], Named]:
    """Decorator that gives a sparsifier a name for `sparsify`. A sparsifier takes a dense tensor and options, and returns a
    SparseTensor.
    """

    def register(function: Named) -> Named:
        if name in _SPARSIFIERS:
            raise OptionError(f"there is a sparsifier called '{name}' already: choose another name")
        _SPARSIFIERS[name] = function
        return function

    return register


def _mask(sparsifier: Sparsifier, rows: Tensor, options: dict[str, Any]) -> Tensor:
    """Returns ones where a sparsifier keeps an element of a matrix [outputs, inputs], zeros elsewhere."""
    kept = sparsifier(rows, **options)
    return kept.with_values(torch.ones_like(kept.values())).to_dense()


@overload
def sparsify(target: Tensor, how: str | Sparsifier, **options: Any) -> SparseTensor: ...
@overload
def sparsify(
    target: Model, how: str | Sparsifier, *, only: Layers | None = None, skip: Layers = (), **options: Any
) -> Model: ...
def sparsify(target: Any, how: str | Sparsifier, *, only: Layers | None = None, skip: Layers = (), **options: Any) -> Any:
    """Applies a sparsifier. A tensor becomes a SparseTensor; the linear layers of a model get masks, in place.

    Returns the SparseTensor or the model. Each mask is a parametrization of the weight. The model trains on with its zeros, and
    `torch.compile(model, backend="sparse")` finds them. If a weight has a mask already, both apply. `gossamer.finalize(model)`
    makes plain weights, for saving.

    how  the name of a sparsifier, or a function; further arguments are its `options`:
      "magnitude"  density, format=CSR      keeps the largest elements
      "nm"         n=2, m=4                 keeps the n largest of every m neighbours in a row
      "block"      rows, columns, density   keeps the blocks with the largest sums of squares
    only, skip   which layers: a name ("lm_head"), a pattern ("encoder.*.query"), a compiled regular expression, a type, a
                 function of name and module, or a list of these

    Without `only`, all linear layers get masks, also `Conv1D` of transformers (GPT-2), but not one that shares its weight with
    an embedding. A type in `only` may be any module with a `weight` whose first dimension is the outputs. It may also be
    nn.MultiheadAttention, for its `in_proj_weight`; its `out_proj` is a linear layer. Experts of
    transformers, whose weights are parts of one parameter, get a mask for each expert.

    OptionError for an unknown name, a name that is no layer's, and options that the sparsifier does not take.
    """
    if not callable(how):
        check_name("sparsifier", how, _SPARSIFIERS)
    sparsifier = how if callable(how) else _SPARSIFIERS[how]
    takes = inspect.signature(sparsifier)
    try:
        takes.bind(target, **options)
    except TypeError as problem:
        known = [*takes.parameters][1:]
        hint = next((each for name in options if name not in known and (each := did_you_mean(name, known))), "")
        raise OptionError(f"{problem}{hint}: sparsifier '{how}' takes {', '.join(known)}") from None
    if isinstance(target, Tensor):
        return sparsifier(target, **options)
    layers = chosen_layers(target, only, skip, experts=True)
    if not layers:
        warnings.warn(f"gossamer.sparsify has changed nothing: {none_chosen(target, only, skip)}", stacklevel=2)
    names = {module: plain_name(name) for name, module in plain_model(target).named_modules()}
    for layer in layers:
        if is_stored(layer):
            raise OptionError(
                f"'{names[layer]}' stores only its nonzeros: call gossamer.finalize(model) first, which makes it plain"
            )
        if remover := remover_of_norm(layer):
            raise OptionError(
                f"the weight of '{names[layer]}' is computed from others: {remover.__name__}(layer, 'weight') of "
                "torch.nn.utils makes it plain first"
            )
        parametrize_pruned(layer)
        for part in weight_names(layer):
            register_parametrization(layer, part, Mask(_mask_of(sparsifier, layer, getattr(layer, part).detach(), options)))
    say_held(target)
    return target


@torch.inference_mode(False)  # training could not save a mask that was made within it
def _mask_of(sparsifier: Sparsifier, layer: nn.Module, weight: Tensor, options: dict[str, Any]) -> Tensor:
    """Returns the mask of a layer's weight, in the weight's shape."""
    if expert_weights(layer):
        turned = layer.is_transposed
        masks = [_mask(sparsifier, each.t() if turned else each, options) for each in weight]
        return torch.stack([each.t() if turned else each for each in masks])
    if is_transposed(layer):
        return _mask(sparsifier, weight.t(), options).t().contiguous()
    return _mask(sparsifier, weight.flatten(1), options).view_as(weight)


@register_sparsifier("magnitude")
def magnitude(dense: Tensor, density: float, format: Format = Format.CSR) -> SparseTensor:
    """Keeps the `density` (a fraction) of elements that are largest in absolute value, in a format."""
    return SparseTensor.from_dense(dense * Unstructured().mask(dense.abs(), _checked(density)), format)


@register_sparsifier("nm")
def nm(dense: Tensor, n: int = 2, m: int = 4) -> SparseTensor:
    """Keeps the n largest of every m neighbours in a row, in the format N:M."""
    return SparseTensor.from_dense(dense * NM(n, m).mask(dense.abs(), n / m), Format.nm(n, m))


@register_sparsifier("block")
def block(dense: Tensor, rows: int, columns: int, density: float) -> SparseTensor:
    """Keeps the `density` (a fraction) of blocks of rows x columns with the largest sums of squares, in BSR."""
    mask = Block(rows, columns).mask(dense.square(), _checked(density))
    return SparseTensor.from_dense(dense * mask, Format.bsr(rows, columns))


def _checked(density: float) -> float:
    check_share("density", density, whole=True)
    return density
