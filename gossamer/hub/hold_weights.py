"""Applies a `SparseConfig` to a loaded model: prunes it by magnitude, and stores its weights in one of five ways."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor, nn

from gossamer.dialects.errors import OptionError
from gossamer.hub.masked_loading import load_plain
from gossamer.hub.sparse_config import SparseConfig
from gossamer.runtime.packers.nonzeros import count_nonzeros
from gossamer.sparsity.finalize import finalize
from gossamer.sparsity.pruning.choose_layers import Layers, chosen_layers
from gossamer.sparsity.pruning.patterns import Pattern, mask_of, pattern_of
from gossamer.sparsity.quantization.quantize import quantize
from gossamer.sparsity.sparsifiers import sparsify
from gossamer.sparsity.store_sparse import store_sparse
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor


def hold_weights(model: nn.Module, config: SparseConfig, of_checkpoint: bool = False) -> None:
    """Prunes the model if the config has a sparsity, then makes its layers hold plain, masked, stored or integer weights.

    of_checkpoint  whether the config is that of a folder. Another class of the same architecture may have saved the folder. Its
                   names may begin with the prefix of the base model, and it may have another head.
    """
    only: Any = [config.only] if isinstance(config.only, str) else config.only
    skip: list[Any] = [config.skip] if isinstance(config.skip, str) else list(config.skip)
    if of_checkpoint:
        only, skip = None if only is None else _known(model, only), _known(model, skip)
        if only == []:
            return
    if only is None:
        skip.append(partial(_is_head, model.get_output_embeddings()))  # type: ignore[operator]
    if config.sparsity is not None:
        keep = partial(_largest, pattern=pattern_of(config.pattern), density=1 - config.sparsity)
        _mask(model, keep, only, skip)
    elif config.weights == "masked":
        _mask(model, SparseTensor.from_dense, only, [*skip, _has_no_zeros])
    if config.weights == "masked":
        load_plain(model)
        return
    finalize(model)
    if config.weights == "stored":
        store_sparse(model, only=only, skip=skip)
    elif config.weights == "int8":
        quantize(model, only=only, skip=skip)
    elif config.weights == "int4":
        quantize(model, weights="int4", group=16, only=only, skip=skip)


def _known(model: Any, names: Sequence[str]) -> list[str]:
    """Returns the names and patterns that fit layers of this model, with or without the prefix of the base model."""
    prefix, found = f"{model.base_model_prefix}.", list[str]()
    for name in names:
        for each in (name, name.removeprefix(prefix), prefix + name):
            with suppress(OptionError):  # no layer has this name
                chosen_layers(model, each, ())
                found.append(each)
                break
    return found


def _mask(model: nn.Module, keep: object, only: Layers | None, skip: Layers) -> None:
    sparsify(model, keep, only=only, skip=skip)  # type: ignore[call-overload]


def _largest(dense: Tensor, pattern: Pattern, density: float) -> SparseTensor:
    return SparseTensor.from_dense(dense * mask_of(pattern, dense.abs(), density))


def _is_head(head: nn.Module | None, name: str, layer: nn.Module) -> bool:
    return layer is head


def _has_no_zeros(name: str, layer: nn.Module) -> bool:
    weight = layer.weight.detach()
    return count_nonzeros(weight) == weight.numel()  # type: ignore[arg-type]
