"""Targets: what they are called, what they can do, and which of them this machine is."""

import dataclasses
import platform
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from gossamer.dialects.errors import OptionError
from gossamer.runtime import target
from gossamer.runtime.target import Target, host

NAMES = ["avx2", "avx512", "amx", "neon", "neoverse-n1", "neoverse-v1", "apple-m1"]


@pytest.mark.parametrize(
    ("name", "triple", "bits"),
    [
        *(("avx2", "x86_64", 256), ("avx512", "x86_64", 512), ("amx", "x86_64", 512), ("neon", "aarch64", 128)),
        *(("neoverse-n1", "aarch64", 128), ("neoverse-v1", "aarch64", 128), ("apple-m1", "arm64", 128)),
    ],
)
def test_named_targets(name: str, triple: str, bits: int) -> None:
    target = Target.named(name)
    assert target.triple.split("-")[0] == triple
    assert target.architecture == triple.replace("arm64", "aarch64")
    assert target.vector_bits == bits
    assert triple in target.machine().triple


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"unknown target 'sse', there are avx2, avx512, amx, neon"):
        Target.named("sse")


def test_the_host_is_this_machine() -> None:
    assert host() is host()
    assert host().runs_here
    assert host().vector_bits in (128, 256, 512)


@pytest.mark.parametrize(
    ("claimed", "features", "expected"),
    [
        ("rocketlake", {"amx-tile": True, "prefetchi": True}, "graniterapids"),
        ("icelake-server", {"amx-tile": True, "prefetchi": False}, "sapphirerapids"),
        ("emeraldrapids", {"amx-tile": True}, "emeraldrapids"),
        ("rocketlake", {"amx-tile": False}, "rocketlake"),
        ("apple-m1", {"neon": True}, "apple-m1"),
    ],
)
def test_a_cpu_is_no_older_than_what_it_can_do(
    claimed: str, features: dict[str, bool], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Virtual machines may name another model than they run on."""
    monkeypatch.setattr(target, "_may_use_tiles", lambda: True)
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: claimed)
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: llvm.FeatureMap(features))
    assert host.__wrapped__().cpu == expected


@pytest.mark.parametrize("name", NAMES)
def test_what_runs_here_has_the_vectors(name: str) -> None:
    """A target runs here only if this machine's vectors are as wide, and never on another kind of machine."""
    target = Target.named(name)
    if target.runs_here:
        assert host().vector_bits >= target.vector_bits
        assert target.triple.split("-")[0] == host().triple.split("-")[0]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks what this machine says of itself")
@pytest.mark.parametrize(("name", "flags"), [("avx2", ["avx2"]), ("avx512", ["avx512vl"]), ("amx", ["avx512vl", "amx-bf16"])])
def test_what_runs_here_has_the_instructions(name: str, flags: list[str]) -> None:
    features = llvm.get_host_cpu_features()
    assert Target.named(name).runs_here == all(features.get(flag) for flag in flags)


def test_a_narrower_host_is_still_this_machine() -> None:
    assert dataclasses.replace(host(), vector_bits=128).runs_here


@pytest.mark.parametrize(
    ("features", "expected"),
    [("", False), ("+avx512bf16,+avx512f", True), ("+avxneconvert", True), ("+neon,+bf16", True), ("-avx512bf16", False)],
)
def test_rounding_to_bf16_is_a_feature(features: str, expected: bool) -> None:
    assert dataclasses.replace(host(), features=features).rounds_to_bf16 is expected


@pytest.mark.parametrize(("cpu", "expected"), [("znver5", True), ("emeraldrapids", False), ("generic", False)])
def test_only_some_fetch_fastest_past_a_cache(cpu: str, expected: bool) -> None:
    assert dataclasses.replace(host(), cpu=cpu).streams is expected


def test_named_targets_round_to_bf16_if_they_multiply_it() -> None:
    assert [name for name in NAMES if Target.named(name).rounds_to_bf16] == ["amx", "neoverse-v1"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("avx2", set()), ("neon", set()), ("neoverse-n1", {"bytedots"}), ("neoverse-v1", {"bytedots", "bf16dots"})],
)
def test_instructions_are_named_by_what_they_do(name: str, expected: set[str]) -> None:
    assert Target.named(name).instructions == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("fp asimd evtstrm aes asimdhp cpuid asimddp", {"bytedots"}),
        ("fp asimd asimddp sve i8mm bf16", {"bytedots", "bf16dots"}),
        ("fp asimd", set()),
    ],
)
def test_linux_says_what_an_arm_processor_can_do(
    said: str, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nFeatures\t: {said}\nCPU part\t: 0xd0c\n")
    monkeypatch.setattr(target, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(llvm, "get_process_triple", lambda: "aarch64-unknown-linux-gnu")
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "neoverse-n1")
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: llvm.FeatureMap({"neon": True, "sve": "sve" in said}))
    here = host.__wrapped__()
    assert (here.vector_bits, here.architecture, set(here.instructions)) == (128, "aarch64", expected)
    assert "-sve" in here.features.split(",")
