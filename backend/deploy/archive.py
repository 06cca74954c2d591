"""Builds a static library with the regions of a program: kernels as object code, packed weights, and the C that calls them.

libgossamer_5f21….a    call.c, aoti.c, and the code of c_code.py, compiled by the C++ compiler that Inductor uses
"""

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from gossamer.backend.deploy.c_code import Arrays, Operand, kernel_name, region_function
from gossamer.backend.deploy.exported_region import ExportedRegion
from gossamer.dialects.errors import CompileError
from gossamer.runtime import disk_cache
from gossamer.runtime.target import Target, host
from gossamer.runtime.torch_internals import get_cpp_compiler

_AVX, _AVX512, _TILES = 0x6, 0xE6, 0x600E6
_EBX, _ECX, _EDX = 1, 2, 3
FEATURES = {
    "avx2": (7, 0, _EBX, 5, _AVX), "fma": (1, 0, _ECX, 12, _AVX), "f16c": (1, 0, _ECX, 29, _AVX),
    "bmi": (7, 0, _EBX, 3, 0), "bmi2": (7, 0, _EBX, 8, 0), "popcnt": (1, 0, _ECX, 23, 0), "movbe": (1, 0, _ECX, 22, 0),
    "gfni": (7, 0, _ECX, 8, 0), "avxvnni": (7, 1, 0, 4, _AVX),
    "avx512f": (7, 0, _EBX, 16, _AVX512), "avx512dq": (7, 0, _EBX, 17, _AVX512), "avx512cd": (7, 0, _EBX, 28, _AVX512),
    "avx512bw": (7, 0, _EBX, 30, _AVX512), "avx512vl": (7, 0, _EBX, 31, _AVX512),
    "avx512ifma": (7, 0, _EBX, 21, _AVX512), "avx512vbmi": (7, 0, _ECX, 1, _AVX512),
    "avx512vbmi2": (7, 0, _ECX, 6, _AVX512), "avx512vnni": (7, 0, _ECX, 11, _AVX512),
    "avx512bitalg": (7, 0, _ECX, 12, _AVX512), "avx512vpopcntdq": (7, 0, _ECX, 14, _AVX512),
    "avx512bf16": (7, 1, 0, 5, _AVX512), "avx512fp16": (7, 0, _EDX, 23, _AVX512),
    "amx-bf16": (7, 0, _EDX, 22, _TILES), "amx-tile": (7, 0, _EDX, 24, _TILES), "amx-int8": (7, 0, _EDX, 25, _TILES),
}  # fmt: skip
"""How to test for a feature: leaf, subleaf, word and bit of CPUID, and a mask of the registers that the system must save."""

Calls = Mapping[str, tuple[ExportedRegion, Sequence[Operand]]]
"""By the key of a region, the region and the operands of its calls."""

More = Callable[[Arrays], str]
"""Returns C code to put behind all other code. It may add arrays."""

_LEVELS = {512: 0xF, 256: 0x7}
"""By the bits of vectors, the x86-64 levels that the code needs, as a bit mask in its note to the dynamic linker."""

_NOTE = """
  .section .note.gnu.property,"a",@note
  .balign 8
  .long 4, 16, 5
  .asciz "GNU"
  .long 0xc0008002, 4, {levels}, 0
"""

_ARRAY = """
  .section .rodata
  .balign 64
  .globl {name}
  .hidden {name}
{name}:
  .incbin "{path}"
  .zero 64
"""


_TAKEN = """
address alignas alignof and apart array asm auto bool break call case catch char class concept const constant constexpr
continue copy default delete do double else enum error explicit export extern failed false feature fill float for friend
goto if inline int int64_t keep lacks long made main mutable namespace new not operator or pair private problem
protected public refused region register requires restrict return scratch seen short signed sizeof static storage struct
switch template tensor this throw true try typedef typename union unsigned using view virtual void volatile while xor
"""
"""Keywords of C and C++, and names in the C files of this room."""


def needed(target: Target) -> list[str]:
    """Returns the features of a target that the C code must test for."""
    given = set(target.features.split(","))
    return [name for name in FEATURES if f"+{name}" in given]


def c_text(regions: Calls, arrays: Arrays, parts: Sequence[str]) -> str:
    """Returns the C code of all regions, and of the files of this folder that call them."""
    target = host()
    kernels = {kernel_name(way.kernel.key) for region, _ in regions.values() for way in region.ways}
    functions = [region_function(region, operands, arrays) for region, operands in regions.values()]
    table = [f'  {{"{key}", {len(operands)}, {region.results}, run_{key}}},' for key, (region, operands) in regions.items()]
    looked = [f'  {{"{name}", {", ".join(map(str, FEATURES[name]))}}},' for name in needed(target)]
    return "\n".join([
        _file("call.c"),
        *(f"extern HIDDEN void {kernel}(int64_t *);" for kernel in sorted(kernels)),
        *(f"extern HIDDEN const char {name}[];" for name in arrays.content),
        *functions,
        "static const struct region REGIONS[] = {", *table, "  {0}};",
        "static const struct feature FEATURES[] = {", *looked, "  {0}};",
        f'static const char BUILT_FOR[] = "{target.cpu}";',
        *(_file(part) for part in parts if part.endswith(".c")),
    ])  # fmt: skip


