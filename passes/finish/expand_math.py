"""expand-math{bits=512}: exp, erf and tanh on vectors of f32 become a few multiply-adds.

before   %1 = math.erf %0 : vector<16xf32>
after    %1 = x * P(x^2) / Q(x^2) with x = %0 clamped to [-4, 4], and NaN kept

Scalars, and vectors of f64, are left to the C library (convert-math-to-libm). For normal numbers, exp is within 2 units in
the last place of f32, erf and tanh within 6. An exp that is only added to 1, as in the logistic function, takes two thirds of
the instructions: there, results that are no normal numbers make no difference. An erf that is only added to 1, as in GELU, is a
polynomial of degree 4 where registers of 512 bits hold its coefficients for 32 pieces: four fifths of the time (Zen 5). If it may
be an approximation, too (fastmath<afn>, see allow-approximations), it is one of degree 2 for 16 pieces, within 1e-4.

Sources: exp is Cephes' expf (Moshier, 1992); erf and tanh are the rational minimax approximations of Eigen 3. Pieces of erf
interpolate it at Chebyshev's nodes.
"""

import math as numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import ClassVar

import numpy as np
from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, math, vector

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
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_EXP_MIN, _EXP_MAX = -104.0, 89.0  # beyond these, f32 has 0 and infinity
_EXP_LEAST = -86.0  # above this, powers are normal numbers
_POWER_MIN, _POWER_MAX = -87.33, 88.72  # within these, 2^n is added to the exponent of a number, which stays normal
_ROUNDS = 1.5 * 2.0**23  # a number of f32 added to this is rounded to an integer, which the lowest bits then are
_PIECES, _PIECES_A_UNIT = 32, 8  # of erf, whose last one is 1
_IN_REGISTER = 16  # numbers of f32 in 512 bits
_FEW_A_UNIT = 5  # of as many pieces as a register holds


@dataclass(frozen=True)
class ExpandMath:
    """Expand transcendental functions on vectors of f32; `bits` is the width of the target's vectors."""

    name: ClassVar[str] = "expand-math"
    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for name, expand in _EXPANSIONS.items():
            for op in walk(module, name):
                type_ = op.results[0].type
                if isinstance(type_, ir.VectorType) and isinstance(ir.VectorType(type_).element_type, ir.F32Type):
                    with ir.InsertionPoint(op), op.location:
                        beside_one = self._beside_one(op) if _only_added_to_one(op) else None
                        op.results[0].replace_all_uses_with((beside_one or expand)(op.operands[0]))
                    op.erase()

    def _beside_one(self, op: ir.Operation) -> Callable[[ir.Value], ir.Value] | None:
        """What takes the place of a function whose results are only added to 1, where that is less."""
        if op.name == "math.exp":
            return _exp_beside_one
        whole = ir.VectorType(op.results[0].type).shape == [_IN_REGISTER] and self.bits == 32 * _IN_REGISTER
        if op.name != "math.erf" or not whole:
            return None
        return _erf_by_few_pieces if "afn" in str(op.attributes["fastmath"]) else _erf_by_pieces


def _int(bits: int) -> ir.Type:
    return ir.IntegerType.get_signless(bits)


def _splat(value: float, like: ir.Value) -> ir.Value:
    element = ir.FloatAttr.get(ir.VectorType(like.type).element_type, value)
    return arith.constant(like.type, ir.DenseElementsAttr.get_splat(like.type, element))


def _polynomial(coefficients: Sequence[float], x: ir.Value) -> ir.Value:
    """Horner's rule, highest power first."""
    value = _splat(coefficients[0], x)
    for c in coefficients[1:]:
        value = vector.fma(value, x, _splat(c, x))
    return value


def _clamped(x: ir.Value, low: float, high: float) -> ir.Value:
    return arith.maxnumf(arith.minnumf(x, _splat(high, x)), _splat(low, x))


def _at_most(x: ir.Value, bound: ir.Value, less: arith.CmpFPredicate) -> ir.Value:
    """x, or the bound where that is `less`; NaN stays, as in the one instruction that x86 has for it."""
    return arith.select(arith.cmpf(less, bound, x), bound, x)


def _rational(x: ir.Value, bound: float, p: Sequence[float], q: Sequence[float]) -> ir.Value:
    below = _at_most(x, _splat(bound, x), arith.CmpFPredicate.OLT)
    clamped = _at_most(below, _splat(-bound, x), arith.CmpFPredicate.OGT)
    square = arith.mulf(clamped, clamped)
    numerator = arith.mulf(clamped, _polynomial(p, square))
    return arith.divf(numerator, _polynomial(q, square))


def _erf(x: ir.Value) -> ir.Value:
    return _rational(x, 4.0, _ERF_P, _ERF_Q)


