"""Describes the machines that kernels are compiled for: LLVM triple, CPU, features, and the width of a vector.

Schedules do not ask for an architecture. They ask for instructions by what these do, such as dot products of bytes. LLVM's
features tell which instructions exist, and how wide vectors are.
"""

import ctypes
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

import llvmlite.binding as llvm

from gossamer.dialects.errors import OptionError
from gossamer.dialects.settings import LLVM_LEVEL

_X86, _ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
_AVX512 = "+avx2,+avx512f,+avx512vl"
_AMX = f"{_AVX512},+avx512bf16,+avx512vbmi,+avx512vbmi2,+amx-tile,+amx-bf16,+amx-int8"
_WITH_TILES = frozenset({"sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d", "diamondrapids"})
_NAMED = {
    "avx2": (_X86, "x86-64-v3", "+avx2", 256),
    "avx512": (_X86, "x86-64-v4", _AVX512, 512),
    "amx": (_X86, "sapphirerapids", _AMX, 512),
    "neon": (_ARM, "generic", "+neon", 128),
    "neoverse-n1": (_ARM, "neoverse-n1", "+neon,+dotprod", 128),
    "neoverse-v1": (_ARM, "neoverse-v1", "+neon,+dotprod,+bf16,-sve", 128),
    "apple-m1": ("arm64-apple-macosx", "apple-m1", "+neon,+dotprod", 128),
}
_WIDTHS = {512: ("avx512f", "avx512vl", "avx512bw"), 256: ("avx2", "fma"), 128: ()}
"""Widths of vectors in bits, with the features that kernels need to use them. The first that fits is taken."""

_INSTRUCTIONS: dict[str, tuple[set[str], ...]] = {
    "bf16dots": ({"+avx512bf16", "+avx512f"}, {"+neon", "+bf16"}),
    "bytedots": ({"+avx512vnni", "+avx512vl"}, {"+avxvnni"}, {"+dotprod"}),
    "avx512vbmi": ({"+avx512vbmi"},),
    "avx512vbmi2": ({"+avx512vbmi2"},),
    "amx": ({"+amx-bf16", "+amx-tile"},),
    "amxint8": ({"+amx-int8", "+amx-tile"},),
}
_HWCAPS = {"asimddp": "dotprod", "bf16": "bf16", "i8mm": "i8mm", "asimdhp": "fullfp16"}
"""LLVM's features by the names that Linux gives them on ARM (Documentation/arch/arm64/elf_hwcaps.rst)."""
_SYSCTLS = {"DotProd": "dotprod", "BF16": "bf16", "I8MM": "i8mm", "FP16": "fullfp16"}
"""LLVM's features by the names that macOS gives them, after the prefix hw.optional.arm.FEAT_."""


@dataclass(frozen=True)
class Target:
    """A machine that LLVM compiles for.

    vector_bits  width of the widest vector that kernels use
    level        how much LLVM optimises, from 0 to 3
    """

    triple: str
    cpu: str
    features: str
    vector_bits: int
    level: int = 3

    @classmethod
    def named(cls, name: str) -> Self:
        """Returns a target of the table above, for cross-compilation. Raises OptionError for another name."""
        if name not in _NAMED:
            raise OptionError(f"unknown target {name!r}, there are {', '.join(_NAMED)}")
        return cls(*_NAMED[name])

    @property
    def runs_here(self) -> bool:
        """Whether this machine can run the target's code."""
        here = host()
        needed = {feature for feature in self.features.split(",") if feature.startswith("+")}
        return self.architecture == here.architecture and needed <= set(here.features.split(","))

    @property
    def architecture(self) -> str:
        """LLVM's name of the architecture; "aarch64" also where the triple has "arm64"."""
        return self.triple.split("-")[0].replace("arm64", "aarch64")

    @property
    def rounds_to_bf16(self) -> bool:
        """Whether the machine has an instruction that rounds f32 to bf16."""
        return not {"+avx512bf16", "+avxneconvert", "+bf16"}.isdisjoint(self.features.split(","))

    @property
    def streams(self) -> bool:
        """Whether prefetches of data that are read once should bypass the second-level cache. On Zen 5, that is up to 1.5 times
        as fast as through the cache; on Emerald Rapids, less than half as fast."""
        return self.cpu.startswith("znver")

    @property
    def dots_are_fast(self) -> bool:
        """Whether a dot product of pairs of bf16 is as fast as multiplying them as f32. On Emerald Rapids, the dot product
        takes twice as long, and rounding its operands to bf16 four times as long."""
        return "bf16dots" in self.instructions and (self.architecture != "x86_64" or self.cpu.startswith("znver"))

    @property
    def instructions(self) -> frozenset[str]:
        """The instructions that schedules ask for.

        "bf16dots"     dot products of bf16
        "bytedots"     dot products of bytes
        "avx512vbmi"   looks bytes up in a table
        "avx512vbmi2"  expands elements of 8 and 16 bits
        "amx"          products of tiles of bf16
        "amxint8"      products of tiles of bytes
        """
        here = set(self.features.split(","))
        return frozenset(name for name, ways in _INSTRUCTIONS.items() if any(needed <= here for needed in ways))

    @property
    def gathers(self) -> bool:
        """Whether one gather instruction reads many places faster than a load for each place.

        LLVM's tables know: the test is whether LLVM uses the instruction for a gather where it may, but need not. A mitigation
        against gather data sampling makes gathers slow, so this is false where Linux reports one.
        """
        return self.vector_bits >= 256 and not _gathers_are_guarded() and _gathers_by_one_instruction(self)

    def machine(self) -> llvm.TargetMachine:
        """Returns LLVM's target machine at the target's level, for position-independent code."""
        initialize()
        return llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=self.cpu, features=self.features, opt=self.level, reloc="pic", codemodel="small"
        )


