"""What of the compiler's memory may be given back: pages that nobody has written to, and nothing of others."""

import sys

from gossamer.runtime.modules.given_back import _places, _untouched, give_back

SMAPS = """\
7f0000000000-7f0000001000 r--p 00000000 08:01 11 /site-packages/llvmlite/binding/libllvmlite.so
Rss:                   4 kB
Anonymous:             0 kB
7f0000001000-7f0000004000 r-xp 00001000 08:01 11 /site-packages/llvmlite/binding/libllvmlite.so
Anonymous:             0 kB
VmFlags: rd ex mr mw me
7f0000004000-7f0000005000 r--p 00004000 08:01 11 /site-packages/llvmlite/binding/libllvmlite.so
Anonymous:             4 kB
7f0000005000-7f0000006000 rw-p 00005000 08:01 11 /site-packages/llvmlite/binding/libllvmlite.so
Anonymous:             0 kB
7f0000006000-7f0000007000 r-xp 00000000 08:01 12 /site-packages/torch/lib/libtorch_cpu.so
Anonymous:             0 kB
7f0000007000-7f0000008000 rwxp 00000000 00:00 0
Anonymous:             0 kB
7f0000008000-7f0000009000 rw-p 00000000 00:00 0 [heap]
Anonymous:             4 kB
"""


def test_only_pages_of_the_compilers_that_nobody_wrote_to() -> None:
    found = list(_untouched(iter(SMAPS.splitlines()), ("libllvmlite",)))
    assert found == [(0x7F0000000000, 0x7F0000001000), (0x7F0000001000, 0x7F0000004000)]


def test_compiling_goes_on_afterwards() -> None:
    import torch

    from gossamer.runtime import jit
    from gossamer.runtime.target import host

    for _ in range(2):
        module = jit.optimize("define void @nothing() {\n  ret void\n}\n", host())
        assert jit.load(jit.object_code(module, host()), "nothing").address
        give_back()
    assert torch.ones(3).sum() == 3


def test_places_in_this_process_are_of_the_library_and_read_only() -> None:
    import llvmlite.binding  # noqa: F401

    if sys.platform != "linux":
        return
    with open("/proc/self/maps") as file:
        mapped = {line.partition("-")[0]: line for line in file}
    found = [mapped[f"{start:x}"] for start, _ in _places(("libllvmlite",))]
    assert found
    assert all("libllvmlite" in line and line.split()[1][1] == "-" for line in found)
