"""Bits as numbers: PTX's types in NumPy's."""

import numpy as np

from .memory import Array

_INTEGERS = {"u": "uint", "b": "uint", "s": "int"}
TYPES: dict[str, type] = {
    "pred": np.bool_,
    **{f"{kind}{bits}": getattr(np, f"{name}{bits}") for kind, name in _INTEGERS.items() for bits in (8, 16, 32, 64)},
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "bf16": np.uint16,
    "bf16x2": np.uint32,
    "f16x2": np.uint32,
    "f32x2": np.uint64,
}


def bits_of(kind: str) -> np.dtype:
    """The unsigned type as wide as a PTX type."""
    size = np.dtype(TYPES[kind]).itemsize
    return np.dtype(bool) if kind == "pred" else np.dtype(f"u{size}")


def typed(raw: Array, kind: str) -> Array:
    """Raw bits, perhaps of another width, as values of a PTX type."""
    return raw if kind == "pred" else np.ascontiguousarray(raw.astype(bits_of(kind), copy=False)).view(TYPES[kind])


def from_bf16(bits: Array) -> Array:
    """bfloat16 bits as f32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values: Array) -> Array:
    """f32 rounded to the nearest bfloat16, ties to even, as bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def floats(raw: Array, kind: str) -> Array:
    """Values of a float type, narrow ones as f32; of a pair of floats, one after the other."""
    if kind.startswith("bf16"):
        return from_bf16(np.ascontiguousarray(raw).view(np.uint16))
    if kind in ("f16", "f16x2"):
        return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    return np.ascontiguousarray(raw).view(np.float32) if kind == "f32x2" else raw


def rounded(values: Array, kind: str) -> Array:
    """The inverse of floats."""
    if kind.startswith("bf16"):
        values = to_bf16(values)
    elif kind in ("f16", "f16x2"):
        values = values.astype(np.float16)
    return np.ascontiguousarray(values).view(bits_of(kind))
