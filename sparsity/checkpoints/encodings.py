"""Encodes the nonzeros of a tensor and their places as named arrays. There are three encodings:

bitmask  compressed [nonzeros], bitmask uint8 [rows, columns / 8] (least significant bit first), shape, row_offsets
         the encoding of compressed-tensors, SparseML and llm-compressor, which can read it; they write 2:4 weights with the
         nonzeros [rows, columns / 2] and the shape [dimensions, 1]
gaps     values [nonzeros], gaps uint8: the number of zeros before each nonzero, 255 for 255 zeros without a nonzero; shape
deflated deflated_values, deflated_gaps: the bytes of both as zlib streams; shape; type: an empty tensor of the dtype

A bitmask is smallest if an eighth of the elements or more are nonzeros, gaps if fewer are. Deflated gaps come near to the
smallest possible size, and integer values become smaller, too, but a reader must unpack all of it. -0.0 is read as 0.0. All
other values stay the same bit by bit.
"""

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from gossamer.dialects.errors import FormatError
from gossamer.runtime.packers.nonzeros import nonzero_mask, nonzero_places

BITMASK = ("compressed", "bitmask", "shape", "row_offsets")
GAPS = ("values", "gaps", "shape")
DEFLATED = ("deflated_values", "deflated_gaps", "shape", "type")
_FAR, _MOST_DIMENSIONS = 255, 8


def encoded(tensor: Tensor, deflate: bool = False) -> dict[str, Tensor] | None:
    """Returns the arrays of the smaller of two encodings, or of the deflated one.

    Returns None if no encoding is smaller than the tensor, or if it has no floats or int8, or not 2 to 8 dimensions.
    """
    if (
        not 2 <= tensor.dim() <= _MOST_DIMENSIONS
        or not (tensor.is_floating_point() or tensor.dtype is torch.int8)
        or tensor.numel() == 0
    ):
        return None
    tensor = tensor.detach().cpu().contiguous()
    mask = nonzero_mask(tensor)
    places = nonzero_places(mask, torch.int64)
    values, shape = tensor.flatten()[places], torch.tensor(tensor.shape)
    if deflate:
        streams = {"deflated_values": values.view(torch.uint8), "deflated_gaps": _gaps(places.numpy())}
        arrays = {name: _deflated(stream) for name, stream in streams.items()} | {"shape": shape, "type": values[:0]}
    elif 8 * len(places) < tensor.numel():
        arrays = {"values": values, "gaps": _gaps(places.numpy()), "shape": shape}
    else:
        rows = mask.flatten(1)
        packed = torch.from_numpy(np.packbits(rows.numpy(), axis=1, bitorder="little"))
        counts = rows.sum(1)
        arrays = {"compressed": values, "bitmask": packed, "shape": shape, "row_offsets": counts.cumsum(0) - counts}
    return arrays if sum(a.nbytes for a in arrays.values()) < tensor.nbytes else None


def decoded(name: str, arrays: Mapping[str, Tensor]) -> Tensor:
    """Returns the dense tensor. FormatError, with the tensor's name, if the arrays do not fit together."""
    shape = arrays["shape"].flatten()
    if not 1 <= len(shape) <= _MOST_DIMENSIONS or shape.is_floating_point() or int(shape.min()) < 0:
        raise FormatError(f"'{name}': {shape.tolist()} is not the shape of a tensor: the file is damaged")
    sizes = tuple(shape.tolist())
    elements = int(np.prod(sizes, dtype=object))
    if "deflated_gaps" in arrays:
        arrays = _inflated(name, arrays, elements)
    places = _from_gaps(name, arrays["gaps"]) if "gaps" in arrays else _from_bitmask(name, arrays["bitmask"], sizes)
    values = arrays["values"] if "gaps" in arrays else arrays["compressed"].flatten()
    if values.dim() != 1 or len(values) != len(places) or (len(places) and places[-1] >= elements):
        raise FormatError(
            f"'{name}': {values.numel()} values for {len(places)} places in a tensor of {elements} elements: "
            "the file is damaged"
        )
    bits = values.view(torch.uint8) if values.dtype.itemsize == 1 else values  # torch cannot index-write 8-bit floats
    dense = torch.zeros(sizes, dtype=bits.dtype)
    dense.view(-1)[torch.from_numpy(places)] = bits
    return dense.view(values.dtype)


def _deflated(stream: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(zlib.compress(stream.numpy().tobytes(), 9)), dtype=torch.uint8)


def _inflated(name: str, arrays: Mapping[str, Tensor], elements: int) -> dict[str, Tensor]:
    """Returns the unpacked values and gaps. The number of elements limits the size that a stream may unpack to."""
    kind = arrays["type"].dtype
    limits = {"values": elements * kind.itemsize, "gaps": elements + elements // _FAR + 1}
    found: dict[str, Tensor] = {}
    for part, most in limits.items():
        unpacker = zlib.decompressobj()
        try:
            stream = unpacker.decompress(arrays[f"deflated_{part}"].numpy().tobytes(), most + 1)
        except zlib.error as problem:
            raise FormatError(f"'{name}': its {part} cannot be unpacked ({problem}): the file is damaged") from None
        if not unpacker.eof or len(stream) > most:
            raise FormatError(
                f"'{name}': its {part} end early, or are more than a tensor of {elements} elements has: the file is damaged"
            )
        found[part] = torch.frombuffer(bytearray(stream), dtype=torch.uint8) if stream else torch.empty(0, dtype=torch.uint8)
    if len(found["values"]) % kind.itemsize:
        raise FormatError(f"'{name}': {len(found['values'])} bytes are no elements of {kind}: the file is damaged")
    return {"values": found["values"].view(kind), "gaps": found["gaps"]}


def _gaps(places: np.ndarray) -> Tensor:
    zeros = np.diff(places, prepend=-1) - 1
    far, near = zeros // _FAR, zeros % _FAR
    gaps = np.full(len(places) + int(far.sum()), _FAR, dtype=np.uint8)
    gaps[np.cumsum(far + 1) - 1] = near
    return torch.from_numpy(gaps)


def _from_gaps(name: str, gaps: Tensor) -> np.ndarray:
    if gaps.dtype != torch.uint8 or gaps.dim() != 1:
        raise FormatError(
            f"'{name}': its gaps are {gaps.dtype} with {gaps.dim()} dimensions, must be bytes with one: the file is damaged"
        )
    steps = gaps.numpy().astype(np.int64)
    nonzero = steps != _FAR
    return (np.cumsum(steps + nonzero) - 1)[nonzero]


def _from_bitmask(name: str, bitmask: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    rows, columns = shape[0], int(np.prod(shape[1:], dtype=np.int64))
    if bitmask.dtype != torch.uint8 or tuple(bitmask.shape) != (rows, -(-columns // 8)):
        raise FormatError(
            f"'{name}': a bitmask of {bitmask.dtype} {tuple(bitmask.shape)} does not fit a tensor of shape {shape}: "
            "the file is damaged"
        )
    mask = np.unpackbits(bitmask.numpy(), axis=1, bitorder="little")
    if mask[:, columns:].any():
        raise FormatError(f"'{name}': its bitmask has bits beyond the last of {columns} columns: the file is damaged")
    return np.flatnonzero(mask[:, :columns])
