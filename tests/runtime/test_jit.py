"""LLVM IR to code in this process: what runs, and what is refused instead of ending the process."""

import ctypes
import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import llvmlite.binding as llvm
import pytest

from gossamer.dialects.errors import CompileError
from gossamer.runtime import jit
from gossamer.runtime.jit import Code
from gossamer.runtime.target import Target, host

ADD = "define i64 @entry(i64 %x) {{ %y = add i64 %x, {} ret i64 %y }}"


def compiled(llvm_ir: str) -> Code:
    return jit.load(jit.object_code(jit.optimize(llvm_ir, host()), host()), "entry")


def call(code: Code, x: int) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address)(x))


def test_a_function_runs() -> None:
    assert call(compiled(ADD.format(2)), 40) == 42


def test_code_of_the_same_name_is_kept_apart() -> None:
    one, two = compiled(ADD.format(1)), compiled(ADD.format(2))
    assert (call(one, 0), call(two, 0)) == (1, 2)


def test_code_lives_as_long_as_its_object() -> None:
    kept = compiled(ADD.format(3))
    for i in range(20):
        compiled(ADD.format(i))
    gc.collect()
    assert call(kept, 0) == 3


def test_object_code_can_be_loaded_again() -> None:
    code = jit.object_code(jit.optimize(ADD.format(4), host()), host())
    assert [call(jit.load(code, "entry"), 0) for _ in range(2)] == [4, 4]


def test_functions_of_the_process_are_found() -> None:
    """Those of the C library, and those of PyTorch's OpenMP runtime."""
    code = compiled("""
      declare i64 @labs(i64)
      declare i32 @omp_get_num_threads()
      define i64 @entry(i64 %x) {
        %a = call i64 @labs(i64 %x)
        %n = call i32 @omp_get_num_threads()
        %m = sext i32 %n to i64
        %y = add i64 %a, %m
        ret i64 %y
      }""")
    assert call(code, -41) == 42


@pytest.mark.parametrize("text", ["define i64 @entry( {", "define i64 @entry(i64 %x) { ret i32 0 }"])
def test_what_llvm_cannot_read(text: str) -> None:
    with pytest.raises(CompileError, match="LLVM refuses the kernel"):
        jit.optimize(text, host())


def test_a_function_that_is_missing_is_named() -> None:
    module = jit.optimize("declare void @no_such() define void @entry() { call void @no_such() ret void }", host())
    with pytest.raises(CompileError, match=r"the kernel needs no_such, which this process does not have"):
        jit.object_code(module, host())


@pytest.mark.skipif(llvm.address_of_symbol("__atomic_load") is not None, reason="this process has libatomic")
def test_a_function_that_only_code_generation_asks_for() -> None:
    """No instruction loads 256 bits at once; the function that does is in libatomic."""
    text = "define void @entry(ptr %p) { %x = load atomic i256, ptr %p seq_cst, align 32 store i256 %x, ptr %p ret void }"
    module = jit.optimize(text, host())
    with pytest.raises(CompileError, match="cannot be linked"):
        jit.load(jit.object_code(module, host()), "entry")


def test_code_without_the_entry() -> None:
    code = jit.object_code(jit.optimize("define void @other() { ret void }", host()), host())
    with pytest.raises(CompileError, match="cannot be linked"):
        jit.load(code, "entry")


def test_bytes_that_are_no_code() -> None:
    with pytest.raises(CompileError, match="cannot be linked"):
        jit.load(b"not object code", "entry")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("libgomp-a34b3233.so.1", True), ("libiomp5.so", True), ("libomp.dylib", True)),
        *(("libtorch_openmp.so", False), ("libcomposed.so", False)),
    ],
)
def test_openmp_runtimes_are_known_by_their_names(name: str, expected: bool) -> None:
    assert (jit._OPENMP.fullmatch(f"/torch/lib/{name}") is not None) is expected


@pytest.mark.parametrize("name", ["avx2", "avx512", "amx", "neon"])
def test_assembly_for_other_machines(name: str) -> None:
    target = Target.named(name)
    assert "entry:" in jit.assembly(jit.optimize(ADD.format(1), target), target)


def test_threads_compile_at_once() -> None:
    with ThreadPoolExecutor(4) as threads:
        codes = list(threads.map(lambda i: compiled(ADD.format(i)), range(24)))
    assert [call(code, 100) for code in codes] == [100 + i for i in range(24)]


def test_functions_of_libm_are_found_by_the_first_kernel_of_a_process() -> None:
    text = "declare double @erf(double) define double @entry(double %x) { %y = call double @erf(double %x) ret double %y }"
    program = f"from gossamer.runtime import jit, target; h = target.host(); jit.object_code(jit.optimize({text!r}, h), h)"
    subprocess.run([sys.executable, "-c", program], check=True)
