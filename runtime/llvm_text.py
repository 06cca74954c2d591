"""LLVM IR as MLIR's LLVM 24 prints it, made readable for llvmlite's LLVM 22.

The newer printer writes floats as `f0x3F800000`, `+inf`, `+qnan`, and in decimals that need not be exact; the older parser
reads exact decimals and its own hexadecimal forms only. So every float constant is rewritten as the latter.
"""

import re
import struct

_TYPE = r"\b(?:bfloat|half|float|double)\b"
_CONSTANT = r"(?<![\w.%@\"$-])[+-]?(?:f0x[0-9A-Fa-f]+|\d+\.\d+(?:e[+-]?\d+)?|inf\b|q?nan\b)"
_TOKEN = re.compile(f"({_TYPE})|({_CONSTANT})")
_STRUCT = {"half": "e", "float": "f", "double": "d"}


def readable_by_older(llvm_ir: str) -> str:
    """Rewrite the float constants of a module; each takes the float type named last before it on its line."""
    lines = llvm_ir.split("\n")
    return "\n".join(_rewrite(line) if _TOKEN.search(line) else line for line in lines)


def _rewrite(line: str) -> str:
    type_ = ""

    def token(match: re.Match[str]) -> str:
        nonlocal type_
        if match[1]:
            type_ = match[1]
            return match[1]
        return _constant(match[2], type_) if type_ else match[2]

    return _TOKEN.sub(token, line)


def _constant(text: str, type_: str) -> str:
    """`text` in the older form: of a double for float and double, of its own 16 bits for half and bfloat."""
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