def archive(regions: Calls, parts: Sequence[str], more: More, folder: Path) -> str:
    """Builds a library in a folder, from regions, files of this room, and more C. Returns its name for the linker's -l.

    The library is a script that makes the linker take the whole object file. Of a real archive, it would take only the parts
    that something refers to.

    Raises CompileError if there is no C++ compiler, if it fails, or if the cache has no code for a kernel.
    """
    name = f"gossamer_{hashlib.sha256(''.join(regions).encode()).hexdigest()[:16]}"
    together = folder / "together.o"
    with tempfile.TemporaryDirectory() as place:
        run_tool(compiler(), "-r", "-nostdlib", *_objects(regions, parts, more, Path(place)), "-o", together)
    (folder / f"lib{name}.a").write_text(f"INPUT({together})\n")
    return name


def _objects(regions: Calls, parts: Sequence[str], more: More, folder: Path) -> list[Path]:
    """Builds the object files in a folder: the C, the kernels, and the arrays. Returns their paths."""
    arrays = Arrays()
    text = f"{c_text(regions, arrays, parts)}\n{more(arrays)}"
    kernels = {way.kernel.key: way.kernel for region, _ in regions.values() for way in region.ways}
    objects = [_kernel(key, folder) for key in sorted(kernels)]
    assembly = _NOTE.format(levels=_LEVELS.get(host().vector_bits, 0x3)) + '  .section .note.GNU-stack,"",@progbits\n'
    for name, held in arrays.content.items():
        (folder / name).write_bytes(held)
        assembly += _ARRAY.format(name=name, path=folder / name)
    (folder / "calls.c").write_text(text)
    (folder / "arrays.s").write_text(assembly)
    flags = ["-O2", "-fPIC", "-fvisibility=hidden", "-march=x86-64", "-Werror", "-Wno-unused-function"]
    run_tool(compiler(), *flags, "-x", "c", "-c", folder / "calls.c", "-o", folder / "calls.o")
    run_tool(compiler(), "-x", "assembler", "-c", folder / "arrays.s", "-o", folder / "arrays.o")
    for part in parts:
        if part.endswith(".cpp"):
            (folder / part).write_text(_file(part))
            run_tool(compiler(), *flags, "-c", folder / part, "-o", folder / f"{part}.o")
            objects.append(folder / f"{part}.o")
    for name in arrays.content:
        (folder / name).unlink()
    return [folder / "calls.o", folder / "arrays.o", *objects]


def compiler() -> str:
    """Returns the C++ compiler that Inductor uses. Raises CompileError if there is none."""
    try:
        return str(get_cpp_compiler())
    except (OSError, RuntimeError) as problem:
        raise CompileError(f"a package is linked by a C++ compiler, and there is none: {problem}") from problem


def run_tool(*command: object) -> None:
    """Runs a tool of the compiler. Raises CompileError with its error text if it fails."""
    words = [str(word) for word in command]
    if shutil.which(words[0]) is None:
        raise CompileError(f"exporting needs {words[0]!r}, which is not on PATH: install the compiler's tools (binutils)")
    done = subprocess.run(["env", "LC_ALL=C", *words], capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"{' '.join(words)} failed: {done.stderr[:2000]}")


def _kernel(key: str, folder: Path) -> Path:
    """Writes the object code of a kernel to a file, with a unique name for its entry. Returns the path."""
    entry = disk_cache.read(key)
    if entry is None:
        raise CompileError(
            f"the code of kernel {key} is not in the cache on disk: exporting needs the cache (is GOSSAMER_CACHE_DIR empty?)"
        )
    path, name = folder / f"{key}.o", kernel_name(key)
    path.write_bytes(entry.code)
    run_tool("objcopy", f"--redefine-sym={entry.call['entry']}={name}", f"--keep-global-symbol={name}", path)
    return path


def _file(name: str) -> str:
    return (files(__package__) / name).read_text()


def c_name(text: str) -> str:
    """Returns a text as a valid name in C and C++, which begins like the text."""
    name = re.sub(r"\W", "_", text, flags=re.ASCII).lstrip("0123456789") or "model"
    return f"{name}_model" if name in _TAKEN.split() else name
