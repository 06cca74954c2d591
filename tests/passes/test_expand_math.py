"""exp, erf and tanh as multiply-adds: measured in units in the last place against SciPy's in f64, over all of f32."""

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import scipy.special
from torch_mlir import ir

from gossamer.passes.codegen.coarse_math import coarse_exp_below_zero
from gossamer.passes.codegen.emit_entry import ENTRY
from gossamer.passes.framework.context import context
from gossamer.passes.framework.translate import translate_to_llvm_ir
from gossamer.passes.loops.queries import walk
from gossamer.passes.registry import run_pipeline
from gossamer.runtime import jit
from gossamer.runtime.target import Target, host

FUNCTIONS = {"exp": np.exp, "erf": scipy.special.erf, "tanh": np.tanh}
UNITS = {"exp": 2.0, "erf": 6.0, "tanh": 6.0}
TINY = float(np.finfo(np.float32).tiny)
LANES = 16

Vectorized = Callable[[np.ndarray], np.ndarray]


LOGISTIC = """%one = arith.constant dense<1.0> : {0}
          %2 = arith.negf %0 : {0}
          %3 = math.exp %2 : {0}
          %4 = arith.addf %3, %one : {0}
          %1 = arith.divf %one, %4 : {0}"""
NORMAL = """%one = arith.constant dense<1.0> : {0}
          %2 = math.erf %0 : {0}
          %1 = arith.addf %2, %one : {0}"""
COARSE_NORMAL = NORMAL.replace("erf %0", "erf %0 fastmath<afn>")


@cache
def compiled(name: str, element: str, target: Target) -> Vectorized:
    """The function as our passes and LLVM compile it, on arrays whose length is a multiple of 16."""
    vector = f"vector<{LANES}x{element}>"
    written = {"logistic": LOGISTIC, "normal": NORMAL, "coarse normal": COARSE_NORMAL}
    body = written[name].format(vector) if name in written else f"%1 = math.{name} %0 : {vector}"
    text = f"""
      func.func @f(%x: memref<?x{element}>, %y: memref<?x{element}>) {{
        %c0 = arith.constant 0 : index
        %step = arith.constant {LANES} : index
        %n = memref.dim %x, %c0 : memref<?x{element}>
        scf.for %i = %c0 to %n step %step {{
          %0 = vector.load %x[%i] : memref<?x{element}>, {vector}
          {body}
          vector.store %1, %y[%i] : memref<?x{element}>, {vector}
        }}
        return
      }}"""
    with context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        for op in walk(module, "math.log"):  # stands for what no op says
            with ir.InsertionPoint(op):
                op.results[0].replace_all_uses_with(coarse_exp_below_zero(op.operands[0]))
            op.erase()
        run_pipeline(module, f"expand-math{{bits={target.vector_bits}}},emit-entry,lower-to-llvm{{bits={target.vector_bits}}}")
        llvm_ir = translate_to_llvm_ir(module.operation)
    code = jit.load(jit.object_code(jit.optimize(llvm_ir, target), target), ENTRY)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)

    def call(x: np.ndarray, code: jit.Code = code) -> np.ndarray:  # the default keeps the code in memory
        y = np.empty_like(x)
        words = (ctypes.c_int64 * 4)(x.ctypes.data, x.size, y.ctypes.data, y.size)
        function(ctypes.addressof(words))
        return y

    return call


