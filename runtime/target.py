"""The machines that kernels are compiled for: LLVM triple, CPU, features, and the width of a vector."""

import ctypes
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

import llvmlite.binding as llvm

from gossamer.dialects.errors import OptionError
from gossamer.dialects.settings import LLVM_LEVEL

_AMX = "+avx512f,+avx512bf16,+avx512vbmi,+avx512vbmi2,+amx-tile,+amx-bf16,+amx-int8"
_WITH_TILES = frozenset({"sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d", "diamondrapids"})
_NAMED = {
    "avx2": ("x86_64-unknown-linux-gnu", "x86-64-v3", "", 256),
    "avx512": ("x86_64-unknown-linux-gnu", "x86-64-v4", "", 512),
    "amx": ("x86_64-unknown-linux-gnu", "sapphirerapids", _AMX, 512),
    "neon": ("aarch64-unknown-linux-gnu", "generic", "+neon", 128),
}


@dataclass(frozen=True)
class Target:
    """What LLVM compiles for; `vector_bits` is the width of the widest vector that kernels use, `level` how much LLVM
    optimises, from 0 to 3."""

    triple: str
    cpu: str
    features: str
    vector_bits: int
    level: int = 3

    @classmethod
    def named(cls, name: str) -> Self:
        """One of `avx2`, `avx512`, `amx`, `neon`, for cross-compilation. OptionError for another name."""
        if name not in _NAMED:
            raise OptionError(f"unknown target {name!r}, there are {', '.join(_NAMED)}")
        return cls(*_NAMED[name])

    @property
    def runs_here(self) -> bool:
        """Whether this machine can run the target's code."""
        here = host()
        needed = {256: {"+avx2"}, 512: {"+avx2", "+avx512vl"}}.get(self.vector_bits, set())
        if self.cpu == "sapphirerapids":
            needed = needed | {"+amx-bf16", "+amx-int8"}
        same_architecture = self.triple.split("-")[0] == here.triple.split("-")[0]
        return same_architecture and needed <= set(here.features.split(","))

    @property
    def rounds_to_bf16(self) -> bool:
        """Whether it has an instruction that rounds f32 to bf16."""
        return not {"+avx512bf16", "+avxneconvert", "+bf16"}.isdisjoint(self.features.split(","))

    @property
    def instructions(self) -> frozenset[str]:
        """Those that schedules ask for: "avx512bf16", dot products of bf16, "avx512vbmi", which looks bytes up,
        "avx512vbmi2", which expands elements of 8 and 16 bits, "vnni", dot products of bytes, "amx", products of tiles of
        bf16, and "amxint8", those of bytes."""
        asked = {
            "avx512bf16": {"+avx512bf16", "+avx512f"},
            "avx512vbmi": {"+avx512vbmi"},
            "avx512vbmi2": {"+avx512vbmi2"},
            "amx": {"+amx-bf16", "+amx-tile"},
            "amxint8": {"+amx-int8", "+amx-tile"},
        }
        here = set(self.features.split(","))
        found = frozenset(name for name, needed in asked.items() if needed <= here)
        return found | {"vnni"} if {"+avx512vnni", "+avx512vl"} <= here or "+avxvnni" in here else found

    @property
    def gathers(self) -> bool:
        """Whether one instruction reads many places faster than a load each does.

        LLVM's tables tell it, by what is made of a gather where it is allowed but not presumed to be fast. Not so where the
        processor is guarded against data sampling by gathers, which takes their speed away.
        """
        return self.vector_bits >= 256 and not _gathers_are_guarded() and _gathers_by_one_instruction(self)

    def machine(self) -> llvm.TargetMachine:
        """LLVM's target machine at the target's level, for code that can lie anywhere."""
        initialize()
        return llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=self.cpu, features=self.features, opt=self.level, reloc="pic", codemodel="small"
        )


@cache
def host() -> Target:
    """This machine."""
    initialize()
    features = llvm.get_host_cpu_features()
    if features.get("amx-tile") and not _may_use_tiles():
        features.update({name: False for name in features if name.startswith("amx")})
    if platform.machine() in ("aarch64", "arm64"):
        bits = 128
    elif features.get("avx512f") and features.get("avx512vl") and features.get("avx512bw"):
        bits = 512
    else:
        bits = 256 if features.get("avx2") and features.get("fma") else 128
    cpu = _unmasked(llvm.get_host_cpu_name(), features)
    return Target(llvm.get_process_triple(), cpu, features.flatten(), bits, LLVM_LEVEL.get())


def _unmasked(cpu: str, features: Mapping[str, bool]) -> str:
    """The CPU as LLVM's tables should have it: virtual machines may claim to be a model older than what they can do."""
    if not features.get("amx-tile") or cpu in _WITH_TILES:
        return cpu
    return "graniterapids" if features.get("prefetchi") else "sapphirerapids"


def _may_use_tiles() -> bool:
    """Ask Linux for AMX's tile registers, which it gives only to processes that did (Documentation/arch/x86/xstate.rst)."""
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
_GUARDS = Path("/sys/devices/system/cpu/vulnerabilities/gather_data_sampling")


@cache
def _gathers_by_one_instruction(target: Target) -> bool:
    initialize()
    machine = llvm.Target.from_triple(target.triple).create_target_machine(cpu=target.cpu, features="-avx512f,+avx2", opt=3)
    return "vgather" in machine.emit_assembly(llvm.parse_assembly(_GATHER))


@cache
def _gathers_are_guarded() -> bool:
    """Whether Linux says that a mitigation is in place (Documentation/admin-guide/hw-vuln/gather_data_sampling.rst)."""
    try:
        return _GUARDS.read_text().startswith("Mitigation")
    except OSError:
        return False


@cache
def initialize() -> None:
    """Make LLVM's targets known, once."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
