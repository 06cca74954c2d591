"""Describes the schedules of a report with the docstrings of the files that lower them."""

import inspect
from collections.abc import Iterable


def family_notes(schedules: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns what each schedule of products does, and how its cycles are predicted. Leaves other schedules out.

    The text after the first ": " of the module's docstring, up to the first empty line, says what it does. The docstring of the
    family's `cycles` says how they are predicted.
    """
    from gossamer.passes.schedules.families import FAMILIES  # imports MLIR

    notes = dict[str, dict[str, str]]()
    for name in sorted({part for each in schedules for part in each.split(", ")}):
        family = FAMILIES.get(name)
        if family is not None:
            module = inspect.getdoc(inspect.getmodule(family.cycles)) or ""
            about = module.partition("\n\n")[0].partition(": ")[2].replace("\n", " ")
            notes[name] = {"about": about, "cost": " ".join((inspect.getdoc(family.cycles) or "").split())}
    return notes
