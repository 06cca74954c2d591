"""Turns calibration data into calls of a model, and finds out which tokens count.

{"input_ids": ..., "attention_mask": ...}   model(**batch), as for Hugging Face, with the names that forward takes
(x, y)                                      model(x), as many as forward takes
x                                           model(x)
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.dialects.errors import OptionError
from gossamer.runtime.torch_internals import tree_map_only
from gossamer.sparsity.torch_functions.plain_model import plain_model


@dataclass(frozen=True)
class Call:
    """The arguments of a call, and a mask [batch, tokens] of the tokens that count (None: all)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: Tensor | None = None

    def of(self, module: nn.Module) -> Any:
        """Calls a module with copies of these tensors, because it may change them in place. Equal objects stay equal."""
        copies = dict[int, Tensor]()

        def copied(tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.clone()
            return copies[id(tensor)]

        args, kwargs = tree_map_only(Tensor, copied, (self.args, self.kwargs))
        return module(*args, **kwargs)


def calls_of(model: nn.Module, data: Iterable[Any]) -> list[Call]:
    """Returns a call for each batch, on the model's device. OptionError if `data` is empty or no collection of batches."""
    if isinstance(data, Tensor | Mapping | str) or (not hasattr(data, "__iter__") and not hasattr(data, "__getitem__")):
        raise OptionError(f"data is one {type(data).__name__}, must be batches: a list of them, or a DataLoader")
    calls = [call_of(model, batch) for batch in data]
    if not calls:
        raise OptionError("data has no batch: calibration needs a few hundred samples")
    return calls


def rows_that_count(x: Tensor, tokens: Tensor | None) -> Tensor:
    """Returns the input of a linear layer as [samples, features], without padding where it is known."""
    rows = x.reshape(-1, x.shape[-1])
    if tokens is None or x.shape[:-1].numel() != tokens.numel():
        return rows
    if x.shape[:-1] == tokens.shape[::-1] != tokens.shape:  # tokens x batch, the default of attention in torch.nn
        tokens = tokens.t()
    return rows[tokens.reshape(-1)]


def call_of(model: nn.Module, batch: Any) -> Call:
    """Returns the call for a batch, on the model's device."""
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
    parameters = inspect.signature(plain_model(model).forward).parameters.values()
    taken = {p.name for p in parameters}
    plain = {"use_cache": False} if "use_cache" in taken else {}  # each block is called several times, so caches would grow
    if isinstance(batch, Mapping):
        anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
        kwargs = {name: _moved(value, place) for name, value in batch.items() if anything or name in taken}
        if not kwargs:
            raise OptionError(f"a batch has {', '.join(map(str, batch)) or 'nothing'}; forward has no argument of these names")
        mask = kwargs.get("attention_mask")
        return Call((), kwargs | plain, mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None)
    batch = (batch,) if isinstance(batch, Tensor) else batch
    if isinstance(batch, list | tuple):
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        return Call(tuple(_moved(each, place) for each in (batch if several else batch[: len(positional)])), plain)
    raise OptionError(f"a batch is a {type(batch).__name__}, must be a tensor, a tuple or list of them, or a dictionary")


def _moved(value: Any, place: torch.device) -> Any:
    def moved(part: Tensor) -> Tensor:
        return part.to(place).clone() if part.is_inference() else part.to(place)  # autograd cannot save inference tensors

    return tree_map_only(Tensor, moved, value)
