"""Finds the lines of a region's contract IR that each line of a later stage comes from, by MLIR's locations.

    contract IR     13:   %3 = linalg.matmul ins(%arg0, %transposed ...)         parsed as loc("-":13:10)
    kernel IR        4:   %0 = "kernel.spmm"(%arg0, %arg1) ...                   loc("-":13:10)           →  (13,)
    assembly       950:   vfmadd231ps (%rsi,%r8,4), %zmm1, %zmm4                 .loc 1 2 0, origin 2     →  (13,)

MLIR's passes keep the locations of ops. Ours do too, because they create ops at the location of the op that they replace.
"""

import re
from dataclasses import dataclass

from torch_mlir import ir

from gossamer.passes.framework import upstream
from gossamer.passes.framework.translate import translate_to_llvm_ir

Origins = tuple[tuple[int, ...], ...]
"""For each line of a text: the lines of the contract IR that it comes from, counted from 1."""

_PLACE = re.compile(r'"-":(\d+):')
_ALIAS = re.compile(r"#loc\d*")
_DEFINITION = re.compile(r"(#loc\d*) = loc\((.*)\)$")
_SIMPLE = re.compile(r" loc\((#loc\d*)\)$")
_DEBUG = re.compile(r",? !dbg (!\d+)")
_METADATA = re.compile(r'!llvm\.(dbg\.cu|module\.flags) =|!\d+ = (distinct )?!(DI\w+\(|\{i32 \d, !"Debug Info Version")')
_SECTION = re.compile(r'\t\.section\t"?\.([\w.-]+)')
_LOC = re.compile(r"\t\.loc\t\d+ (\d+)")
_FOR_DEBUGGER = re.compile(r"\t\.file\t\d|\t\.cfi_|\.L(tmp|func_begin)\d+:")
_FILE, _FIRST = "origin", 1 << 20
"""The file name in the locations that `traced` sets, and the line of its first entry. Lower lines are of block arguments."""
_SCOPES = "ensure-debug-info-scope-on-llvm-func{emission-kind=LineTablesOnly}"


class StageText(str):
    """The text of a stage, with the label of the pass that made it and the origins of its lines."""

    label: str
    origins: Origins

    def __new__(cls, text: str, label: str = "", origins: Origins = ()) -> "StageText":
        made = super().__new__(cls, text)
        made.label, made.origins = label, origins
        return made


@dataclass(frozen=True)
class Traced:
    """LLVM IR with line numbers. Line number `_FIRST + i` stands for `origins[i]`."""

    llvm_ir: str
    origins: Origins


def printed(module: ir.Module, label: str = "") -> StageText:
    """Returns the text of a module, with the origins of its lines."""
    text = str(module)
    return StageText(text, label, _origins(text, module.operation.get_asm(enable_debug_info=True), _nowhere(module)))


def _nowhere(module: ir.Module) -> set[int]:
    """Returns the lines that are no origin: the module's own, which ops get that a pass creates without a location, and 0."""
    return {0, *map(int, _PLACE.findall(str(module.operation.location)))}


def _origins(text: str, located: str, nowhere: set[int]) -> Origins:
    """Returns the origins of the lines of a text, given the same text with locations. Empty if they differ otherwise."""
    aliases, lines = dict[str, str](), list[str]()
    for line in located.split("\n"):
        if defined := _DEFINITION.match(line):
            aliases[defined[1]] = defined[2]
        else:
            lines.append(line)
    pairs = [_split(line) for line in lines]
    plain = text.split("\n")
    # In a line that begins a block or a region, the last location is that of an argument.
    pairs = [(code, [] if code.endswith("{") or code.lstrip().startswith("^") else found) for code, found in pairs]
    if [code for code, _ in pairs] != plain:
        return ()
    places = {alias: _places(alias, aliases) for alias in aliases}
    found = [tuple(sorted({p for loc in locs[-1:] for p in _read(loc, places)} - nowhere)) for _, locs in pairs]
    groups = list[tuple[int, list[int]]]()
    for at, line in enumerate(plain):
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith("}"):
            while groups and groups[-1][0] > indent:
                groups.pop()
            if groups and groups[-1][0] == indent:
                groups[-1][1].append(at)
                if found[at] and not line.endswith("{"):
                    for header in groups.pop()[1]:
                        found[header] = found[at]
        elif line.endswith("{"):
            groups.append((indent, [at]))
    return tuple(found)


def _split(line: str) -> tuple[str, list[str]]:
    """Returns a line without its locations, and the locations."""
    if line.count(" loc(") == 1 and (simple := _SIMPLE.search(line)):
        return line[: simple.start()], [simple[1]]
    code, locations, at = "", list[str](), 0
    while (start := line.find(" loc(", at)) >= 0:
        depth, end = 1, start + 5
        while depth and end < len(line):
            depth += {"(": 1, ")": -1}.get(line[end], 0)
            end += 1
        code += line[at:start]
        locations.append(line[start + 5 : end - 1])
        at = end
    return code + line[at:], locations


