"""Rewrites the LLVM IR that MLIR's LLVM 24 prints for the parser of llvmlite's LLVM 22. Replaces bfloat for CPUs without it.

The newer printer writes floats as `f0x3F800000`, `+inf`, `+qnan`, or in decimals that may be inexact. The older parser reads
only exact decimals and its own hexadecimal forms. So every float constant is rewritten in the older hexadecimal form.
"""

import re
import struct
from functools import lru_cache

_TYPE = r"\b(?:bfloat|half|float|double)\b"
_CONSTANT = r"(?<![\w.%@\"$-])[+-]?(?:f0x[0-9A-Fa-f]+|\d+\.\d+(?:e[+-]?\d+)?|inf\b|q?nan\b)"
_TOKEN = re.compile(f"({_TYPE})|({_CONSTANT})")
_IN_CONSTANTS = "f0x", ".", "inf", "nan"
_STRUCT = {"half": "e", "float": "f", "double": "d"}


def readable_by_older(llvm_ir: str) -> str:
    """Rewrites the float constants of a module. Each has the float type that its line names last before it."""
    lines = llvm_ir.split("\n")
    return "\n".join(_rewrite(line) if any(map(line.__contains__, _IN_CONSTANTS)) else line for line in lines)


def bfloat_as_bits(llvm_ir: str) -> str:
    """Replaces bfloat by i16 in a module that moves such values but does not compute with them. Run `readable_by_older` first.

    For a CPU without bf16, LLVM turns even moves into conversions: calls to a function that few processes contain.
    """
    text = re.sub(r"0xR([0-9A-F]{4})\b", lambda match: str(int(match[1], 16)), llvm_ir)
    text = re.sub(r"\bbfloat\b", "i16", re.sub(r"\.v(\d+)bf16\b", r".v\1i16", text))
    lines = text.split("\n")
    declared = [line.partition("@")[2].partition("(")[0] if line.startswith("declare ") else "" for line in lines]
    # A function that was declared for bfloat and for i16 is now declared twice.
    return "\n".join(line for i, line in enumerate(lines) if not declared[i] or declared[i] not in declared[:i])


def _rewrite(line: str) -> str:
    type_ = ""

    def token(match: re.Match[str]) -> str:
        nonlocal type_
        if match[1]:
            type_ = match[1]
            return match[1]
        return _constant(match[2], type_) if type_ else match[2]

    return _TOKEN.sub(token, line)


@lru_cache(1024)
def _constant(text: str, type_: str) -> str:
    """Returns a constant in the older form: the bits of a double for float and double, its own 16 bits for half and bfloat."""
    bits = int(text[3:], 16) if text.startswith("f0x") else _bits(float(text.replace("q", "")), type_)
    if type_ == "double":
        return f"0x{bits:016X}"
    if type_ == "float":
        return f"0x{_bits(struct.unpack('f', struct.pack('I', bits))[0], 'double'):016X}"
    return f"0x{'H' if type_ == 'half' else 'R'}{bits:04X}"


def _bits(value: float, type_: str) -> int:
    if type_ == "bfloat":
        # Decimals are printed with enough digits that cutting the rounded float gives the bfloat back.
        return (_bits(value, "float") + 0x8000) >> 16
    packed = struct.pack(f"<{_STRUCT[type_]}", value)
    return int.from_bytes(packed, "little")
