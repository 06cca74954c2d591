"""Loads the families of schedules and lists them by name: those for CPUs and those for GPUs."""

from importlib import import_module

from gossamer.passes.framework import by_name
from gossamer.passes.framework.family import Family


def _declared(*rooms: str) -> dict[str, Family]:
    places = ((name, *place.split(":")) for name, place in by_name.schedules(*rooms).items())
    return {name: getattr(import_module(module), family) for name, module, family in places}


FAMILIES = _declared(*by_name.CPU_SCHEDULES)
GPU_FAMILIES = _declared(*by_name.GPU_SCHEDULES)
ALL_FAMILIES = FAMILIES | GPU_FAMILIES