def _places(alias: str, aliases: dict[str, str]) -> set[int]:
    text = aliases.get(alias, "")
    inner = [each for each in _ALIAS.findall(text) if each != alias]
    return {int(n) for n in _PLACE.findall(text)} | {p for each in inner for p in _places(each, aliases)}


def _read(location: str, places: dict[str, set[int]]) -> set[int]:
    own = {int(n) for n in _PLACE.findall(location)}
    return own | {p for alias in _ALIAS.findall(location) for p in places.get(alias, ())}


def line_location(line: int) -> ir.Location:
    """Returns the location for a line of the text that a module is parsed from."""
    return ir.Location.file("-", line, 0)


def moved(operation: ir.Operation, lines: int) -> None:
    """Adds `lines` to the line numbers in the locations of an op and of all ops inside."""

    def move(op: ir.Operation) -> ir.WalkResult:
        places = sorted({int(n) for n in _PLACE.findall(str(op.location))} - {0})
        if places:
            op.location = ir.Location.fused([line_location(place + lines) for place in places])
        return ir.WalkResult.ADVANCE

    operation.walk(move)


def share_places(module: ir.Module) -> None:
    """Gives the ops of a function that several stages share the places of all these stages.

    The location of such a function has the places of the stages, in order. Equal stages have equal texts in the contract IR, so
    each op has a place in each of them, at the same distance from its beginning.
    """
    nowhere = _nowhere(module)
    for function in module.body.operations:
        first, *others = [place for place in _in_order(function.location) if place not in nowhere] or [0]
        if not others:
            continue

        def spread(op: ir.Operation, first: int = first, others: list[int] = others) -> ir.WalkResult:
            places = [place for place in _in_order(op.location) if place not in nowhere]
            places += [place + other - first for other in others for place in places]
            if places:
                op.location = ir.Location.fused([line_location(place) for place in places])
            return ir.WalkResult.ADVANCE

        function.operation.walk(spread)
        function.operation.location = line_location(first)


def _in_order(location: ir.Location) -> list[int]:
    return list(dict.fromkeys(int(n) for n in _PLACE.findall(str(location))))


def traced(module: ir.Module) -> Traced:
    """Returns the LLVM IR of a module of LLVM's dialect, with line numbers. This replaces the locations in the module."""
    numbers, nowhere = dict[tuple[int, ...], int](), _nowhere(module)

    def renumber(op: ir.Operation) -> ir.WalkResult:
        places = tuple(sorted({int(n) for n in _PLACE.findall(str(op.location))} - nowhere))
        number = numbers.setdefault(places, _FIRST + len(numbers))
        op.location = ir.Location.file(_FILE, number, 0)
        return ir.WalkResult.ADVANCE

    module.operation.walk(renumber)
    upstream.run(_SCOPES, module)
    return Traced(translate_to_llvm_ir(module.operation), tuple(numbers))


def of_assembly(located: str, origins: Origins) -> StageText:
    """Returns assembly without its line numbers, with the origins of its lines."""
    current: tuple[int, ...] = ()
    of_debugger = False
    lines, found = list[str](), list[tuple[int, ...]]()
    for line in located.split("\n"):
        if section := _SECTION.match(line):
            of_debugger = section[1].startswith("debug_")
        if place := _LOC.match(line):
            current = _entry(origins, int(place[1]))
        elif not of_debugger and not _FOR_DEBUGGER.match(line):
            lines.append(line)
            found.append(current if re.match(r"\t[a-z]", line) else ())
    return StageText("\n".join(lines), origins=tuple(found))


def _entry(origins: Origins, number: int) -> tuple[int, ...]:
    at = number - _FIRST
    return origins[at] if 0 <= at < len(origins) else ()


def of_llvm_ir(located: str, origins: Origins) -> StageText:
    """Returns LLVM IR without its line numbers, with the origins of its lines."""
    numbers = {
        tag: int(line) for tag, line in re.findall(r"^(!\d+) = (?:distinct )?!DILocation\(line: (\d+)", located, re.MULTILINE)
    }
    lines, found = list[str](), list[tuple[int, ...]]()
    for line in located.split("\n"):
        if not _METADATA.match(line):
            tag = _DEBUG.search(line)
            lines.append(_DEBUG.sub("", line))
            found.append(_entry(origins, numbers.get(tag[1], 0)) if tag else ())
    return StageText("\n".join(lines), origins=tuple(found))


def carried(text: str, source: str, origins: Origins) -> Origins:
    """Returns the origins of the lines of a text that has all lines of `source`, in order, between other lines."""
    found, at, lines = list[tuple[int, ...]](), 0, source.split("\n")
    for line in text.split("\n"):
        same = at < len(lines) and lines[at] == line
        found.append(origins[at] if same and at < len(origins) else ())
        at += same
    return tuple(found) if at == len(lines) else ()
