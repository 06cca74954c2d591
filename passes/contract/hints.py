"""Hints: what the importer notes about a weight, as attributes of the region's argument, for choose-format to read.

    %w: tensor<3072x768xf32, #CSR> {kernel.density = 0.1 : f64, kernel.block = [16, 16], kernel.fill = 1.0 : f64}

Each is a field of `Matrix` (rows and columns as the product sees them, however the tensor is stored), left out where it
has its default. `kernel.schedule` is none: it asks for a family, where the weights of a chain have different ones.
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
    """The hints about a weight, as attributes of its argument; the schedule it is to have, if it is to have one of its own.

    Needs a context and a location.
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
    """The fields of `Matrix` that an argument's attributes give."""
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
    """The schedule that a weight is to have."""
    if "arg_attrs" not in function.attributes:
        return None
    attributes = ir.DictAttr(ir.ArrayAttr(function.attributes["arg_attrs"])[argument])
    return ir.StringAttr(attributes[_SCHEDULE]).value if _SCHEDULE in attributes else None
