"""Docstrings as reStructuredText for the site.

In the code, arguments and their explanations stand in two columns. On the site they become a definition list, which narrow
screens show one below the other. Text in backticks becomes code.
"""

import re
from collections.abc import Iterator

ROW = re.compile(r"(?P<term>\S(?:.*?\S)?) {2,}(?P<text>\S.*)")
ITEM = "- "


def as_rst(docstring: str) -> list[str]:
    """The lines of the docstring, which `inspect.cleandoc` has unindented."""
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", docstring.strip("\n")):
        lines += [*(_code(block) if block.startswith("    ") else _block(block.splitlines())), ""]
    return lines


def _code(block: str) -> list[str]:
    return [".. code-block:: python", "", *block.splitlines()]


def _block(lines: list[str]) -> Iterator[str]:
    """Sentences, items, and rows of two columns in any order. A line that is indented goes on with the last one."""
    while lines:
        first, *lines = lines
        going_on = next((at for at, line in enumerate(lines) if not line.startswith("  ")), len(lines))
        below, after = lines[:going_on], lines[going_on:]
        row = ROW.fullmatch(first)
        if first.startswith(ITEM):
            yield ITEM + _inline(" ".join(line.strip() for line in (first[len(ITEM) :], *below)))
            if not (after and after[0].startswith(ITEM)):
                yield ""
        elif row or below:
            yield from _rows(row["term"] if row else first, [row["text"]] if row else [], below)
            if not (after and _is_row(after)):
                yield ""
        else:
            yield _inline(first)
            if after and (_is_row(after) or after[0].startswith(ITEM)):
                yield ""
        lines = after


def _is_row(lines: list[str]) -> bool:
    return ROW.fullmatch(lines[0]) is not None or (len(lines) > 1 and lines[1].startswith("  "))


def _rows(term: str, text: list[str], below: list[str]) -> Iterator[str]:
    """One entry of a definition list. Rows that are indented by two letters are a list within it."""
    inner = [line[2:] for line in below if re.match(r" {2}\S", line)]
    text += [line.strip() for line in below if not re.match(r" {2}\S", line)]
    yield from (_term(term), "    " + _inline(" ".join(text)))
    if inner:
        yield ""
    for line in inner:
        *terms, said = re.split(r" {2,}", line)
        yield from (f"    {_term(' '.join(terms))}", f"        {_inline(said)}")


def _term(term: str) -> str:
    return _literal(term.replace("`", ""))


def _inline(text: str) -> str:
    """Text whose parts in backticks are code, and whose other marks of reStructuredText are letters."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return re.sub(r"([\\*|_`])", r"\\\1", text)
    return "".join(_literal(part) + r"\ " if at % 2 else re.sub(r"([\\*|_])", r"\\\1", part) for at, part in enumerate(parts))


def _literal(text: str) -> str:
    return f"``{text}``"