def _erf_by_pieces(x: ir.Value) -> ir.Value:
    """erf(x) of 16 numbers up to 7e-8, NaN for NaN: |x| is rounded to eighths, whose lowest bits tell the piece."""
    ints, rounds = vector_of(_IN_REGISTER, _int(32)), _splat(_ROUNDS / _PIECES_A_UNIT, x)
    last = _splat((_PIECES - 1) / _PIECES_A_UNIT, x)
    size = _at_most(math.absf(x), last, arith.CmpFPredicate.OLT)
    rounded = arith.addf(size, rounds)
    piece, r = vector.bitcast(ints, rounded), arith.subf(size, arith.subf(rounded, rounds))
    powers = np.float32(_PIECES_A_UNIT) ** np.arange(4, -1, -1, dtype=np.float32)[:, None]
    found = [
        llvm.call_intrinsic(x.type, "llvm.x86.avx512.vpermi2var.ps.512", [_held(low, x), piece, _held(high, x)], [], [])
        for low, high in (powers * _pieces_of_erf(5, _PIECES, _PIECES_A_UNIT)).reshape(-1, 2, _IN_REGISTER)
    ]
    return math.copysign(reduce(lambda value, c: vector.fma(value, r, c), found), x)


def _erf_by_few_pieces(x: ir.Value) -> ir.Value:
    """erf(x) of 16 numbers up to 1e-4, NaN for NaN: half as many instructions, and all that they look up is in registers."""
    ints, rounds, scale = vector_of(_IN_REGISTER, _int(32)), _splat(_ROUNDS, x), _splat(_FEW_A_UNIT, x)
    last = _splat((_IN_REGISTER - 1) / _FEW_A_UNIT, x)
    size = _at_most(math.absf(x), last, arith.CmpFPredicate.OLT)
    rounded = vector.fma(size, scale, rounds)
    piece, r = vector.bitcast(ints, rounded), vector.fma(size, scale, arith.subf(rounds, rounded))
    found = [
        llvm.call_intrinsic(x.type, "llvm.x86.avx512.permvar.sf.512", [_held(row, x), piece], [], [])
        for row in _pieces_of_erf(3, _IN_REGISTER, _FEW_A_UNIT)
    ]
    return math.copysign(reduce(lambda value, c: vector.fma(value, r, c), found), x)


def _held(coefficients: np.ndarray, like: ir.Value) -> ir.Value:
    """Numbers of a vector as a constant."""
    return arith.constant(like.type, ir.DenseElementsAttr.get(coefficients, type=like.type))


@cache
def _pieces_of_erf(terms: int, pieces: int, a_unit: int) -> np.ndarray:
    """Coefficients [terms, pieces], highest power first, of the distance to piece / a_unit, in pieces; the last one is 1."""
    middle = np.arange(pieces - 1)[:, None]
    nodes = np.polynomial.chebyshev.chebpts1(terms) / 2
    values = np.vectorize(numbers.erf)((middle + nodes) / a_unit)
    inner = np.linalg.solve(np.vander(nodes), values.T)
    return np.concatenate([inner, [[0.0]] * (terms - 1) + [[1.0]]], 1).astype(np.float32)


def _tanh(x: ir.Value) -> ir.Value:
    return _rational(x, 7.99881172180175781, _TANH_P, _TANH_Q)


def _exp(x: ir.Value) -> ir.Value:
    lanes = ir.VectorType(x.type).shape[0]
    ints = ir.VectorType.get([lanes], ir.IntegerType.get_signless(32))

    def int_splat(value: int) -> ir.Value:
        return arith.constant(ints, ir.DenseElementsAttr.get_splat(ints, ir.IntegerAttr.get(ints.element_type, value)))

    def power_of_2(exponent: ir.Value) -> ir.Value:
        bits = arith.shli(arith.addi(exponent, int_splat(127)), int_splat(23))
        return vector.bitcast(x.type, bits)

    clamped = _clamped(x, _EXP_MIN, _EXP_MAX)
    n = math.roundeven(arith.mulf(clamped, _splat(_LOG2_E, x)))
    r = vector.fma(n, _splat(-_LN2_HIGH, x), clamped)
    r = vector.fma(n, _splat(-_LN2_LOW, x), r)
    p = vector.fma(_polynomial(_EXP, r), arith.mulf(r, r), arith.addf(r, _splat(1.0, x)))
    # 2^n in two factors: n goes from -150 to 128, beyond the exponents of f32 at both ends.
    exponent = arith.fptosi(ints, n)
    half = arith.shrsi(exponent, int_splat(1))
    value = arith.mulf(arith.mulf(p, power_of_2(half)), power_of_2(arith.subi(exponent, half)))
    return arith.select(arith.cmpf(arith.CmpFPredicate.UNO, x, x), x, value)


def exp_below_zero(x: ir.Value) -> ir.Value:
    """exp(x) of a register of f32 that are not positive, or NaN, and 0 for those below -86.

    Half as long as the expansion of math.exp, and no step of it makes a denormal number, for which x86 takes 150 cycles.
    """
    least = _splat(_EXP_LEAST, x)
    p, rounded = _power_of_rest(_at_most(x, least, arith.CmpFPredicate.OGT))
    if ir.VectorType(x.type).shape == [_IN_REGISTER]:
        return _times_power_of_2(p, arith.subf(rounded, _splat(_ROUNDS, x)), arith.cmpf(arith.CmpFPredicate.UGE, x, least))
    number = arith.select(arith.cmpf(arith.CmpFPredicate.OLT, x, least), _splat(0.0, x), _scaled(p, rounded))
    return arith.select(arith.cmpf(arith.CmpFPredicate.UNO, x, x), x, number)


