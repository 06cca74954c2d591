"""PTX text to programs: as much of the syntax as LLVM's NVPTX back end writes."""

import re
from dataclasses import dataclass, field

_WIDTH = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "f32": 32, "f64": 64}


@dataclass(frozen=True)
class Register:
    """A register, or a special one such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Address:
    """[base + offset]; the base is a register, or the name of a parameter or of shared memory."""

    base: Register | str
    offset: int


Operand = Register | Address | int | str | tuple["Operand", ...]


@dataclass(frozen=True)
class Instruction:
    """`@guard op.modifiers operands`; a guard is (register, value on which it runs)."""

    op: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None
    text: str


@dataclass
class Program:
    """A kernel: its parameters in order, bytes of static shared memory, where each shared variable begins, and its code."""

    name: str
    parameters: list[str]
    widths: dict[str, int]
    shared: dict[str, int]
    static_bytes: int
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse(ptx: str) -> dict[str, Program]:
    """The kernels of a PTX module by name."""
    text = re.sub(r"//[^\n]*", "", ptx)
    entries = list(re.finditer(r"\.visible\s+\.entry\s+(\w+)\s*\((.*?)\)([^{;]*)\{(.*?)\n\}", text, re.DOTALL))
    outside = text[: entries[0].start()] if entries else text
    return {entry[1]: _program(entry[1], entry[2], entry[4], outside) for entry in entries}


def _program(name: str, parameters: str, body: str, outside: str) -> Program:
    shared: dict[str, int] = {}
    at = 0
    for align, variable, size in re.findall(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$.]+)\[(\d+)\]", outside + body):
        # No more than the alignment that is promised.
        at = -(-at // 2048) * 2048 + int(align) if int(align) < 2048 else -(-at // int(align)) * int(align)
        shared[variable] = at
        at += int(size)
    for variable in re.findall(r"\.extern\s+\.shared\s+\.align\s+\d+\s+\.b8\s+([\w$.]+)\[\]", outside):
        shared[variable] = -(-at // 16) * 16
    names = [p.split()[-1] for p in parameters.split(",") if p.strip()]
    widths = {f"%{prefix}": _WIDTH[kind] for kind, prefix in re.findall(r"\.reg\s+\.(\w+)\s+%(\w+)<", body)}
    program = Program(name, names, widths, shared, at)
    for statement in re.findall(r"\$?[\w$]+:(?!:)|[^;:]+(?:::[^;:]+)*;", body):
        statement = " ".join(statement.rstrip(";").split())
        if statement.endswith(":"):
            program.labels[statement[:-1]] = len(program.code)
        elif statement and not statement.startswith("."):  # a directive
            program.code.append(_instruction(statement))
    return program


def _instruction(statement: str) -> Instruction:
    guard, rest = None, statement
    if statement.startswith("@"):
        word, _, rest = statement.partition(" ")
        guard = (Register(word.lstrip("@!")), "!" not in word)
    opcode, _, operands = rest.partition(" ")
    op, *modifiers = opcode.split(".")
    pieces = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", operands)
    return Instruction(op, tuple(modifiers), tuple(map(_operand, pieces)), guard, statement)


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(_operand(part.strip()) for part in text[1:-1].split(","))
    if text.startswith("["):
        base, _, offset = re.sub(r"\s", "", text[1:-1]).replace("+-", "-").replace("-", "+-").partition("+")
        return Address(Register(base) if base.startswith("%") else base, int(offset or 0))
    if text.startswith("%"):
        return Register(text.partition("|")[0])
    if re.fullmatch(r"0[fFdD][0-9A-Fa-f]+", text):
        return int(text[2:], 16)
    if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", text):
        return int(text.removesuffix("U"), 0)
    return text
