"""Writes and reads hints: facts about a weight that the importer adds to the region's argument, for choose-format.

    %w: tensor<3072x768xf32, #CSR> {kernel.density = 0.1 : f64, kernel.block = [16, 16], kernel.fill = 1.0 : f64}

Each hint is a field of `Matrix`, left out if it has its default. Rows and columns are those of the product, however the tensor
is stored. One more attribute, `kernel.schedule`, names a family, for chains whose weights have different ones.
"""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import func

from gossamer.passes.framework.family import Matrix

_PREFIX = "kernel."
_NUMBERS = ("density", "fill", "skew")
_TUPLES = ("block", "nm", "vnm", "groups")
_SCHEDULE = _PREFIX + "schedule"
_DEFAULTS = Matrix(1, 1, 1, "f32", 512)


def hints(matrix: Matrix, schedule: str | None = None) -> ir.DictAttr:
    """Returns the hints about a weight as attributes of its argument, with the schedule that it must get, if given.

    The caller has entered a context and a location.
    """
    found: dict[str, ir.Attribute] = {
        _PREFIX + name: ir.FloatAttr.get(ir.F64Type.get(), getattr(matrix, name))
        for name in _NUMBERS
        if name == "density" or getattr(matrix, name) != getattr(_DEFAULTS, name)
    }
    integer = ir.IntegerType.get_signless(64)
    for name in _TUPLES:
        if numbers := getattr(matrix, name):
            found[_PREFIX + name] = ir.ArrayAttr.get([ir.IntegerAttr.get(integer, n) for n in numbers])
    if schedule is not None:
        found[_SCHEDULE] = ir.StringAttr.get(schedule)
    return ir.DictAttr.get(found)


def hints_of(function: func.FuncOp, argument: int) -> dict[str, Any]:
    """Returns the fields of `Matrix` that an argument's attributes give."""
    if "arg_attrs" not in function.attributes:
        return {}
    attributes = ir.DictAttr(ir.ArrayAttr(function.attributes["arg_attrs"])[argument])
    found: dict[str, Any] = {
        name: ir.FloatAttr(attributes[_PREFIX + name]).value for name in _NUMBERS if _PREFIX + name in attributes
    }
    for name in _TUPLES:
        if _PREFIX + name in attributes:
            found[name] = tuple(ir.IntegerAttr(n).value for n in ir.ArrayAttr(attributes[_PREFIX + name]))
    return found


def schedule_of(function: func.FuncOp, argument: int) -> str | None:
    """Returns the schedule that the hints of a weight name, or None."""
    if "arg_attrs" not in function.attributes:
        return None
    attributes = ir.DictAttr(ir.ArrayAttr(function.attributes["arg_attrs"])[argument])
    return ir.StringAttr(attributes[_SCHEDULE]).value if _SCHEDULE in attributes else None
