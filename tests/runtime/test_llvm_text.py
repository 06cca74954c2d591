"""LLVM IR of the newer printer, as the older parser has to read it: every bit of every constant stays."""

import ctypes
import re

import numpy as np
import pytest
from torch_mlir import ir

from gossamer.passes.framework.context import context
from gossamer.passes.framework.translate import translate_to_llvm_ir
from gossamer.runtime import jit
from gossamer.runtime.llvm_text import bfloat_as_bits, readable_by_older
from gossamer.runtime.target import host

WIDTHS = {"f64": 64, "f32": 32, "f16": 16, "bf16": 16}
EXPONENTS = {"f64": 11, "f32": 8, "f16": 5, "bf16": 8}


def patterns(element: str) -> list[int]:
    """Zeros, ones, infinities, NaN, the ends of normal and denormal numbers, and some in between."""
    width, exponent = WIDTHS[element], EXPONENTS[element]
    mantissa = width - 1 - exponent
    infinity, one = ((1 << exponent) - 1) << mantissa, ((1 << exponent - 1) - 1) << mantissa
    positive = [0, 1, 5, (1 << mantissa) - 1, 1 << mantissa, one, one + 1, one // 3, infinity - 1, infinity]
    random = np.random.default_rng(0).integers(0, infinity, 40, dtype=np.uint64).tolist()
    return [sign | p for p in [*positive, infinity | 1 << mantissa - 1, *random] for sign in (0, 1 << width - 1)]


@pytest.mark.parametrize("element", WIDTHS)
def test_constants_keep_every_bit(element: str) -> None:
    """Through MLIR's translation, the rewriting, LLVM, and out of memory again."""
    width, bits = WIDTHS[element], patterns(element)
    stores = "\n".join(
        f"%c{i} = llvm.mlir.constant(0x{p:0{width // 4}X} : {element}) : {element}\n"
        f"%p{i} = llvm.getelementptr %out[{i}] : (!llvm.ptr) -> !llvm.ptr, {element}\n"
        f"llvm.store %c{i}, %p{i} : {element}, !llvm.ptr"
        for i, p in enumerate(bits)
    )
    with context(), ir.Location.unknown():
        module = ir.Module.parse(f"llvm.func @entry(%out: !llvm.ptr) {{\n{stores}\nllvm.return\n}}")
        text = translate_to_llvm_ir(module.operation)
    code = jit.load(jit.object_code(jit.optimize(text, host()), host()), "entry")
    out = np.zeros(len(bits), dtype=f"u{width // 8}")
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)(out.ctypes.data)
    assert [hex(b) for b in out.tolist()] == [hex(b) for b in bits]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ret float f0x3F800000", "ret float 0x3FF0000000000000"),
        ("ret float 1.000000e-01", "ret float 0x3FB99999A0000000"),
        ("ret double 1.000000e-01", "ret double 0x3FB999999999999A"),
        ("ret half +inf", "ret half 0xH7C00"),
        ("ret bfloat -qnan", "ret bfloat 0xRFFC0"),
        ("%y = fmul float %x, -2.5", "%y = fmul float %x, 0xC004000000000000"),
        ("store <2 x half> <half 1.0, half f0x0001>, ptr %p", "store <2 x half> <half 0xH3C00, half 0xH0001>, ptr %p"),
        ("%y = fptrunc double 1.0 to float", "%y = fptrunc double 0x3FF0000000000000 to float"),
        ("%y = phi float [ 0.5, %a ], [ %x, %b ]", "%y = phi float [ 0x3FE0000000000000, %a ], [ %x, %b ]"),
        (
            "call void @f(double 2.0, float splat (float 2.0))",
            "call void @f(double 0x4000000000000000, float splat (float 0x4000000000000000))",
        ),
    ],
)
def test_forms_of_constants(line: str, expected: str) -> None:
    assert readable_by_older(line) == expected


@pytest.mark.parametrize(
    "line",
    [
        "%inf = fadd float %nan, %x1.5",
        "call float @inf.f32(float %a.1)",
        "%y = load i64, ptr %p, align 8",
        '!3 = !{!"clang version 21.1.0"}',
        "%y = add <4 x i32> %x, <i32 1, i32 2, i32 3, i32 4>",
        'attributes #0 = { "prefer-vector-width"="512" }',
        "ret half 0xH3C00",
    ],
)
def test_what_is_no_constant_stays(line: str) -> None:
    assert readable_by_older(line) == line


def test_bfloat_becomes_its_bits() -> None:
    text = """\
define void @f(ptr %p, <8 x i1> %m) {
  %x = call <8 x bfloat> @llvm.masked.load.v8bf16.p0(ptr %p, <8 x i1> %m, <8 x bfloat> splat (bfloat 0xR3F80))
  %y = select i1 true, bfloat 0xR7FC0, bfloat 0xR8000
  ret void
}
declare <8 x bfloat> @llvm.masked.load.v8bf16.p0(ptr, <8 x i1>, <8 x bfloat>) #1
declare <8 x i16> @llvm.masked.load.v8i16.p0(ptr, <8 x i1>, <8 x i16>) #2
"""
    bits = bfloat_as_bits(text)
    assert "bf" not in bits
    assert "<8 x i16> splat (i16 16256)" in bits
    assert "select i1 true, i16 32704, i16 32768" in bits
    assert re.findall(r"^declare .*", bits, re.MULTILINE) == [
        "declare <8 x i16> @llvm.masked.load.v8i16.p0(ptr, <8 x i1>, <8 x i16>) #1"
    ]


def test_a_module_without_bfloat_stays() -> None:
    text = "define float @f(float %x) {\n  ret float %x\n}\ndeclare void @g()\ndeclare void @h()\n"
    assert bfloat_as_bits(text) == text
