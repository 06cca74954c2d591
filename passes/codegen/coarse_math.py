"""Coarse functions on 16 numbers of f32, for results that are then rounded far below f32. They take half the instructions, and
no memory."""

from functools import cache, reduce

import numpy as np
from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, math, vector

from gossamer.passes.codegen.float_vectors import (
    IN_REGISTER,
    LEAST_EXPONENT,
    LOG2_E,
    ROUNDS,
    at_most,
    held,
    int_of,
    number,
    pieces_of_erf,
    polynomial,
    splat,
    times_power_of_2,
)
from gossamer.passes.loops.queries import defining
from gossamer.passes.loops.vectors import vector_of

_PIECES_A_UNIT = 5  # pieces of erf for each unit of x: a register has the coefficients of all


def may_be_coarse(op: ir.Operation) -> bool:
    """Whether the result of an op may be approximate."""
    return "afn" in str(op.attributes["fastmath"])


def coarse_erf(x: ir.Value) -> ir.Value:
    """Returns erf(x) with an error up to 1e-4, and NaN for NaN."""
    unit, x = _scaled(x)
    ints, rounds, scale = vector_of(IN_REGISTER, int_of(32)), splat(ROUNDS, x), splat(_PIECES_A_UNIT * unit, x)
    last = splat((IN_REGISTER - 1) / (_PIECES_A_UNIT * unit), x)
    size = at_most(math.absf(x), last, arith.CmpFPredicate.OLT)
    rounded = vector.fma(size, scale, rounds)
    piece, r = vector.bitcast(ints, rounded), vector.fma(size, scale, arith.subf(rounds, rounded))
    found = [
        llvm.call_intrinsic(x.type, "llvm.x86.avx512.permvar.sf.512", [held(row, x), piece], [], [])
        for row in pieces_of_erf(3, IN_REGISTER, _PIECES_A_UNIT)
    ]
    return math.copysign(reduce(lambda value, c: vector.fma(value, r, c), found), x)


def multiply_with_one_more(one_more: ir.Operation, value: ir.Value) -> None:
    """Replaces products with value + 1 by one multiply-add: a (value + 1) = a value + a."""
    for user in [use.owner.operation for use in one_more.results[0].uses]:
        if user.name == "arith.mulf" and user.operands[0] != user.operands[1]:
            (factor,) = (operand for operand in user.operands if operand != one_more.results[0])
            with ir.InsertionPoint(user), user.location:
                user.results[0].replace_all_uses_with(vector.fma(factor, value, factor))
            user.erase()


def coarse_exp_below_zero(x: ir.Value) -> ir.Value:
    """Returns exp(x) of numbers that are not positive, or NaN. Numbers below -86 give 0.

    The relative error is at most a ten-thousandth, a twentieth of the error of rounding to bf16.
    """
    in_twos = arith.mulf(x, splat(LOG2_E, x))
    no_mask, as_set = arith.constant(int_of(IN_REGISTER), -1), arith.constant(int_of(32), 4)
    down = [arith.constant(int_of(32), 9), splat(0.0, x), no_mask, as_set]
    rest = llvm.call_intrinsic(x.type, "llvm.x86.avx512.mask.reduce.ps.512", [in_twos, *down], [], [])
    normal = arith.cmpf(arith.CmpFPredicate.UGE, x, splat(LEAST_EXPONENT, x))
    return times_power_of_2(polynomial(_power_of_2(), rest), in_twos, normal)


@cache
def _power_of_2() -> list[float]:
    """Returns the coefficients of a polynomial of degree 3 for 2^x in [0, 1], highest power first, from Chebyshev's nodes."""
    nodes = (1 + np.polynomial.chebyshev.chebpts1(4)) / 2
    return [float(c) for c in np.linalg.solve(np.vander(nodes), np.exp2(nodes))]


def _scaled(x: ir.Value) -> tuple[float, ir.Value]:
    """Returns (c, y) if x is a positive constant c times y, else (1, x)."""
    op = defining(x)
    if op is not None and op.name == "arith.mulf":
        for factor, other in (op.operands, reversed(op.operands)):
            if (c := number(factor)) is not None and c > 0:
                return c, other
    return 1.0, x
