"""`gossamer.quantize` stores the sparse linear layers of a model in int8, or in groups of 4- or 8-bit integers."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from gossamer.dialects.errors import OptionError
from gossamer.runtime.packers.nonzeros import count_nonzeros
from gossamer.sparsity.pruning.choose_layers import (
    Layers,
    chosen_layers,
    has_weight,
    is_transposed,
    none_chosen,
    weight_holders,
    weight_names,
)
from gossamer.sparsity.pruning.mask import make_plain_within, parametrize_pruned, parametrized_tensors
from gossamer.sparsity.pruning.norm_hooks import remover_of_norm
from gossamer.sparsity.pruning.stored_layers import is_stored, make_dense
from gossamer.sparsity.quantization.aware_linear import QuantizationAwareLinear
from gossamer.sparsity.quantization.grouped_linear import GROUP, GroupedLinear, check_columns
from gossamer.sparsity.quantization.input_grids import input_grids
from gossamer.sparsity.quantization.linear_layers import become_linear, sizes, why_not_linear
from gossamer.sparsity.quantization.quantized_experts import QuantizedExperts, why_no_experts
from gossamer.sparsity.quantization.quantized_linear import QuantizedLinear, check_finite
from gossamer.sparsity.quantization.stored_tables import BITS, TABLES, Shared, become_stored, why_no_table
from gossamer.sparsity.torch_functions.check_model import check_model
from gossamer.sparsity.torch_functions.open_experts import expert_weights
from gossamer.sparsity.torch_functions.plain_model import plain_model, plain_name

Model = TypeVar("Model", bound=nn.Module)

_ZEROS = 0.1
"""From this share of zeros on, a layer is quantized even if `only` does not name it."""


_FULL = 0.95
"""From this share of kept groups on, zeros hardly save memory or time, and a warning says so."""


@torch.inference_mode(False)
def quantize(
    model: Model,
    data: Iterable[Any] | None = None,
    *,
    weights: Literal["int8", "int4", "float16"] = "int8",
    group: int | None = None,
    aware: bool = False,
    only: Layers | None = None,
    skip: Layers = (),
) -> Model:
    """Gives linear layers of a pruned model integer weights, and tables few bits. Changes the model in place and returns it.

    weights  "int8", or "int4", which needs `group`
    group    with 16, each group of 16 weights along the inputs has a scale, and only groups with a nonzero are kept. Prune with
             `pattern="1x16"`. Inputs stay floats. It is for the few tokens of a decoder; see `GroupedLinear`
    data     batches as for `prune`: each layer gets one scale and zero point for all inputs (static quantization), by the least
             squared error (Nagel et al., 2021). Larger inputs are clipped. Use it only if you need fixed ranges; it is not
             faster
    aware    True keeps float weights, and rounds weights and inputs at every call, so that you can train the model (`distill`,
             `GradualMasks`, `train_sparse`; start these after this call). Another `quantize(model)` makes the weights int8
    only, skip  which layers, as for `sparsify`. Without `only`: linear layers with a tenth of zeros or more

    Without `group`:
    - Weights are symmetric, with a scale for each output, rounded to nearest. Zeros stay zeros. Masks are multiplied in.
    - Inputs are symmetric, with a scale for each token that is found at every call. Sums are exact (int32).
    - A layer stays the same object and becomes a `QuantizedLinear`, which is an nn.Linear; Conv1D of transformers, too.
      `weight_int8` and `weight_scale` are buffers. `weight` is computed from them and has no gradient. The gradient of the
      input goes straight through.
    - A token with NaN or infinity gives NaN.
    - `torch.compile(model, backend="sparse")` runs these layers by int8 kernels, alone or in chains, if these are predicted to
      be faster. If the CPU multiplies floats faster, kernels keep the integers as float32. `torch._int_mm` runs the other
      layers. NVIDIA GPUs have kernels for single layers.

    Experts of transformers (`gate_up_proj`, `down_proj`) that `only` names become integers of 8 or 4 bits with a scale for each
    row. With `group` or "int4", a scale belongs to 16 weights of 8 bits or 32 weights of 4 bits. Their tokens stay floats; see
    `QuantizedExperts`.

    Tables of nn.Embedding and nn.EmbeddingBag that `only` names become "int8", "int4" or "float16". Integers have a scale for
    each row; see `StoredEmbeddingBag`. "float16" is for tables alone.

    Some layers stay floats: convolutions, nn.MultiheadAttention, tied weights, and subclasses of nn.Linear that compute
    something else. A warning counts those that are pruned or were asked for.

    OptionError if `only` or `skip` name no layer, for other weights and groups, and for data that are empty or not finite.
    GossamerError for a weight that is not finite, or that has too many columns for groups, before anything changes.
    """
    check_model(model)
    if on_meta := next((name for name, parameter in model.named_parameters() if parameter.is_meta), None):
        raise OptionError(
            f"'{plain_name(on_meta)}' is on the meta device: gossamer.load fills it, and makes layers as its file has them"
        )
    if weights not in BITS:
        raise OptionError(f"weights={weights!r} is not supported: give 'int8' or 'int4', or 'float16' for tables of embeddings")
    grouped = group is not None or weights == "int4"
    if group not in (None, GROUP):
        raise OptionError(
            f"group={group!r} is not supported: weights are quantized in groups of {GROUP} along their inputs. Give "
            f"group={GROUP}"
        )
    if grouped and aware:
        raise OptionError("aware=True trains for weights of int8, not for groups: leave out group and weights, or aware")
    if data is not None and (grouped or aware):
        what = "layers with groups keep floats as inputs" if grouped else "aware=True finds a scale for each token"
        raise OptionError(f"{what}, so there is nothing to calibrate: leave out data")
    chosen = [layer for layer in chosen_layers(model, only, skip) if only is not None or _is_pruned(layer)]
    tables = [layer for layer in chosen if not aware and not why_no_table(layer)]
    layers = [layer for layer in chosen if not why_not_linear(layer)]
    bits = BITS[weights]
    experts = [] if aware else [each for each in chosen if not why_no_experts(each, bits, grouped)]
    if weights == "float16" and (layers or experts):
        raise OptionError(
            "weights='float16' is for tables: give only=[torch.nn.Embedding, torch.nn.EmbeddingBag], or their names"
        )
    names = {module: plain_name(name) for name, module in plain_model(model).named_modules()}
    for layer in layers:
        weight: Tensor = layer.weight  # type: ignore[assignment]
        check_finite(weight.values() if is_stored(layer) else weight, f"the weight of '{names[layer]}',")
        if grouped:
            check_columns(sizes(layer)[1])
    for layer in tables:
        check_finite(layer.weight, f"the table of '{names[layer]}',")  # type: ignore[arg-type]
    for layer in experts:
        for name in weight_names(layer):
            check_finite(layer.get_parameter(name), f"'{names[layer]}.{name}'")
    why_not = lambda layer: why_no_experts(layer, bits, grouped) if expert_weights(layer) else _why_not(layer)
    _warn_of_others(model, chosen, [*layers, *tables, *experts], only, skip, why_not)
    if grouped:
        _warn_of_full_groups([(names[layer], layer) for layer in layers])
    grids = input_grids(model, layers, data) if data is not None else {}
    for layer in (*layers, *tables):
        make_dense(layer)
        parametrize_pruned(layer)
    make_plain_within(model, [(layer, name) for layer in (*layers, *tables) for name in parametrized_tensors(layer)])
    for layer in layers:
        if remove := remover_of_norm(layer):
            remove(layer)
        linear = become_linear(layer)
        if aware:
            QuantizationAwareLinear.of(linear)
        elif grouped:
            GroupedLinear.of(linear, bits)
        else:
            QuantizedLinear.of(linear, grids.get(layer))
    shared: Shared = {}
    for layer in tables:
        become_stored(layer, weights, shared)
    for layer in experts:
        QuantizedExperts.of(layer, bits, grouped)
    return model


def _warn_of_others(
    model: nn.Module,
    chosen: list[nn.Module],
    layers: list[nn.Module],
    only: Layers | None,
    skip: Layers,
    why_not: Callable[[nn.Module], str],
) -> None:
    """Warns of layers that stay floats although `only` names them or they are pruned, by kind."""
    left = [each for each in weight_holders(model, skip) if _is_pruned(each)] if only is None else chosen
    unasked = lambda each: "name experts in `only`" if expert_weights(each) else "shares its weight"
    whys = Counter((type(each).__name__, why_not(each) or unasked(each)) for each in left if each not in layers)
    if whys:
        kinds = "; ".join(f"{count} {kind} ({why})" for (kind, why), count in whys.items())
        warnings.warn(f"gossamer.quantize leaves as floats: {kinds}", stacklevel=4)
    elif not layers:
        linear = [each for each in chosen_layers(model, only, skip) if not why_not_linear(each)]
        pruned_first = (
            f"no linear layer has {_ZEROS:.0%} of zeros. Prune the model first (gossamer.prune), or name the layers, for "
            "instance only=torch.nn.Linear"
        )
        why = pruned_first if linear and only is None else none_chosen(model, only, skip)
        warnings.warn(f"gossamer.quantize has changed nothing: {why}", stacklevel=4)


def _why_not(layer: nn.Module) -> str:
    """Returns why a layer stays floats."""
    of_table = why_no_table(layer) if isinstance(layer, TABLES) else ""
    return of_table or why_not_linear(layer)


def _warn_of_full_groups(layers: list[tuple[str, nn.Module]]) -> None:
    """Warns of pruned weights whose zeros fill no groups."""
    full = [name for name, layer in layers if _is_pruned(layer) and _kept_groups(layer) > _FULL]
    if full:
        warnings.warn(
            f"gossamer.quantize keeps all groups of {GROUP} elements in {len(full)} pruned layers ({', '.join(full[:3])}"
            f"{', ...' if len(full) > 3 else ''}), because each has a nonzero. Their zeros save neither memory nor time. "
            f"Prune in groups first: gossamer.prune(model, batches, sparsity=0.5, pattern='1x{GROUP}')",
            stacklevel=4,
        )


def _kept_groups(layer: nn.Module) -> float:
    """Returns the share of a weight's groups that have a nonzero."""
    weight: Tensor = layer.weight.detach()  # type: ignore[operator]
    weight = weight.to_dense() if is_stored(layer) else weight
    rows = weight.t() if is_transposed(layer) else weight
    kept = torch.nn.functional.pad(rows != 0, (0, -rows.shape[1] % GROUP)).unflatten(1, (-1, GROUP)).any(2)
    return float(kept.float().mean()) if kept.numel() else 0.0


def _is_pruned(module: nn.Module) -> bool:
    """Whether a module has weights with enough zeros to be quantized even if `only` does not name it."""
    if is_stored(module):
        return True
    if has_weight(module):
        return is_sparse(module.weight.detach())  # type: ignore[operator]
    return any(p is not None and p.dim() >= 2 and is_sparse(p) for p in module._parameters.values())


def is_sparse(weight: Tensor) -> bool:
    """Whether a weight has enough zeros to be quantized even if `only` does not name it."""
    return count_nonzeros(weight) <= (1 - _ZEROS) * weight.numel()