def evaluate(name: str, values: list[float]) -> np.ndarray:
    padded = np.zeros(-(-len(values) // LANES) * LANES, np.float32)
    padded[: len(values)] = values
    return compiled(name, "f32", host())(padded)[: len(values)]


def targets() -> list[Target]:
    return [host(), *(t for name in ("avx2", "neon") if (t := Target.named(name)).runs_here)]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("target", targets(), ids=lambda target: target.cpu)
def test_every_normal_result_is_within_a_few_units(name: str, target: Target) -> None:
    bits = np.arange(0, 1 << 32, 1009, dtype=np.uint64).astype(np.uint32)
    x = bits[: bits.size // LANES * LANES].view(np.float32)
    with np.errstate(all="ignore"):
        y, exact = compiled(name, "f32", target)(x), FUNCTIONS[name](x.astype(np.float64))
        rounded = exact.astype(np.float32)
        # The rational functions lose digits where even their argument times a coefficient is denormal.
        error = np.abs(y.astype(np.float64) - exact)
        normal = np.isfinite(rounded) & (np.abs(rounded) >= TINY) & (np.abs(x) > 1e-35)
        units = error / np.spacing(np.abs(rounded)).astype(np.float64)
    assert units[normal].max() <= UNITS[name]
    assert error[np.isfinite(rounded) & ~normal].max() <= 1e-40 + (name == "exp") * 2.0**-24
    np.testing.assert_array_equal(np.isnan(y), np.isnan(x))
    np.testing.assert_array_equal(np.isinf(y), np.isinf(rounded))


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.cpu)
def test_every_logistic_result_is_within_a_few_units(target: Target) -> None:
    bits = np.arange(0, 1 << 32, 1009, dtype=np.uint64).astype(np.uint32)
    x = bits[: bits.size // LANES * LANES].view(np.float32)
    with np.errstate(all="ignore"):
        y, exact = compiled("logistic", "f32", target)(x), scipy.special.expit(x.astype(np.float64))
    normal = exact >= TINY
    units = np.abs(y - exact)[normal] / np.spacing(exact[normal].astype(np.float32))
    assert units.max() <= 4
    assert y[exact < TINY].max() <= TINY
    np.testing.assert_array_equal(np.isnan(y), np.isnan(x))


@pytest.mark.parametrize(("name", "error"), [("normal", 5e-7), ("coarse normal", 1e-4)])
@pytest.mark.parametrize("target", targets(), ids=lambda target: target.cpu)
def test_erf_beside_one_is_as_exact_as_the_sum_or_as_is_asked_for(target: Target, name: str, error: float) -> None:
    bits = np.arange(0, 1 << 32, 1009, dtype=np.uint64).astype(np.uint32)
    x = bits[: bits.size // LANES * LANES].view(np.float32)
    with np.errstate(all="ignore"):
        y, exact = compiled(name, "f32", target)(x), 1 + scipy.special.erf(x.astype(np.float64))
    assert np.nanmax(np.abs(y - exact)) <= error
    np.testing.assert_array_equal(np.isnan(y), np.isnan(x))
    limits = np.array([-np.inf, np.inf, -30, 30, -4, 4, 0.0, -0.0] * 2, np.float32)
    assert compiled(name, "f32", target)(limits)[:8].tolist() == [0, 2, 0, 2, 0, 2, 1, 1]


def test_coarse_powers_below_zero_are_as_exact_as_bf16_wants() -> None:
    if host().vector_bits != 512:
        pytest.skip("it is made of what registers of 512 bits have")
    powers = compiled("log", "f32", host())

    def both(low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
        x = np.linspace(low, high, 1 << 16, dtype=np.float32)
        return powers(x), np.exp(x.astype(np.float64))

    y, exact = both(-86, 0)
    assert np.abs(y / exact - 1).max() <= 1.2e-4
    assert not both(-200, -86.1)[0].any()
    limits = np.array([-np.inf, -3.4e38, -1e4, np.nan, 0.0, -0.0, -1e-9, -1e-45] * 2, np.float32)
    none, rest = np.split(powers(limits)[:8], [3])
    assert none.tolist() == [0, 0, 0]
    np.testing.assert_allclose(rest, [np.nan, 1, 1, 1, 1], rtol=1.2e-4)


@pytest.mark.parametrize(
    ("x", "expected"), [(-np.inf, 0.0), (np.inf, 1.0), (0.0, 0.5), (-0.0, 0.5), (3e38, 1.0), (-3e38, 0.0), (-89.0, 0.0)]
)
def test_limits_of_the_logistic_are_exact(x: float, expected: float) -> None:
    assert evaluate("logistic", [x]) == expected


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        *(("exp", x, y) for x, y in [(-np.inf, 0.0), (np.inf, np.inf), (0.0, 1.0), (-0.0, 1.0), (1e-45, 1.0), (-1e30, 0.0)]),
        *(("tanh", x, y) for x, y in [(-np.inf, -1.0), (np.inf, 1.0), (0.0, 0.0), (-0.0, -0.0), (3e38, 1.0), (-30.0, -1.0)]),
        *(("erf", x, y) for x, y in [(-np.inf, -1.0), (np.inf, 1.0), (0.0, 0.0), (-0.0, -0.0), (3e38, 1.0), (-30.0, -1.0)]),
    ],
)
def test_limits_are_exact(name: str, x: float, expected: float) -> None:
    (y,) = evaluate(name, [x])
    assert y == expected
    assert np.signbit(y) == np.signbit(expected)


def test_exp_up_to_the_largest_number() -> None:
    """f32 ends between these two arguments."""
    below, above = 88.72283, 88.72284
    x = [88.3, 88.4, 88.7, below]
    np.testing.assert_allclose(evaluate("exp", x), np.exp(np.array(x)), rtol=1e-5)
    assert evaluate("exp", [above, 89.0, 200.0]).tolist() == [np.inf] * 3


def test_exp_down_to_the_smallest_denormal() -> None:
    x = np.array([-87.3, -87.4, -88.0, -95.0, -100.0, -103.2, -103.9, -104.1, -120.0], np.float32)
    exact = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(evaluate("exp", x.tolist()), exact, atol=2**-149, rtol=2e-7)
    assert evaluate("exp", [-103.9]) == np.float32(2**-149)
    assert evaluate("exp", [-104.1]) == 0


@pytest.mark.parametrize("name", ["erf", "tanh"])
def test_odd_functions_are_odd(name: str) -> None:
    x = np.linspace(-10, 10, 400)
    np.testing.assert_array_equal(evaluate(name, x.tolist()), -evaluate(name, (-x).tolist()))


@pytest.mark.parametrize("name", ["erf", "tanh"])
def test_odd_functions_never_exceed_one(name: str) -> None:
    assert np.abs(evaluate(name, np.linspace(-12, 12, 100_000).tolist())).max() == 1.0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_doubles_are_left_to_the_c_library(name: str) -> None:
    x = np.linspace(-30, 30, 64 * LANES)
    np.testing.assert_allclose(compiled(name, "f64", host())(x), FUNCTIONS[name](x), rtol=1e-15)
