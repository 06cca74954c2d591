"""Describes the inputs of a package in its metadata. gossamer.load_package checks each call with this note.

    torch.export of model(x, 3) with x: float32 [2 * batch, 256]   →   [{"name": "x", "dtype": "float32", "device": "cpu",
        "sizes": [{"size": "2*s0", "symbol": "s0", "factor": 2, "offset": 0, "low": 0, "high": 64}, 256],
        "order": [0, 1], "strides": [null, null]}, {"name": "times", "value": 3}]

AOTInductor's code does not check its inputs. It would read past the end of a tensor of other sizes, and give wrong numbers for
a tensor with other strides. It has the values of the inputs that are no tensors.

"order" lists the dimensions from the outermost to the innermost. A stride of null says that the elements of the dimension lie
one after the other: stride = size * stride of the next dimension in this order.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gossamer.dialects.errors import ArgumentError, CompileError
from gossamer.runtime.packages.open_sizes import OpenSize

KEY = "gossamer_inputs"
_UNBOUNDED = 1 << 62
_VALUES = (bool, int, float, str, type(None))
_SMALL = 2  # torch.export's lower bound of open sizes; its programs also take smaller sizes


def described(graph: fx.Graph) -> str:
    """Returns the note on the inputs of an exported graph."""
    return json.dumps([_input(node.name, node.meta.get("val")) for node in graph.find_nodes(op="placeholder")])


class PackageInputs:
    """The inputs of a package, as its note describes them."""

    def __init__(self, note: str) -> None:
        self._inputs: list[dict[str, Any]] = json.loads(note)

    def checked(self, given: Sequence[Any]) -> list[Tensor]:
        """Returns the tensors of a call with the strides that the code expects. Raises ArgumentError if the number of inputs,
        or their types, devices, sizes or values do not fit."""
        if len(given) != len(self._inputs):
            named = ", ".join(each["name"] for each in self._inputs)
            raise ArgumentError(f"the model was exported with {len(self._inputs)} inputs ({named}), and gets {len(given)}")
        sizes, tensors = dict[str, int](), list[Tensor]()
        for wanted, found in zip(self._inputs, given, strict=True):
            if "sizes" in wanted:
                tensors.append(_checked(wanted, found, sizes))
            elif "value" in wanted and (type(found) is not type(wanted["value"]) or found != wanted["value"]):
                raise ArgumentError(
                    f"the model was exported for {wanted['name']} = {wanted['value']!r}, and gets "
                    f"{'a tensor' if isinstance(found, Tensor) else repr(found)}"
                )
        return tensors


def _input(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return {"name": name, "value": value} if isinstance(value, _VALUES) else {"name": name}
    dtype, (order, strides) = str(value.dtype).removeprefix("torch."), _layout(value)
    sizes = [*map(_size, value.shape)]
    return {"name": name, "dtype": dtype, "device": value.device.type, "sizes": sizes, "order": order, "strides": strides}


def _layout(value: Tensor) -> tuple[list[int], list[int | None]]:
    """Returns the order of the dimensions, and the strides that do not follow from it. Compares open sizes as expressions."""
    left = [d for d in range(value.dim()) if str(value.shape[d]) != "1"]
    order, strides, wanted = list[int](), list[int | None]([None] * value.dim()), "1"
    while left:
        follows = [d for d in left if str(value.stride(d)) == wanted]
        gaps = {int(value.stride(d)): d for d in left if isinstance(value.stride(d), int)}
        if not follows and not gaps:
            sizes, held = list(value.shape), list(value.stride())
            raise CompileError(f"a package takes no tensor of sizes {sizes} with strides {held}: use a contiguous example")
        found = follows[-1] if follows else gaps[min(gaps)]
        if not follows:
            strides[found] = min(gaps)
        order.insert(0, found)
        left.remove(found)
        wanted = str(value.shape[found] * value.stride(found))
    return [*(d for d in range(value.dim()) if d not in order), *order], strides


def _size(size: int | torch.SymInt) -> int | dict[str, Any]:
    if isinstance(size, int):
        return size
    found = OpenSize.of(size)
    bounds = size.node.shape_env.bound_sympy(found.symbol)
    low, high = (max(0, int(min(each, _UNBOUNDED))) for each in (bounds.lower, bounds.upper))
    linear = {"size": str(size), "symbol": str(found.symbol), "factor": found.factor, "offset": found.offset}
    return {**linear, "low": low if low > _SMALL else 0, "high": high}


def _checked(wanted: Mapping[str, Any], given: Any, sizes: dict[str, int]) -> Tensor:
    if not isinstance(given, Tensor) or given.layout is not torch.strided or hasattr(given, "__tensor_flatten__"):
        raise ArgumentError(f"the model was exported for {wanted['name']}: {_told(wanted, sizes)}, and gets {type(given)}")
    fits = given.dim() == len(wanted["sizes"]) and all(
        _fits(size, found, sizes) for size, found in zip(wanted["sizes"], given.shape, strict=True)
    )
    dtype = str(given.dtype).removeprefix("torch.")
    if not fits or dtype != wanted["dtype"] or given.device.type != wanted["device"]:
        raise ArgumentError(
            f"the model was exported for {wanted['name']}: {_told(wanted, sizes)}, and gets {dtype} {list(given.shape)} "
            f"on {given.device}"
        )
    given = given.resolve_conj().resolve_neg()
    strides, apart = _strides(wanted, given.shape)
    if all(size == 1 or both[0] == both[1] for size, *both in zip(given.shape, given.stride(), strides, strict=True)):
        return given
    if not apart:
        raise ArgumentError(
            f"the model was exported for {wanted['name']} with strides {strides}, and gets strides {list(given.stride())}. "
            "Elements of the example share memory: export the model with a contiguous example"
        )
    return torch.empty_strided(given.shape, strides, dtype=given.dtype, device=given.device).copy_(given)


def _strides(wanted: Mapping[str, Any], sizes: Sequence[int]) -> tuple[list[int], bool]:
    """Returns the strides that the code expects of a tensor with these sizes, and whether each element has its own place."""
    strides, following, apart = [*wanted["strides"]], 1, True
    for d in reversed(wanted["order"]):
        if strides[d] is None:
            strides[d] = following
        apart = apart and (sizes[d] < 2 or strides[d] >= following)
        following = sizes[d] * strides[d]
    return strides, apart


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
