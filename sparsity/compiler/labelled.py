"""Makes assembly readable: puts the kernel IR above it, and labels each inner loop that multiplies by its schedule.

before   .LBB0_84:                               #   Parent Loop BB0_5 Depth=1
                                                 # =>        This Inner Loop Header: Depth=5
after    # broadcast: inner loop, 8 multiply-adds
         .LBB0_84:                               #   Parent Loop BB0_5 Depth=1
                                                 # =>        This Inner Loop Header: Depth=5
"""

import re

_BLOCK = re.compile(r"\.L(BB\w+):|(?:#|//) %bb\.")
_INNER = re.compile(r"(#|//) =>\s*This Inner Loop Header")
_IN_LOOP = re.compile(r"(?:#|//)\s+in Loop: Header=(BB\w+)")
_MULTIPLY = re.compile(
    r"\s+(?:v?fn?m(?:add|sub)\w+|vdpbf16ps|vpdp\w+|tdp\w+|v?pmadd\w+|v?mul[ps][sd]|fmla|fmul|bf\w*dot|bfm\w+|u?sdot)\s"
)
_SCHEDULE = re.compile(r'schedule = "([\w-]+)"')


def labelled(assembly: str, kernel_ir: str, schedule: str) -> str:
    """Returns LLVM's assembly, printed with comments, with labels.

    `schedule` names the loops if the kernel IR has no schedule, or several.
    """
    lines = assembly.split("\n")
    named = set(_SCHEDULE.findall(kernel_ir))
    name = named.pop() if len(named) == 1 else schedule
    mark = next((found[1] for line in lines if (found := _INNER.search(line))), "#")
    labels = {at: f"{mark} {name}: inner loop, {count} multiply-adds" for at, count in _products(lines).items() if count}
    above = [
        f'Schedule "{name}". The loops that multiply are labelled "{name}: inner loop". The kernel IR:',
        *kernel_ir.split("\n"),
    ]
    text = [part for at, line in enumerate(lines) for part in (labels.get(at), line) if part is not None]
    return "\n".join([*(f"{mark} {line}".rstrip() for line in above), *text])


def _products(lines: list[str]) -> dict[int, int]:
    """Returns the number of multiply-adds in each innermost loop, by the line of its label.

    A loop need not begin with its label, so LLVM's comments are read, which say for each block in which loop it is.
    """
    headers: dict[str, int] = {}
    counts: dict[str, int] = {}
    loop, label, begun = "", "", 0
    for at, line in enumerate(lines):
        if block := _BLOCK.match(line):
            loop, label, begun = "", block[1] or "", at
        if _INNER.search(line):
            loop = label
            headers[label] = begun
        elif inside := _IN_LOOP.search(line):
            loop = inside[1]
        counts[loop] = counts.get(loop, 0) + bool(_MULTIPLY.match(line))
    return {at: counts[name] for name, at in headers.items()}
