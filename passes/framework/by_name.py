"""Finds passes and schedules by the names of their files, without importing them.

a pass      "lower-block" is the class `LowerBlock`, with a method `run`, of a file `lower_block.py` in any room of `passes/`
a schedule  "block" is the `Family` called `BLOCK` of a file `lower_block.py` in a room of schedules

`registry.py` asks for the passes, `schedules/families.py` for the schedules.
"""

import re
from collections.abc import Iterator
from pathlib import Path

CPU_SCHEDULES, GPU_SCHEDULES = ("weights", "weights_bf16", "weights_int8"), ("gpu",)
"""The rooms of schedules."""

_HOUSE, _PACKAGE = Path(__file__).parents[1], __package__.rpartition(".")[0]


def passes() -> dict[str, str]:
    """Returns the place of each of our passes, by name, as "module:class"."""
    classes = {name: (file, "".join(map(str.capitalize, name.split("-")))) for name, file in sorted(_files("*", "*"))}
    return {name: f"{_module(file)}:{cls}" for name, (file, cls) in classes.items() if _has_pass(file, cls)}


def name_of(cls: type) -> str:
    """Returns the name of a pass: `LowerBlock` is "lower-block"."""
    return re.sub(r"(?<=.)(?=[A-Z])", "-", cls.__name__).lower()


def _has_pass(file: Path, cls: str) -> bool:
    text = file.read_text(encoding="utf-8")
    return any(f"\nclass {cls}{end}" in text for end in ":(") and "def run(self, module: ir.Module)" in text


def schedules(*rooms: str) -> dict[str, str]:
    """Returns the place of each schedule in some rooms, by name, as "module:family"."""
    found = {name.removeprefix("lower-"): file for room in rooms for name, file in _files(room, "lower_*")}
    variables = {name: name.replace("-", "_").upper() for name in sorted(found)}
    families = {name: v for name, v in variables.items() if f"\n{v} = Family(" in found[name].read_text(encoding="utf-8")}
    return {name: f"{_module(found[name])}:{variable}" for name, variable in families.items()}


def _files(room: str, name: str) -> Iterator[tuple[str, Path]]:
    for file in _HOUSE.glob(f"{room}/{name}.py"):
        yield file.stem.replace("_", "-"), file


def _module(file: Path) -> str:
    return f"{_PACKAGE}.{file.parent.name}.{file.stem}"