def coarse_exp_below_zero(x: ir.Value) -> ir.Value:
    """The same for 16 numbers, up to a ten-thousandth of it, a twentieth of what rounding to bf16 does: half as long again."""
    in_twos = arith.mulf(x, _splat(_LOG2_E, x))
    no_mask, as_set = arith.constant(_int(_IN_REGISTER), -1), arith.constant(_int(32), 4)
    down = [arith.constant(_int(32), 9), _splat(0.0, x), no_mask, as_set]
    rest = llvm.call_intrinsic(x.type, "llvm.x86.avx512.mask.reduce.ps.512", [in_twos, *down], [], [])
    normal = arith.cmpf(arith.CmpFPredicate.UGE, x, _splat(_EXP_LEAST, x))
    return _times_power_of_2(_polynomial(_power_of_2(), rest), in_twos, normal)


def _times_power_of_2(p: ir.Value, exponent: ir.Value, where: ir.Value) -> ir.Value:
    """p times 2^floor(exponent) of a register, and 0 elsewhere."""
    mask = vector.extract(vector.bitcast(vector_of(1, _int(_IN_REGISTER)), where), [], [0])
    as_set = arith.constant(_int(32), 4)  # rounds as the thread does
    given = [p, exponent, _splat(0.0, p), mask, as_set]
    return llvm.call_intrinsic(p.type, "llvm.x86.avx512.mask.scalef.ps.512", given, [], [])


@cache
def _power_of_2() -> list[float]:
    """Coefficients of a polynomial of degree 3 for 2^x in [0, 1], highest power first, interpolated at Chebyshev's nodes."""
    nodes = (1 + np.polynomial.chebyshev.chebpts1(4)) / 2
    return [float(c) for c in np.linalg.solve(np.vander(nodes), np.exp2(nodes))]


def _power_of_rest(x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """e^(x - n ln 2) for the n that is next to x / ln 2, and n + 1.5 * 2^23; exact where 2^n is a normal number."""
    rounded = vector.fma(x, _splat(_LOG2_E, x), _splat(_ROUNDS, x))
    n = arith.subf(rounded, _splat(_ROUNDS, x))
    r = vector.fma(n, _splat(-_LN2_HIGH, x), x)
    r = vector.fma(n, _splat(-_LN2_LOW, x), r)
    square = arith.mulf(r, r)  # in pairs, which do not wait for each other
    pairs = [vector.fma(_splat(a, x), r, _splat(b, x)) for a, b in zip(_EXP[::2], _EXP[1::2], strict=True)]
    return reduce(lambda value, pair: vector.fma(value, square, pair), [*pairs, arith.addf(r, _splat(1.0, x))]), rounded


def _scaled(p: ir.Value, rounded: ir.Value) -> ir.Value:
    """p times 2^n, where that is a normal number, for n + 1.5 * 2^23."""
    ints = vector_of(ir.VectorType(p.type).shape[0], _int(32))
    shift = arith.constant(ints, ir.DenseElementsAttr.get_splat(ints, ir.IntegerAttr.get(ints.element_type, 23)))
    power = arith.addi(vector.bitcast(ints, p), arith.shli(vector.bitcast(ints, rounded), shift))
    return vector.bitcast(p.type, power)


def _only_added_to_one(op: ir.Operation) -> bool:
    users = [use.owner.operation for use in op.results[0].uses]
    return all(user.name == "arith.addf" and any(map(_is_one, user.operands)) for user in users)


def _is_one(value: ir.Value) -> bool:
    """Whether a value, or what is spread over all of its lanes, is the constant 1."""
    if isinstance(value.owner, ir.Block):
        return False
    op = value.owner.operation
    if op.name == "vector.broadcast":
        return _is_one(op.operands[0])
    given = op.attributes["value"] if op.name == "arith.constant" else None
    if isinstance(given, ir.DenseElementsAttr) and given.is_splat:
        given = given.get_splat_value()
    return isinstance(given, ir.FloatAttr) and given.value == 1.0


def _exp_beside_one(x: ir.Value) -> ir.Value:
    """exp(x) of a vector of f32 where it is a normal number; infinity above, what 1 does not notice below, NaN for NaN."""
    highest = _splat(_POWER_MAX, x)
    clamped = _at_most(_at_most(x, highest, arith.CmpFPredicate.OLT), _splat(_POWER_MIN, x), arith.CmpFPredicate.OGT)
    number = _scaled(*_power_of_rest(clamped))
    return arith.select(arith.cmpf(arith.CmpFPredicate.UGT, x, highest), arith.mulf(x, _splat(float("inf"), x)), number)


_EXPANSIONS: dict[str, Callable[[ir.Value], ir.Value]] = {"math.erf": _erf, "math.tanh": _tanh, "math.exp": _exp}
