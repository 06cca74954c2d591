"""Building blocks for functions on vectors of floats: constants, polynomials, bounds, powers of two."""

import math as numbers
from collections.abc import Sequence
from functools import cache

import numpy as np
from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, vector

from gossamer.passes.loops.queries import defining
from gossamer.passes.loops.vectors import vector_of

IN_REGISTER = 16
"""Number of f32 in 512 bits."""
LOG2_E = 1.44269504088896341
LEAST_EXPONENT = -86.0
"""For exponents above this, powers of e are normal numbers."""
ROUNDS = 1.5 * 2.0**23
"""Adding this to an f32 rounds it to an integer, which the lowest bits of the sum then have."""


def int_of(bits: int) -> ir.Type:
    """Returns the type of integers of `bits` bits."""
    return ir.IntegerType.get_signless(bits)


def splat(value: float, like: ir.Value) -> ir.Value:
    """Returns a number in all lanes of a vector of the type of `like`."""
    element = ir.FloatAttr.get(ir.VectorType(like.type).element_type, value)
    return arith.constant(like.type, ir.DenseElementsAttr.get_splat(like.type, element))


def number(value: ir.Value) -> float | None:
    """Returns the number of a constant, or of a vector with the same constant in all lanes. None for other values."""
    op = defining(value)
    if op is None:
        return None
    if op.name in ("vector.broadcast", "arith.truncf", "arith.extf"):
        return number(op.operands[0])
    given = op.attributes["value"] if op.name == "arith.constant" else None
    if isinstance(given, ir.DenseElementsAttr) and given.is_splat:
        given = given.get_splat_value()
    return given.value if isinstance(given, ir.FloatAttr) else None


def held(coefficients: np.ndarray, like: ir.Value) -> ir.Value:
    """Returns a constant vector of these numbers, of the type of `like`."""
    return arith.constant(like.type, ir.DenseElementsAttr.get(coefficients, type=like.type))


def polynomial(coefficients: Sequence[float], x: ir.Value) -> ir.Value:
    """Returns a polynomial of x by Horner's rule. Coefficients have the highest power first."""
    value = splat(coefficients[0], x)
    for c in coefficients[1:]:
        value = vector.fma(value, x, splat(c, x))
    return value


def at_most(x: ir.Value, bound: ir.Value, less: arith.CmpFPredicate) -> ir.Value:
    """Returns x, or the bound in lanes where it is `less` than x. NaN stays. On x86 this is one instruction."""
    return arith.select(arith.cmpf(less, bound, x), bound, x)


def times_power_of_2(p: ir.Value, exponent: ir.Value, where: ir.Value) -> ir.Value:
    """Returns p times 2^floor(exponent) in the lanes of `where`, and 0 in others, for vectors of 512 bits."""
    mask = vector.extract(vector.bitcast(vector_of(1, int_of(IN_REGISTER)), where), [], [0])
    as_set = arith.constant(int_of(32), 4)  # the thread's own rounding mode
    given = [p, exponent, splat(0.0, p), mask, as_set]
    return llvm.call_intrinsic(p.type, "llvm.x86.avx512.mask.scalef.ps.512", given, [], [])


@cache
def pieces_of_erf(terms: int, pieces: int, a_unit: int) -> np.ndarray:
    """Returns coefficients [terms, pieces] of polynomials for erf, highest power first.

    Their variable is the distance to piece / a_unit, in units of a piece. The last piece is the constant 1.
    """
    middle = np.arange(pieces - 1)[:, None]
    nodes = np.polynomial.chebyshev.chebpts1(terms) / 2
    values = np.vectorize(numbers.erf)((middle + nodes) / a_unit)
    inner = np.linalg.solve(np.vander(nodes), values.T)
    return np.concatenate([inner, [[0.0]] * (terms - 1) + [[1.0]]], 1).astype(np.float32)
