"""`PackedLinear` is an nn.Linear whose weight lives in a `WeightStore`, which drops the dense copy once it is packed.

    Linear(768, 3072)      parameters weight, bias
    → PackedLinear         parameter bias, buffer weight_handle (one element); `weight` is rebuilt at each access

The layer computes the same, has the same names in the state dict, and loads the same checkpoints.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from gossamer.runtime.weight_store import WeightStore, dense_weight


class PackedLinear(nn.Linear):
    """A linear layer for inference: its weight has no gradient.

    weight         a copy of the weight, [out_features, in_features]; assign to it to change it
    weight_handle  a tensor of one element that stands for the weight in compiled graphs
    """

    weight_handle: torch.Tensor
    _store: WeightStore
    _kind: type[nn.Linear]

    @classmethod
    def of(cls, linear: nn.Linear) -> Self:
        """Turns a linear layer into a packed one in place, so that hooks on it and references to it stay valid."""
        weight = linear._parameters.pop("weight")
        assert weight is not None
        kind, linear.__class__ = type(linear), cls
        packed: Any = linear
        packed._kind = kind
        packed._non_persistent_buffers_set.add("weight_handle")
        packed._install(weight)
        return packed

    def unpack(self) -> None:
        """Turns the layer back into its former class in place, with the weight as a parameter."""
        weight = nn.Parameter(self._store.copy())
        del self._buffers["weight_handle"], self._store
        self._non_persistent_buffers_set.discard("weight_handle")
        kind = self.__dict__.pop("_kind")
        self.__class__ = kind
        self._parameters = {"weight": weight, **self._parameters}

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """A dense copy of the weight."""
        if torch.compiler.is_compiling():
            return dense_weight(self.weight_handle, self.out_features, self.in_features)
        return self._store.copy()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and name in self._parameters:  # while a checkpoint is loaded
            self._parameters[name] = value
        elif name == "weight":
            self._store.replace(value)
        else:
            super().__setattr__(name, value)

    def _install(self, weight: torch.Tensor) -> None:
        self._store = WeightStore(weight)
        self._buffers["weight_handle"] = self._store.handle

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Rebuilds the weight for conversions to another dtype, device or memory. The next compilation packs it again."""
        handle, store, address = self.weight_handle, self._store, self.weight_handle.data_ptr()
        super()._apply(fn, recurse)
        if self.weight_handle is handle and handle.data_ptr() == address:
            return self
        self._install(fn(store.dense()))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self._store.copy()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Loads as nn.Linear does. While it loads, the layer has a parameter `weight`."""
        parameter = self._parameters["weight"] = nn.Parameter(self._store.copy(), requires_grad=False)
        version = parameter._version
        try:
            super()._load_from_state_dict(state_dict, prefix, *args)
        finally:
            loaded = self._parameters.pop("weight")
        if loaded is not parameter or parameter._version != version:
            self._store.replace(loaded)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold the dense weight."""
        buffers = {name: buffer for name, buffer in self._buffers.items() if name != "weight_handle"}
        return {**self.__dict__, "_store": self._store.dense(), "_buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({name: value for name, value in state.items() if name != "_store"})
        self._install(state["_store"])