@cache
def host() -> Target:
    """Returns the target of this machine."""
    initialize()
    features = llvm.get_host_cpu_features()
    features.update(_arm_features())
    if features.get("amx-tile") and not _may_use_tiles():
        features.update({name: False for name in features if name.startswith("amx")})
    bits = next(bits for bits, needed in _WIDTHS.items() if all(features.get(name) for name in needed))
    cpu = _unmasked(llvm.get_host_cpu_name(), features)
    return Target(llvm.get_process_triple(), cpu, features.flatten(), bits, LLVM_LEVEL.get())


def _arm_features() -> dict[str, bool]:
    """Returns the features of a 64-bit ARM, which LLVM does not find out itself; empty on other machines.

    SVE is off. On most machines its vectors are no wider than NEON's, and with it LLVM 22 crashes on a masked load of bf16.
    """
    if not llvm.get_process_triple().startswith(("aarch64", "arm64")):
        return {}
    if sys.platform == "darwin":
        found = {name: _sysctl(f"hw.optional.arm.FEAT_{flag}") for flag, name in _SYSCTLS.items()}
    else:
        said = [line for line in _CPUINFO.read_text().splitlines() if line.startswith("Features")] if _CPUINFO.exists() else []
        found = {name: bool(said) and flag in said[0].split() for flag, name in _HWCAPS.items()}
    return {"neon": True, "sve": False, **found}


def _sysctl(name: str) -> bool:
    """Whether a macOS setting exists and is not 0."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    found = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return found == 0 and value.value != 0


def _unmasked(cpu: str, features: Mapping[str, bool]) -> str:
    """Returns the CPU's name for LLVM's tables. A virtual machine may report an older model than its features belong to."""
    if not features.get("amx-tile") or cpu in _WITH_TILES:
        return cpu
    return "graniterapids" if features.get("prefetchi") else "sapphirerapids"


def _may_use_tiles() -> bool:
    """Asks Linux for AMX's tile registers. Only processes that ask may use them (Documentation/arch/x86/xstate.rst)."""
    request, permission, tile_data = 158, 0x1023, 18  # SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return ctypes.CDLL(None).syscall(request, permission, tile_data) == 0


_GATHER = """
define <8 x float> @gather(ptr %x, <8 x i32> %at) {
  %places = getelementptr float, ptr %x, <8 x i32> %at
  %read = call <8 x float>
    @llvm.masked.gather.v8f32.v8p0(<8 x ptr> %places, i32 4, <8 x i1> splat (i1 true), <8 x float> poison)
  ret <8 x float> %read
}
declare <8 x float> @llvm.masked.gather.v8f32.v8p0(<8 x ptr>, i32, <8 x i1>, <8 x float>)
"""
_CPUINFO = Path("/proc/cpuinfo")
_GUARDS = Path("/sys/devices/system/cpu/vulnerabilities/gather_data_sampling")


@cache
def _gathers_by_one_instruction(target: Target) -> bool:
    initialize()
    machine = llvm.Target.from_triple(target.triple).create_target_machine(cpu=target.cpu, features="-avx512f,+avx2", opt=3)
    return "vgather" in machine.emit_assembly(llvm.parse_assembly(_GATHER))


@cache
def _gathers_are_guarded() -> bool:
    """Whether Linux reports a mitigation (Documentation/admin-guide/hw-vuln/gather_data_sampling.rst)."""
    try:
        return _GUARDS.read_text().startswith("Mitigation")
    except OSError:
        return False


@cache
def initialize() -> None:
    """Registers LLVM's targets, once."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
