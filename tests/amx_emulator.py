"""AMX's tile instructions in plain vectors, so that code for them can be run, and its results checked, on any machine.

LLVM's own scalar emulation (`-enable-x86-scalar-amx`) ends the process on tiles that loops carry.
"""

import dataclasses
import re

import pytest

from gossamer.runtime import jit, region_kernel
from gossamer.runtime.target import Target, host
from gossamer.sparsity.compiler import compile_kernel

_TILE, _ROW, _FLOATS = "<256 x i32>", "<16 x i32>", "<16 x float>"
_FULL = "i16 16, i16 64"  # rows and bytes of a row of the only tiles that kernels use
_INTRINSIC = re.compile(r"@llvm\.x86\.(tilezero|tileloadd64|tilestored64|tdpbf16ps|tdpbssd|tdpbsud)\.internal\(([^)]*)\)")


def emulate(monkeypatch: pytest.MonkeyPatch, *instructions: str) -> Target:
    """This machine, as if it had AMX with these instructions, which are emulated."""
    features = [f for f in host().features.split(",") if not f[1:].startswith("amx")]
    optimize = jit.optimize
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", "")
    monkeypatch.setattr(compile_kernel, "_by_contract", {})
    monkeypatch.setattr(region_kernel, "_by_key", {})
    monkeypatch.setattr(jit, "optimize", lambda text, to: optimize(emulated(text) if "x86_amx" in text else text, to))
    return dataclasses.replace(host(), features=",".join([*features, "+amx-tile", *(f"+{name}" for name in instructions)]))


