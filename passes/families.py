"""The families of schedules, by name. A new one is a file with its lowering and a line here."""

from gossamer.passes.family import Family
from gossamer.passes.lower_gather import GATHER
from gossamer.passes.lower_kblock import KBLOCK

FAMILIES: dict[str, Family] = {family.name: family for family in (KBLOCK, GATHER)}
