"""What the schedules of a report are and cost, in the words of the files that lower them."""

import inspect
from collections.abc import Iterable


def family_notes(schedules: Iterable[str]) -> dict[str, dict[str, str]]:
    """For each schedule of products what it does and how its cycles are predicted; others are left out."""
    from gossamer.passes.schedules.families import FAMILIES  # with MLIR behind it

    notes = dict[str, dict[str, str]]()
    for name in sorted({part for each in schedules for part in each.split(", ")}):
        family = FAMILIES.get(name)
        if family is not None:
            module = inspect.getdoc(inspect.getmodule(family.cycles)) or ""
            about = module.partition("\n\n")[0].partition(": ")[2].replace("\n", " ")
            notes[name] = {"about": about, "cost": " ".join((inspect.getdoc(family.cycles) or "").split())}
    return notes
