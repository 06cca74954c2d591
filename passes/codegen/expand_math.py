"""expand-math: expands exp, erf and tanh on vectors of f32 to a few multiply-adds.

before   %1 = math.erf %0 : vector<16xf32>
after    %1 = x * P(x^2) / Q(x^2) with x = %0 clamped to [-4, 4], and NaN kept

Scalars, and vectors of f64, are left to the C library (convert-math-to-libm). For normal numbers, exp is within 2 units in the
last place of f32, erf and tanh within 6. Results that are only added to 1 have cheaper forms:

exp, as in the logistic function  two thirds of the instructions, because results that are no normal numbers do not matter
erf, as in GELU                   with vectors of 512 bits, a polynomial of degree 4, whose coefficients for 32 pieces are in
                                  registers: four fifths of the time (Zen 5)
erf that may be approximate       the one of coarse_math.py (see allow-approximations)

Sources: exp is Cephes' expf (Moshier, 1992); erf and tanh are the rational minimax approximations of Eigen 3. Pieces of erf
interpolate it at Chebyshev's nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, math, vector

from gossamer.passes.codegen.coarse_math import coarse_erf, may_be_coarse, multiply_with_one_more
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
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import vector_of

_ERF_P = (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
          -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02)  # fmt: skip
_ERF_Q = (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
          -1.42647390514189e-02)  # fmt: skip
_TANH_P = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
           1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03)  # fmt: skip
_TANH_Q = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP_MIN, _EXP_MAX = -104.0, 89.0  # beyond these, exp is 0 or infinity in f32
_POWER_MIN, _POWER_MAX = -87.33, 88.72  # within these, e^x is a normal number, so n can be added to an exponent
_PIECES, _PIECES_A_UNIT = 32, 8  # pieces of erf, the last of which is 1, and pieces for each unit of x


@dataclass(frozen=True)
class ExpandMath:
    """Expand transcendental functions on vectors of f32; `bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for name, expand in _EXPANSIONS.items():
            for op in walk(module, name):
                type_ = op.results[0].type
                if isinstance(type_, ir.VectorType) and isinstance(ir.VectorType(type_).element_type, ir.F32Type):
                    with ir.InsertionPoint(op), op.location:
                        beside_one = self._beside_one(op) if _only_added_to_one(op) else None
                        value = (beside_one or expand)(op.operands[0])
                        users = [use.owner.operation for use in op.results[0].uses] if beside_one is coarse_erf else []
                        for user in users:
                            multiply_with_one_more(user, value)
                        op.results[0].replace_all_uses_with(value)
                    op.erase()

    def _beside_one(self, op: ir.Operation) -> Callable[[ir.Value], ir.Value] | None:
        """Returns the cheaper form of a function whose results are only added to 1, or None."""
        if op.name == "math.exp":
            return _exp_beside_one
        if op.name != "math.erf":
            return None
        if ir.VectorType(op.results[0].type).shape != [IN_REGISTER] or self.bits != 32 * IN_REGISTER:
            return _erf_beside_one
        return coarse_erf if may_be_coarse(op) else _erf_by_pieces


def _clamped(x: ir.Value, low: float, high: float) -> ir.Value:
    return arith.maxnumf(arith.minnumf(x, splat(high, x)), splat(low, x))


def _rational(x: ir.Value, bound: float, p: Sequence[float], q: Sequence[float]) -> ir.Value:
    below = at_most(x, splat(bound, x), arith.CmpFPredicate.OLT)
    clamped = at_most(below, splat(-bound, x), arith.CmpFPredicate.OGT)
    square = arith.mulf(clamped, clamped)
    numerator = arith.mulf(clamped, polynomial(p, square))
    return arith.divf(numerator, polynomial(q, square))


def _erf(x: ir.Value) -> ir.Value:
    value = _erf_beside_one(x)
    below = at_most(value, splat(1.0, x), arith.CmpFPredicate.OLT)
    return at_most(below, splat(-1.0, x), arith.CmpFPredicate.OGT)


def _erf_beside_one(x: ir.Value) -> ir.Value:
    """Returns erf(x), or up to 2 units more than 1 where erf is 1, which does not matter in a sum with 1."""
    return _rational(x, 4.0, _ERF_P, _ERF_Q)


def _erf_by_pieces(x: ir.Value) -> ir.Value:
    """Returns erf(x) of 16 numbers with an error up to 7e-8, and NaN for NaN. |x| is rounded to eighths; the lowest bits of the
    rounded number are the number of the piece."""
    ints, rounds = vector_of(IN_REGISTER, int_of(32)), splat(ROUNDS / _PIECES_A_UNIT, x)
    last = splat((_PIECES - 1) / _PIECES_A_UNIT, x)
    size = at_most(math.absf(x), last, arith.CmpFPredicate.OLT)
    rounded = arith.addf(size, rounds)
    piece, r = vector.bitcast(ints, rounded), arith.subf(size, arith.subf(rounded, rounds))
    powers = np.float32(_PIECES_A_UNIT) ** np.arange(4, -1, -1, dtype=np.float32)[:, None]
    found = [
        llvm.call_intrinsic(x.type, "llvm.x86.avx512.vpermi2var.ps.512", [held(low, x), piece, held(high, x)], [], [])
        for low, high in (powers * pieces_of_erf(5, _PIECES, _PIECES_A_UNIT)).reshape(-1, 2, IN_REGISTER)
    ]
    return math.copysign(reduce(lambda value, c: vector.fma(value, r, c), found), x)


def _tanh(x: ir.Value) -> ir.Value:
    return _rational(x, 7.99881172180175781, _TANH_P, _TANH_Q)


def _exp(x: ir.Value) -> ir.Value:
    lanes = ir.VectorType(x.type).shape[0]
    ints = ir.VectorType.get([lanes], ir.IntegerType.get_signless(32))

    def intsplat(value: int) -> ir.Value:
        return arith.constant(ints, ir.DenseElementsAttr.get_splat(ints, ir.IntegerAttr.get(ints.element_type, value)))

    def power_of_2(exponent: ir.Value) -> ir.Value:
        bits = arith.shli(arith.addi(exponent, intsplat(127)), intsplat(23))
        return vector.bitcast(x.type, bits)

    clamped = _clamped(x, _EXP_MIN, _EXP_MAX)
    n = math.roundeven(arith.mulf(clamped, splat(LOG2_E, x)))
    r = vector.fma(n, splat(-_LN2_HIGH, x), clamped)
    r = vector.fma(n, splat(-_LN2_LOW, x), r)
    p = vector.fma(polynomial(_EXP, r), arith.mulf(r, r), arith.addf(r, splat(1.0, x)))
    # 2^n is two factors, because n goes from -150 to 128, beyond the exponents of f32 at both ends.
    exponent = arith.fptosi(ints, n)
    half = arith.shrsi(exponent, intsplat(1))
    value = arith.mulf(arith.mulf(p, power_of_2(half)), power_of_2(arith.subi(exponent, half)))
    return arith.select(arith.cmpf(arith.CmpFPredicate.UNO, x, x), x, value)


def exp_below_zero(x: ir.Value) -> ir.Value:
    """Returns exp(x) of a vector of f32 that are not positive, or NaN. Numbers below -86 give 0.

    It takes half the instructions of the expansion of math.exp. No step gives a denormal number, which costs 150 cycles on x86.
    """
    least = splat(LEAST_EXPONENT, x)
    p, rounded = _power_of_rest(at_most(x, least, arith.CmpFPredicate.OGT))
    if ir.VectorType(x.type).shape == [IN_REGISTER]:
        return times_power_of_2(p, arith.subf(rounded, splat(ROUNDS, x)), arith.cmpf(arith.CmpFPredicate.UGE, x, least))
    number = arith.select(arith.cmpf(arith.CmpFPredicate.OLT, x, least), splat(0.0, x), _scaled(p, rounded))
    return arith.select(arith.cmpf(arith.CmpFPredicate.UNO, x, x), x, number)


def _power_of_rest(x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns e^(x - n ln 2) for the integer n nearest to x / ln 2, and n + 1.5 * 2^23. Exact if 2^n is a normal number."""
    rounded = vector.fma(x, splat(LOG2_E, x), splat(ROUNDS, x))
    n = arith.subf(rounded, splat(ROUNDS, x))
    r = vector.fma(n, splat(-_LN2_HIGH, x), x)
    r = vector.fma(n, splat(-_LN2_LOW, x), r)
    square = arith.mulf(r, r)  # pairs of terms do not wait for each other
    pairs = [vector.fma(splat(a, x), r, splat(b, x)) for a, b in zip(_EXP[::2], _EXP[1::2], strict=True)]
    return reduce(lambda value, pair: vector.fma(value, square, pair), [*pairs, arith.addf(r, splat(1.0, x))]), rounded


def _scaled(p: ir.Value, rounded: ir.Value) -> ir.Value:
    """Returns p times 2^n, if that is a normal number. `rounded` is n + 1.5 * 2^23."""
    ints = vector_of(ir.VectorType(p.type).shape[0], int_of(32))
    shift = arith.constant(ints, ir.DenseElementsAttr.get_splat(ints, ir.IntegerAttr.get(ints.element_type, 23)))
    power = arith.addi(vector.bitcast(ints, p), arith.shli(vector.bitcast(ints, rounded), shift))
    return vector.bitcast(p.type, power)


def _only_added_to_one(op: ir.Operation) -> bool:
    users = [use.owner.operation for use in op.results[0].uses]
    return all(user.name == "arith.addf" and any(number(operand) == 1.0 for operand in user.operands) for user in users)


def _exp_beside_one(x: ir.Value) -> ir.Value:
    """Returns exp(x) of a vector of f32 if it is a normal number. Larger results are infinity, smaller ones too small to change
    1, and NaN gives NaN."""
    highest = splat(_POWER_MAX, x)
    clamped = at_most(at_most(x, highest, arith.CmpFPredicate.OLT), splat(_POWER_MIN, x), arith.CmpFPredicate.OGT)
    number = _scaled(*_power_of_rest(clamped))
    return arith.select(arith.cmpf(arith.CmpFPredicate.UGT, x, highest), arith.mulf(x, splat(float("inf"), x)), number)


_EXPANSIONS: dict[str, Callable[[ir.Value], ir.Value]] = {"math.erf": _erf, "math.tanh": _tanh, "math.exp": _exp}
