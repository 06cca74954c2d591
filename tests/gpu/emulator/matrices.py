"""Instructions of the tensor cores: how fragments of matrices lie in the registers of a warp. PTX ISA 8.x, section 9.7.14."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .memory import Array, Fault
from .parser import Address, Instruction, Operand
from .values import from_bf16

if TYPE_CHECKING:
    from .machine import Machine


def ldmatrix(m: Machine, i: Instruction) -> None:
    """Up to four 8 x 8 matrices of 16 bits; the lanes give the addresses of their rows."""
    warps = m.whole_warps(i)
    to, source = i.operands
    assert isinstance(to, tuple) and isinstance(source, Address)
    count = len(to)
    addresses = (m.get(source.base, "s64") + source.offset).reshape(warps, 32)[:, : 8 * count]
    lanes = m.selected.reshape(warps, 32)[:, : 8 * count]
    phases = (addresses // 16 % 8).reshape(-1, 8)  # eight rows of 16 bytes are read at once, from 128 bytes of banks
    m.bank_conflicts += int((np.sort(phases, 1) != np.arange(8)).any(1).sum())
    rows = m.shared.load(lanes.reshape(-1), addresses.reshape(-1), 16)
    matrices = np.ascontiguousarray(rows).view(np.uint16).reshape(warps, count, 8, 8)
    if "trans" in i.modifiers:
        matrices = matrices.transpose(0, 1, 3, 2)
    for number, register in enumerate(to):
        m.set(register, np.ascontiguousarray(matrices[:, number]).view(np.uint32).reshape(-1))


def mma(m: Machine, i: Instruction) -> None:
    """d[16 x 8] = a[16 x 16] b[16 x 8] + c, of bf16 or f16, summed in f32."""
    if "m16n8k32" in i.modifiers and i.modifiers[0].startswith("sp"):
        _mma_sparse(m, i)
        return
    if i.modifiers[-4:] == ("s32", "s8", "s8", "s32") and "m16n8k32" in i.modifiers:
        _mma_bytes(m, i)
        return
    if "m16n8k16" not in i.modifiers or "f32" not in i.modifiers:
        raise NotImplementedError(i.text)
    warps = m.whole_warps(i)
    d, a, b, c = i.operands
    assert isinstance(d, tuple) and isinstance(a, tuple) and isinstance(b, tuple) and isinstance(c, tuple)
    a0, a1, a2, a3 = (_fragment(m, register, warps, i) for register in a)
    left = np.concatenate([np.concatenate([a0, a2], 2), np.concatenate([a1, a3], 2)], 1)
    right = np.concatenate([_fragment(m, register, warps, i) for register in b], 2)  # [n, k]
    total = np.einsum("wmk,wnk->wmn", left, right) + accumulator(m, c, warps)
    store_accumulator(m, d, total.astype(np.float32))


def _mma_bytes(m: Machine, i: Instruction) -> None:
    """d[16 x 8] = a[16 x 32] b[32 x 8] + c, of s8, summed in s32, which wraps around."""
    warps = m.whole_warps(i)
    d, a, b, c = i.operands
    assert isinstance(d, tuple) and isinstance(a, tuple) and isinstance(b, tuple) and isinstance(c, tuple)
    a0, a1, a2, a3, b0, b1 = (_bytes(m, register, warps) for register in (*a, *b))
    left = np.concatenate([np.concatenate([a0, a2], 2), np.concatenate([a1, a3], 2)], 1)
    total = np.einsum("wmk,wnk->wmn", left, np.concatenate([b0, b1], 2)) + accumulator(m, c, warps, "s32")
    store_accumulator(m, d, total.astype(np.int32))


def _mma_sparse(m: Machine, i: Instruction) -> None:
    """d[16 x 8] = a[16 x 32] b[32 x 8] + c, where 2 of every 4 neighbours of a are stored, and two bits for each place."""
    warps = m.whole_warps(i)
    d, a, b, c, metadata, selector = i.operands
    assert isinstance(d, tuple) and isinstance(a, tuple) and isinstance(b, tuple) and isinstance(c, tuple)
    assert isinstance(selector, int)
    a0, a1, a2, a3 = (_fragment(m, register, warps, i) for register in a)
    stored = np.concatenate([np.concatenate([a0, a2], 2), np.concatenate([a1, a3], 2)], 1)
    words = m.get(metadata, "u32").reshape(warps, 8, 4)[:, :, 2 * selector : 2 * selector + 2]  # row, half of the columns
    halves = np.concatenate([words & np.uint32(0xFFFF), words >> np.uint32(16)], 1)
    inside = (halves[..., None] >> np.arange(0, 16, 2, dtype=np.uint32) & np.uint32(3)).reshape(warps, 16, 8, 2)
    if (inside[..., 0] >= inside[..., 1]).any():
        raise Fault("the places of a sparse matrix do not ascend")
    columns = (inside + 4 * np.arange(8)[:, None]).reshape(warps, 16, 16)
    left = np.zeros((warps, 16, 32), np.float32)
    np.put_along_axis(left, columns.astype(np.int64), stored, 2)
    right = np.concatenate([_fragment(m, register, warps, i) for register in b], 2)  # [n, k]
    total = np.einsum("wmk,wnk->wmn", left, right) + accumulator(m, c, warps)
    store_accumulator(m, d, total.astype(np.float32))


def _fragment(m: Machine, register: Operand, warps: int, i: Instruction) -> Array:
    """[warps, 8, 8]: a lane holds two neighbours of a row."""
    bits = np.ascontiguousarray(m.get(register, "b32")).view(np.uint16).reshape(warps, 8, 8)
    return from_bf16(bits) if "bf16" in i.modifiers else bits.view(np.float16).astype(np.float32)


def _bytes(m: Machine, register: Operand, warps: int) -> Array:
    """[warps, 8, 16]: a lane holds four neighbours of a row."""
    return np.ascontiguousarray(m.get(register, "b32")).view(np.int8).reshape(warps, 8, 16).astype(np.int32)


def accumulator(m: Machine, registers: tuple[Operand, ...], warps: int, kind: str = "f32") -> Array:
    """[warps, 16, 8] of the four sums that each lane holds."""
    values = np.stack([m.get(register, kind) for register in registers], -1)
    return values.reshape(warps, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4).reshape(warps, 16, 8)


def store_accumulator(m: Machine, registers: tuple[Operand, ...], matrix: Array) -> None:
    """The inverse of accumulator."""
    parts = matrix.reshape(-1, 2, 8, 4, 2)
    for number, register in enumerate(registers):
        m.set(register, np.ascontiguousarray(parts[:, number // 2, :, :, number % 2]).reshape(-1))