def believe(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend takes this machine for another one."""
    monkeypatch.setattr("gossamer.sparsity.compiler.compile_kernel.host", lambda: target)
    monkeypatch.setattr("gossamer.backend.devices.cpu.host", lambda: target)


def emulated(llvm_ir: str) -> str:
    """The module with calls of functions in place of AMX's instructions. ValueError for a tile of another size."""
    lines = [line for line in llvm_ir.split("\n") if not (line.startswith("declare") and "@llvm.x86.t" in line)]
    text = _INTRINSIC.sub(_call, "\n".join(lines)).replace("x86_amx", _TILE)
    products = _multiply_floats() + _multiply_bytes("tdpbssd", "ashr") + _multiply_bytes("tdpbsud", "lshr")
    return f"{text}\n{_zero()}{_load()}{_store()}{products}{_DECLARED}"


def _call(match: re.Match[str]) -> str:
    shape = "i16 16, i16 64, i16 64" if match[1].startswith("tdp") else _FULL
    if not match[2].startswith(shape):
        raise ValueError(f"{match[0]} is of another shape")
    return f"@emulated.{match[1]}({match[2].removeprefix(shape).removeprefix(', ')})"


_DECLARED = f"""
declare {_ROW} @llvm.vector.extract.v16i32.v256i32({_TILE}, i64)
declare {_TILE} @llvm.vector.insert.v256i32.v16i32({_TILE}, {_ROW}, i64)
"""


def _zero() -> str:
    return f"define internal {_TILE} @emulated.tilezero() {{\n  ret {_TILE} zeroinitializer\n}}\n"


def _load() -> str:
    lines = [f"define internal {_TILE} @emulated.tileloadd64(ptr %base, i64 %stride) noinline {{"]
    for row in range(16):
        before = f"%tile{row - 1}" if row else "zeroinitializer"
        lines += [
            f"%offset{row} = mul i64 %stride, {row}",
            f"%at{row} = getelementptr i8, ptr %base, i64 %offset{row}",
            f"%row{row} = load {_ROW}, ptr %at{row}, align 1",
            f"%tile{row} = call {_TILE} @llvm.vector.insert.v256i32.v16i32({_TILE} {before}, {_ROW} %row{row}, i64 {16 * row})",
        ]
    return "\n".join([*lines, f"ret {_TILE} %tile15", "}", ""])


def _store() -> str:
    lines = [f"define internal void @emulated.tilestored64(ptr %base, i64 %stride, {_TILE} %tile) noinline {{"]
    for row in range(16):
        lines += [
            f"%offset{row} = mul i64 %stride, {row}",
            f"%at{row} = getelementptr i8, ptr %base, i64 %offset{row}",
            f"%row{row} = call {_ROW} @llvm.vector.extract.v16i32.v256i32({_TILE} %tile, i64 {16 * row})",
            f"store {_ROW} %row{row}, ptr %at{row}, align 1",
        ]
    return "\n".join([*lines, "ret void", "}", ""])


def _multiply_floats() -> str:
    """sums[m][n] += left[m][2k] * right[k][2n] + left[m][2k + 1] * right[k][2n + 1], with pairs of bf16 in 32 bits."""

    def halves(name: str, word: str) -> list[str]:
        return [
            f"%{name}low = shl {_ROW} {word}, splat (i32 16)",
            f"%{name}high = and {_ROW} {word}, splat (i32 -65536)",
            f"%{name}0 = bitcast {_ROW} %{name}low to {_FLOATS}",
            f"%{name}1 = bitcast {_ROW} %{name}high to {_FLOATS}",
        ]

    added = [
        *halves("a", "%all"),
        *halves("b", "%words"),
        *(f"%product{i} = fmul {_FLOATS} %a{i}, %b{i}" for i in (0, 1)),
        f"%between = fadd {_FLOATS} %before, %product0",
        f"%after = fadd {_FLOATS} %between, %product1",
    ]
    return _multiply("tdpbf16ps", _FLOATS, added)


def _multiply_bytes(name: str, right: str) -> str:
    """sums[m][n] += the sum over i of left[m][4k + i] * right[k][4n + i], with four bytes in 32 bits, of which those on the
    left are signed, and those on the right as they are shifted."""
    added = [f"%sum0 = add {_ROW} %before, zeroinitializer"]
    for i in range(4):
        for side, words, shift in (("a", "%all", "ashr"), ("b", "%words", right)):
            added += [
                f"%{side}high{i} = shl {_ROW} {words}, splat (i32 {24 - 8 * i})",
                f"%{side}{i} = {shift} {_ROW} %{side}high{i}, splat (i32 24)",
            ]
        total = "%after" if i == 3 else f"%sum{i + 1}"
        added += [f"%product{i} = mul {_ROW} %a{i}, %b{i}", f"{total} = add {_ROW} %sum{i}, %product{i}"]
    return _multiply(name, _ROW, added)


def _multiply(name: str, sums: str, added: list[str]) -> str:
    """An instruction that makes %after of sums %before, one word of the left tile in all lanes, %all, and the right %words."""
    return "\n".join(
        [
            f"define internal {_TILE} @emulated.{name}({_TILE} %sums, {_TILE} %left, {_TILE} %right) noinline {{",
            "start:",
            *(f"%{tile}.memory = alloca {_TILE}, align 64" for tile in ("sums", "left", "right")),
            *(f"store {_TILE} %{tile}, ptr %{tile}.memory, align 64" for tile in ("sums", "left", "right")),
            "br label %step",
            "step:",
            "%i = phi i64 [ 0, %start ], [ %next, %step ]",
            "%m = lshr i64 %i, 4",
            "%k = and i64 %i, 15",
            f"%sum.at = getelementptr {_ROW}, ptr %sums.memory, i64 %m",
            "%left.at = getelementptr i32, ptr %left.memory, i64 %i",
            f"%right.at = getelementptr {_ROW}, ptr %right.memory, i64 %k",
            "%word = load i32, ptr %left.at, align 4",
            f"%one = insertelement {_ROW} poison, i32 %word, i64 0",
            f"%all = shufflevector {_ROW} %one, {_ROW} poison, {_ROW} zeroinitializer",
            f"%words = load {_ROW}, ptr %right.at, align 64",
            f"%before = load {sums}, ptr %sum.at, align 64",
            *added,
            f"store {sums} %after, ptr %sum.at, align 64",
            "%next = add i64 %i, 1",
            "%more = icmp ult i64 %next, 256",
            "br i1 %more, label %step, label %end",
            "end:",
            f"%result = load {_TILE}, ptr %sums.memory, align 64",
            f"ret {_TILE} %result",
            "}",
            "",
        ]
    )
