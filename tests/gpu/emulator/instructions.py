"""What each PTX instruction does to the selected threads of a machine. PTX ISA 8.x, section 9.7."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .matrices import ldmatrix, mma
from .memory import Array, Fault
from .parser import Address, Instruction, Operand, Register
from .values import floats, from_bf16, rounded, to_bf16, typed

if TYPE_CHECKING:
    from .machine import Machine

Execute = Callable[["Machine", Instruction], None]


def address(m: Machine, operand: Operand) -> Array:
    """The addresses that [base + offset] stands for."""
    assert isinstance(operand, Address)
    return m.get(operand.base, "s64") + operand.offset


def _mov(m: Machine, i: Instruction) -> None:
    to, source = i.operands
    kind = i.modifiers[-1]
    if isinstance(to, tuple):
        parts = np.ascontiguousarray(m.get(source, kind)).view(
            f"u{np.dtype(typed(np.zeros(0, 'u8'), kind).dtype).itemsize // len(to)}"
        )
        for register, part in zip(to, parts.reshape(-1, len(to)).T, strict=True):
            if isinstance(register, Register) and register.name != "_":
                m.set(register, np.ascontiguousarray(part))
    elif isinstance(source, tuple):
        width = int(kind[1:]) // len(source)
        parts = np.stack([m.get(part, f"b{width}") for part in source], 1)
        m.set(to, np.ascontiguousarray(parts).view(f"u{int(kind[1:]) // 8}").reshape(-1))
    else:
        m.set(to, m.get(source, kind))


def _ld(m: Machine, i: Instruction) -> None:
    to, source = i.operands
    kind = i.modifiers[-1]
    if "param" in i.modifiers:
        assert isinstance(source, Address) and isinstance(source.base, str)
        m.set(to, np.full(m.selected.size, m.arguments[source.base], np.int64))
        return
    registers = to if isinstance(to, tuple) else (to,)
    size = np.dtype(typed(np.zeros(0, "u8"), kind).dtype).itemsize
    at = address(m, source)
    if "shared" in i.modifiers:
        data = m.shared.load(m.selected, at, size * len(registers))
    elif "global" in i.modifiers:
        data = m.memory.load(at, size * len(registers))
    else:
        raise Fault("generic load: global or shared is not known")
    for register, column in zip(registers, data.reshape(-1, len(registers), size).transpose(1, 0, 2), strict=True):
        # Into a wider register numbers with a sign keep it.
        values = np.ascontiguousarray(column).view(f"{'i' if kind[0] == 's' else 'u'}{size}").reshape(-1)
        m.set(register, values.astype(np.int64) if kind[0] == "s" else values)


def _st(m: Machine, i: Instruction) -> None:
    to, source = i.operands
    kind = i.modifiers[-1]
    registers = source if isinstance(source, tuple) else (source,)
    data = np.stack([m.get(register, kind) for register in registers], 1)
    data = np.ascontiguousarray(data).view(np.uint8).reshape(m.selected.size, -1)
    if "shared" in i.modifiers:
        m.shared.store(m.selected, address(m, to), data)
    elif "global" in i.modifiers:
        m.memory.store(address(m, to), data)
    else:
        raise Fault("generic store: global or shared is not known")


_COMPARE = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal}
_COMPARE |= {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}


def _setp(m: Machine, i: Instruction) -> None:
    to, left, right = i.operands[:3]
    name, kind = i.modifiers[0], i.modifiers[-1]
    a, b = floats(m.get(left, kind), kind), floats(m.get(right, kind), kind)
    unordered = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros(a.size, bool)
    if name in ("num", "nan"):
        result = unordered if name == "nan" else ~unordered
    elif name in _COMPARE:
        result = _COMPARE[name](a, b) & ~unordered
    else:
        result = _COMPARE[name.removesuffix("u")](a, b) | unordered
    if len(i.modifiers) == 3:
        other = m.get(i.operands[3], "pred")
        result = {"and": result & other, "or": result | other, "xor": result ^ other}[i.modifiers[1]]
    m.set(to, result)


def _selp(m: Machine, i: Instruction) -> None:
    to, yes, no, which = i.operands
    kind = i.modifiers[-1]
    m.set(to, np.where(m.get(which, "pred"), m.get(yes, kind), m.get(no, kind)))


def _fma(a: Array, b: Array, c: Array) -> Array:
    # The product is exact in f64; the sum is rounded twice, which tolerances cover.
    return (a.astype(np.float64) * b + c).astype(a.dtype)


def _shift_left(a: Array, b: Array) -> Array:
    return np.where(b >= a.itemsize * 8, 0, a << b.astype(a.dtype)).astype(a.dtype)


def _shift_right(a: Array, b: Array) -> Array:
    return a >> np.minimum(b, a.itemsize * 8 - 1).astype(a.dtype)


_ARITHMETIC: dict[str, Callable[..., Array]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "neg": lambda a: -a,
    "abs": np.abs,
    "min": lambda a, b: np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b),
    "max": lambda a, b: np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b),
    "div": lambda a, b: a / b if a.dtype.kind == "f" else np.trunc(a.astype(float) / b).astype(a.dtype),
    "rem": lambda a, b: np.fmod(a, b),
    "sqrt": np.sqrt,
    "rcp": lambda a: np.float32(1) / a,
    "fma": _fma,
}


def _arithmetic(m: Machine, i: Instruction) -> None:
    kind = i.modifiers[-1]
    to, *sources = i.operands
    values = [m.get(source, kind) for source in sources]
    if "f" not in kind:
        m.set(to, _ARITHMETIC[i.op](*values))
        return
    execute = {"min": np.minimum, "max": np.maximum}[i.op] if "NaN" in i.modifiers else _ARITHMETIC[i.op]
    m.set(to, rounded(execute(*(floats(value, kind) for value in values)), kind))


def _shift(m: Machine, i: Instruction) -> None:
    to, value, amount = i.operands
    shift = _shift_left if i.op == "shl" else _shift_right
    m.set(to, shift(m.get(value, i.modifiers[-1]), m.get(amount, "u32")))


def _bfe(m: Machine, i: Instruction) -> None:
    to, value, first, length = i.operands
    if i.modifiers[-1][0] != "u":
        raise NotImplementedError("bfe of a signed number")
    bits = m.get(value, i.modifiers[-1])
    mask = (np.uint64(1) << m.get(length, "u32").astype(np.uint64)) - np.uint64(1)
    m.set(to, (bits >> m.get(first, "u32").astype(bits.dtype)) & mask.astype(bits.dtype))


def _mul(m: Machine, i: Instruction) -> None:
    kind = i.modifiers[-1]
    to, *sources = i.operands
    if "f" in kind:
        _arithmetic(m, i)
        return
    a, b = m.get(sources[0], kind), m.get(sources[1], kind)
    wide = np.dtype(f"{a.dtype.kind}{2 * a.itemsize}") if a.itemsize < 8 else a.dtype
    if "hi" in i.modifiers:
        product = (a.astype(wide) * b.astype(wide) >> (8 * a.itemsize)).astype(a.dtype)
        if a.itemsize == 8:
            exact = [(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)]
            product = np.array(exact).astype(a.dtype)
    elif "wide" in i.modifiers:
        product = a.astype(wide) * b.astype(wide)
    else:
        product = a * b
    if i.op == "mad":
        product = product + m.get(sources[2], f"{kind[0]}{8 * product.itemsize}")
    m.set(to, product)


def _cvt(m: Machine, i: Instruction) -> None:
    to, *sources = i.operands
    wanted, given = i.modifiers[-2:]
    if wanted in ("bf16x2", "f16x2"):
        high, low = (m.get(s, "f32") for s in sources)
        halves = [to_bf16(v) if wanted == "bf16x2" else v.astype(np.float16).view(np.uint16) for v in (low, high)]
        m.set(to, halves[0].astype(np.uint32) | halves[1].astype(np.uint32) << np.uint32(16))
        return
    value = m.get(sources[0], given)
    if given == "bf16":
        value = from_bf16(value)
    if wanted == "bf16":
        m.set(to, to_bf16(value.astype(np.float32)))
    elif value.dtype.kind == "f" and wanted[0] in "su":
        whole = np.rint(value) if "rni" in i.modifiers else np.trunc(value)
        limits = np.iinfo(typed(np.zeros(0, "u8"), wanted).dtype)
        clamped = np.clip(np.nan_to_num(whole.astype(np.float64), nan=0.0), float(limits.min), float(limits.max))
        m.set(to, clamped.astype(limits.dtype))
    elif value.dtype.kind == "f" and wanted[0] == "f" and {"rni", "rmi", "rpi", "rzi"} & set(i.modifiers):
        mode = next(mode for mode in i.modifiers if mode in ("rni", "rmi", "rpi", "rzi"))
        m.set(to, {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}[mode](value))
    else:
        m.set(to, value.astype(typed(np.zeros(0, "u8"), wanted).dtype))


def _popc(m: Machine, i: Instruction) -> None:
    to, source = i.operands
    value = np.ascontiguousarray(m.get(source, i.modifiers[-1]))
    m.set(to, np.unpackbits(value.view(np.uint8).reshape(value.size, -1), axis=1).sum(1).astype(np.uint32))


def _prmt(m: Machine, i: Instruction) -> None:
    to, low, high, selector = i.operands
    pool = np.stack([m.get(low, "u32"), m.get(high, "u32")], 1).view(np.uint8)
    chosen = m.get(selector, "u32")
    result = np.zeros((m.selected.size, 4), np.uint8)
    for byte in range(4):
        nibble = (chosen >> np.uint32(4 * byte)) & np.uint32(15)
        taken = np.take_along_axis(pool, (nibble & 7)[:, None].astype(int), 1)[:, 0]
        result[:, byte] = np.where(nibble & 8, np.where(taken & 0x80, 0xFF, 0), taken)  # 8: its sign, eight times
    m.set(to, result.view(np.uint32).reshape(-1))


def _dp4a(m: Machine, i: Instruction) -> None:
    """A number and the products of four pairs of bytes."""
    to, *factors, start = i.operands
    if i.modifiers != ("u32", "u32"):
        raise NotImplementedError(i.text)
    a, b = (np.ascontiguousarray(m.get(factor, "u32")).view(np.uint8).reshape(-1, 4).astype(np.uint32) for factor in factors)
    m.set(to, (m.get(start, "u32") + (a * b).sum(1)).astype(np.uint32))


def _bra(m: Machine, i: Instruction) -> None:
    label = i.operands[0]
    assert isinstance(label, str)
    m.pc[m.selected] = m.program.labels[label]


def _ret(m: Machine, i: Instruction) -> None:
    m.live[m.selected] = False


def _bar(m: Machine, i: Instruction) -> None:
    if "warp" in i.modifiers:
        m.wait_for_warp()
    else:
        m.at_barrier[m.selected] = True


def _shfl(m: Machine, i: Instruction) -> None:
    warps = m.whole_warps(i)
    to, source, where, clamp, _ = i.operands
    if (m.get(clamp, "u32") & 0x1F00).any():
        raise NotImplementedError("shfl within parts of a warp")
    values, amount = m.get(source, "b32").reshape(warps, 32), m.get(where, "s32").reshape(warps, 32)
    lane = np.arange(32)[None]
    kind = i.modifiers[1]
    origin = {"idx": amount & 31, "bfly": lane ^ amount, "down": lane + amount, "up": lane - amount}[kind]
    origin = np.where((origin < 0) | (origin > 31), lane, origin)
    m.set(to, np.take_along_axis(values, origin, 1).reshape(-1))


def _redux(m: Machine, i: Instruction) -> None:
    warps = m.whole_warps(i)
    to, source, _ = i.operands
    if "add" not in i.modifiers:
        raise NotImplementedError(i.text)
    totals = m.get(source, "s32").reshape(warps, 32).sum(1).astype(np.int32)
    m.set(to, totals.repeat(32))


def _cp(m: Machine, i: Instruction) -> None:
    """cp.async: the bytes arrive when the thread waits for the group; until then there is poison."""
    if "commit_group" in i.modifiers:
        m.groups[m.selected] += 1
    elif "wait_group" in i.modifiers or "wait_all" in i.modifiers:
        left = i.operands[0] if i.operands else 0
        assert isinstance(left, int)
        _finish_copies(m, left, i)
    else:
        to, source, size = i.operands[:3]
        assert isinstance(size, int)
        into, from_ = address(m, to), address(m, source)
        read = m.get(i.operands[3], "u32") if len(i.operands) > 3 else np.full(m.selected.size, size)
        m.shared.store(m.selected, into, np.full((m.selected.size, size), 0xFF, np.uint8))
        m.copies.append((m.selected, m.groups[m.selected].copy(), into, from_, size, read))


def _finish_copies(m: Machine, left: int, i: Instruction) -> None:
    waiting = np.zeros(m.count, bool)
    waiting[m.selected] = True
    kept = []
    for threads, group, into, from_, size, read in m.copies:
        done = waiting[threads] & ((group < m.groups[threads] - left) | ("wait_all" in i.modifiers))
        if done.any():
            data = np.zeros((int(done.sum()), size), np.uint8)
            if not np.isin(read, (0, size)).all():
                raise NotImplementedError("an asynchronous copy of a part")
            whole = read[done] == size
            data[whole] = m.memory.load(from_[done][whole], size)
            m.shared.store(threads[done], into[done], data)
        if not done.all():
            kept.append((*(a[~done] for a in (threads, group, into, from_)), size, read[~done]))
    m.copies = kept


EXECUTE: dict[str, Execute] = {
    **dict.fromkeys(_ARITHMETIC, _arithmetic),
    **dict.fromkeys(("mul", "mad"), _mul),
    **dict.fromkeys(("shl", "shr"), _shift),
    **dict.fromkeys(("mov", "cvta"), _mov),
    **dict.fromkeys(("bar", "barrier"), _bar),
    "bfe": _bfe,
    "ld": _ld,
    "st": _st,
    "setp": _setp,
    "selp": _selp,
    "cvt": _cvt,
    "popc": _popc,
    "prmt": _prmt,
    "dp4a": _dp4a,
    "bra": _bra,
    "ret": _ret,
    "shfl": _shfl,
    "redux": _redux,
    "cp": _cp,
    "ldmatrix": ldmatrix,
    "mma": mma,
}
