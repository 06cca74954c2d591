"""Describes the inputs of a package in its metadata. gossamer.load_package checks each call with this note.

    torch.export of model(x) with x: float32 [2 * batch, 256]   →   {"name": "x", "dtype": "float32", "order": [0, 1], "sizes":
        [{"size": "2*s0", "symbol": "s0", "factor": 2, "offset": 0, "low": 0, "high": 64}, 256]}

AOTInductor's code does not check its inputs. It would read past the end of a tensor of other sizes, and give wrong numbers for
a tensor with other strides.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gossamer.dialects.errors import ArgumentError
from gossamer.runtime.packages.open_sizes import OpenSize

KEY = "gossamer_inputs"
_UNBOUNDED = 1 << 62
_SMALL = 2  # torch.export's lower bound of open sizes; its programs also take smaller sizes


def described(graph: fx.Graph) -> str:
    """Returns the note on the tensor inputs of an exported graph."""
    values = ((node.name, node.meta.get("val")) for node in graph.find_nodes(op="placeholder"))
    return json.dumps([_input(name, value) for name, value in values if isinstance(value, Tensor)])


class PackageInputs:
    """The inputs of a package, as its note describes them."""

    def __init__(self, note: str) -> None:
        self._inputs: list[dict[str, Any]] = json.loads(note)

    def checked(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Returns the inputs of a call with the strides that the code expects. Raises ArgumentError if their number, types,
        devices or sizes do not fit."""
        if len(given) != len(self._inputs):
            named = ", ".join(each["name"] for each in self._inputs)
            raise ArgumentError(f"the model was exported with {len(self._inputs)} tensors ({named}), and gets {len(given)}")
        sizes = dict[str, int]()
        return [_checked(*both, sizes) for both in zip(self._inputs, given, strict=True)]


def _input(name: str, value: Tensor) -> dict[str, Any]:
    last = value.dim() - 1
    orders = [list(range(value.dim())), [0, *range(2, last + 1), 1][: value.dim()]]
    order = next((each for each in orders if _is_contiguous_in(value, each)), None)
    dtype = str(value.dtype).removeprefix("torch.")
    return {"name": name, "dtype": dtype, "device": value.device.type, "order": order, "sizes": [*map(_size, value.shape)]}


def _is_contiguous_in(value: Tensor, order: Sequence[int]) -> bool:
    """Whether a tensor is contiguous with its dimensions in this order. Compares open sizes as expressions."""
    wanted: Any = 1
    for d in reversed(order):
        if str(value.stride(d)) != str(wanted) and str(value.shape[d]) != "1":
            return False
        wanted = value.shape[d] * wanted
    return True


def _size(size: int | torch.SymInt) -> int | dict[str, Any]:
    if isinstance(size, int):
        return size
    found = OpenSize.of(size)
    bounds = size.node.shape_env.bound_sympy(found.symbol)
    low, high = (max(0, int(min(each, _UNBOUNDED))) for each in (bounds.lower, bounds.upper))
    linear = {"size": str(size), "symbol": str(found.symbol), "factor": found.factor, "offset": found.offset}
    return {**linear, "low": low if low > _SMALL else 0, "high": high}


def _checked(wanted: Mapping[str, Any], given: Tensor, sizes: dict[str, int]) -> Tensor:
    fits = given.dim() == len(wanted["sizes"]) and all(
        _fits(size, found, sizes) for size, found in zip(wanted["sizes"], given.shape, strict=True)
    )
    dtype = str(given.dtype).removeprefix("torch.")
    if not fits or dtype != wanted["dtype"] or given.device.type != wanted["device"]:
        raise ArgumentError(
            f"the model was exported for {wanted['name']}: {_told(wanted, sizes)}, and gets {dtype} {list(given.shape)} "
            f"on {given.device}"
        )
    order = wanted["order"]
    if order is None or given.permute(order).is_contiguous():
        return given
    return given.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])


def _fits(wanted: int | Mapping[str, Any], found: int, sizes: dict[str, int]) -> bool:
    if isinstance(wanted, int):
        return found == wanted
    value, rest = divmod(found - wanted["offset"], wanted["factor"])
    return not rest and wanted["low"] <= value <= wanted["high"] and sizes.setdefault(wanted["symbol"], value) == value


def _told(wanted: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """Returns an input in words, with the sizes that symbols have in this call."""
    sizes_told, ranges = list[str](), list[str]()
    for size in wanted["sizes"]:
        if isinstance(size, int):
            sizes_told.append(str(size))
            continue
        symbol = size["symbol"]
        sizes_told.append(size["size"])
        most = f" to {size['high']}" if size["high"] < _UNBOUNDED else " on"
        ranges.append(f"{symbol} from {size['low']}{most}" + (f", {sizes[symbol]} in this call" if symbol in sizes else ""))
    told = f"{wanted['dtype']} [{', '.join(sizes_told)}] on {wanted['device']}"
    return f"{told} ({'; '.join(ranges)})" if ranges else told
