"""The emulator itself: it computes what PTX says, and refuses what a GPU forbids or leaves undefined."""

import numpy as np
import pytest

from tests.gpu.emulator import Fault, GlobalMemory, launch, parse

HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n.extern .shared .align 16 .b8 buffer[];\n"


def run(
    body: str, *arrays: np.ndarray, block: int = 64, grid: int = 1, shared: int = 1024, seed: int | None = None
) -> list[np.ndarray]:
    """Run a kernel whose parameters p0, p1, ... are in %rd0, %rd1, ..., %r0 is the thread, %rd9 four times that."""
    parameters = ",\n".join(f".param .u64 p{i}" for i in range(len(arrays)))
    loads = "".join(f"ld.param.b64 %rd{i}, [p{i}];\n" for i in range(len(arrays)))
    text = f"""{HEAD}.visible .entry kernel({parameters})
{{
.reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .b64 %rd<99>;
{loads}mov.u32 %r0, %tid.x;
mul.wide.u32 %rd9, %r0, 4;
mov.b64 %rd8, buffer;
add.s64 %rd8, %rd8, %rd9;
{body}
ret;
}}
"""
    memory = GlobalMemory()
    addresses = [memory.place(a) for a in arrays]
    launch(parse(text)["kernel"], memory, grid=grid, block=block, arguments=addresses, shared=shared, seed=seed)
    return [memory.read(a) for a in addresses]


def words(count: int = 64) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


FLOAT = "cvt.rn.f32.u32 %r2, %r0;\n"
STORE = "add.s64 %rd20, %rd0, %rd9;\nst.global.b32 [%rd20], %r1;"
NEIGHBOUR = "xor.b32 %r2, %r0, 32;\nmul.wide.u32 %rd7, %r2, 4;\nmov.b64 %rd6, buffer;\nadd.s64 %rd7, %rd6, %rd7;"


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("mul.lo.s32 %r1, %r0, %r0;", words() ** 2),
        ("sub.s32 %r1, 0, %r0;\nshr.s32 %r1, %r1, 1;", -words() >> 1),
        ("setp.lt.u32 %p0, %r0, 5;\nselp.b32 %r1, 7, 9, %p0;", np.where(words() < 5, 7, 9)),
        ("setp.ge.u32 %p0, %r0, 5;\nmov.u32 %r1, 3;\n@!%p0 bra $L1;\nmov.u32 %r1, 4;\n$L1:", np.where(words() < 5, 3, 4)),
        ("shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;", words() ^ 1),
        ("redux.sync.add.s32 %r1, %r0, -1;", np.where(words() < 32, 496, 1520)),
        ("mul.lo.s32 %r2, %r0, 5;\nprmt.b32 %r1, %r2, 0, 0x8880U;", (words() * 5).astype(np.int8).astype(np.int32)),
        ("mul.lo.s32 %r2, %r0, 16843009;\ndp4a.u32.u32 %r1, %r2, 67305985, 7;", words() * (1 + 2 + 3 + 4) + 7),
        ("add.s64 %rd20, %rd0, %rd9;\nld.global.s8 %r1, [%rd20];\nsub.s32 %r1, 0, %r1;", -words()),
        (f"{FLOAT}fma.rn.f32 %r2, %r2, 0f3FC00000, 0f3F000000;\ncvt.rzi.s32.f32 %r1, %r2;", (words() * 1.5 + 0.5).astype(int)),
        (f"{FLOAT}cvt.rn.bf16.f32 %rs1, %r2;\ncvt.u32.u16 %r1, %rs1;", words().astype(np.float32).view(np.int32) >> 16),
        (f"{NEIGHBOUR}\nst.shared.b32 [%rd8], %r0;\nbar.sync 0;\nld.shared.b32 %r1, [%rd7];", words() ^ 32),
        ("mov.u32 %r1, 0;\n$L1:\nadd.s32 %r1, %r1, 1;\nsetp.lt.u32 %p0, %r1, %r0;\n@%p0 bra $L1;", np.maximum(words(), 1)),
    ],
)  # fmt: skip
def test_it_computes(body: str, expected: np.ndarray, seed: int | None) -> None:
    (result,) = run(f"{body}\n{STORE}", words(), seed=seed)
    np.testing.assert_array_equal(result, expected)


def test_blocks_are_told_apart() -> None:
    body = "mov.u32 %r1, %ctaid.x;\nmul.wide.u32 %rd7, %r1, 256;\nadd.s64 %rd9, %rd7, %rd9;\n" + STORE
    (result,) = run(body, words(20 * 64), grid=20)
    np.testing.assert_array_equal(result, np.repeat(np.arange(20), 64))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"add.s64 %rd0, %rd0, 4;\n{STORE.replace('%r1', '%r0')}", "outside of (any tensor|global memory)"),
        ("ld.global.b32 %r1, [%rd9];", "outside of (any tensor|global memory)"),
        ("add.s64 %rd0, %rd0, 2;\nld.global.b32 %r1, [%rd0];", "misaligned"),
        ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd0+4];", "misaligned"),
        ("ld.shared.b32 %r1, [%rd8+1020];", "outside of shared memory"),
        (f"{NEIGHBOUR}\nst.shared.b32 [%rd8], %r0;\nld.shared.b32 %r1, [%rd7];", "race .* (reads|writes) what another"),
        (f"{NEIGHBOUR}\nld.shared.b32 %r1, [%rd7];\nst.shared.b32 [%rd8], %r0;", "race .* (reads|writes) what another"),
        ("mov.b64 %rd7, buffer;\nst.shared.b32 [%rd7], %r0;", "threads write the same bytes"),
        ("xor.b32 %r2, %r0, 1;\nmul.wide.u32 %rd7, %r2, 4;\nmov.b64 %rd6, buffer;\nadd.s64 %rd7, %rd6, %rd7;\n"
         "st.shared.b32 [%rd8], %r0;\nld.shared.b32 %r1, [%rd7];", "race .* (reads|writes) what another"),
        ("setp.lt.u32 %p0, %r0, 5;\n@%p0 shfl.sync.idx.b32 %r1, %r0, 0, 31, -1;", "by a part of a warp"),
        ("setp.lt.u32 %p0, %r0, 5;\n@%p0 bar.warp.sync -1;\nbar.sync 0;", "a part of a warp waits"),
        ("setp.lt.u32 %p0, %r0, 32;\n@%p0 bra $L1;\nbar.sync 0;\nbra.uni $L2;\n$L1:\nbar.sync 0;\n$L2:", "different barriers"),
        ("ld.b32 %r1, [%rd0];", "generic load"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", [None, 1])
def test_it_refuses(body: str, message: str, seed: int | None) -> None:
    with pytest.raises(Fault, match=message):
        run(body, words(), seed=seed)


def test_a_barrier_of_the_warp_orders_its_threads_only() -> None:
    within = "xor.b32 %r2, %r0, 1;\nmul.wide.u32 %rd7, %r2, 4;\nmov.b64 %rd6, buffer;\nadd.s64 %rd7, %rd6, %rd7;\n"
    exchange = "st.shared.b32 [%rd8], %r0;\nbar.warp.sync -1;\nld.shared.b32 %r1, [%rd7];\n"
    (result,) = run(within + exchange + STORE, words())
    np.testing.assert_array_equal(result, words() ^ 1)
    with pytest.raises(Fault, match="race"):
        run(f"{NEIGHBOUR}\n{exchange}{STORE}", words())


COPY = (
    "shl.b64 %rd9, %rd9, 2;\nmov.b64 %rd6, buffer;\nadd.s64 %rd6, %rd6, %rd9;\nadd.s64 %rd7, %rd1, %rd9;\n"
    "cp.async.cg.shared.global [%rd6], [%rd7], 16;\ncp.async.commit_group;\n{}\nld.shared.b32 %r1, [%rd6];\n"
    "shr.u64 %rd9, %rd9, 2;\n" + STORE
)


def test_an_asynchronous_copy_arrives_when_it_is_waited_for() -> None:
    source = np.arange(256, dtype=np.int32)
    result, _ = run(COPY.format("cp.async.wait_group 0;"), words(), source)
    np.testing.assert_array_equal(result, source[::4])
    result, _ = run(COPY.format(""), words(), source)
    np.testing.assert_array_equal(result, np.full(64, -1))


def test_matrices_in_fragments() -> None:
    """One warp multiplies 16 x 16 by 16 x 8 through ldmatrix and mma.sync, as the instruction set lays them out."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (rows, 16)).astype(np.float16) for rows in (16, 8))
    body = """
shl.b32 %r1, %r0, 4; cvt.u64.u32 %rd3, %r1; mov.b64 %rd4, buffer; add.s64 %rd5, %rd4, %rd3;
add.s64 %rd6, %rd0, %rd3; cp.async.cg.shared.global [%rd5], [%rd6], 16;
setp.lt.u32 %p0, %r0, 16; add.s64 %rd6, %rd1, %rd3; @%p0 cp.async.cg.shared.global [%rd5+512], [%rd6], 16;
cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
and.b32 %r2, %r0, 15; shl.b32 %r2, %r2, 5; shr.u32 %r3, %r0, 4; shl.b32 %r3, %r3, 4; add.s32 %r2, %r2, %r3;
cvt.u64.u32 %rd3, %r2; add.s64 %rd5, %rd4, %rd3;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%rd5];
and.b32 %r2, %r0, 7; shl.b32 %r2, %r2, 5; shr.u32 %r3, %r0, 3; and.b32 %r3, %r3, 1; shl.b32 %r3, %r3, 4; add.s32 %r2, %r2, %r3;
cvt.u64.u32 %rd3, %r2; add.s64 %rd5, %rd4, %rd3;
ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r20, %r21}, [%rd5+512];
mov.b32 %r30, 0f00000000;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
  {%r40, %r41, %r42, %r43}, {%r10, %r11, %r12, %r13}, {%r20, %r21}, {%r30, %r30, %r30, %r30};
shr.u32 %r2, %r0, 2; shl.b32 %r2, %r2, 3; and.b32 %r3, %r0, 3; shl.b32 %r3, %r3, 1; add.s32 %r2, %r2, %r3;
mul.wide.u32 %rd3, %r2, 4; add.s64 %rd3, %rd3, %rd2;
st.global.v2.b32 [%rd3], {%r40, %r41}; st.global.v2.b32 [%rd3+256], {%r42, %r43};
"""
    *_, result = run(body, a, b, np.zeros((16, 8), np.float32), block=32)
    np.testing.assert_array_equal(result, a.astype(np.float32) @ b.astype(np.float32).T)


def test_bytes_in_fragments() -> None:
    """One warp multiplies 16 x 32 by 32 x 8 bytes, as the instruction set lays them out, and sums wrap around."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, (rows, 32)).astype(np.int8) for rows in (16, 8))
    body = """
shr.u32 %r1, %r0, 2; shl.b32 %r1, %r1, 5; and.b32 %r2, %r0, 3; shl.b32 %r2, %r2, 2; add.s32 %r1, %r1, %r2;
cvt.u64.u32 %rd3, %r1; add.s64 %rd4, %rd0, %rd3; add.s64 %rd5, %rd1, %rd3;
ld.global.b32 %r10, [%rd4]; ld.global.b32 %r11, [%rd4+256]; ld.global.b32 %r12, [%rd4+16]; ld.global.b32 %r13, [%rd4+272];
ld.global.b32 %r20, [%rd5]; ld.global.b32 %r21, [%rd5+16];
mov.u32 %r30, 2147483647;
mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32
  {%r40, %r41, %r42, %r43}, {%r10, %r11, %r12, %r13}, {%r20, %r21}, {%r30, %r30, %r30, %r30};
shr.u32 %r2, %r0, 2; shl.b32 %r2, %r2, 3; and.b32 %r3, %r0, 3; shl.b32 %r3, %r3, 1; add.s32 %r2, %r2, %r3;
mul.wide.u32 %rd3, %r2, 4; add.s64 %rd3, %rd3, %rd2;
st.global.v2.b32 [%rd3], {%r40, %r41}; st.global.v2.b32 [%rd3+256], {%r42, %r43};
"""
    *_, result = run(body, a, b, np.zeros((16, 8), np.int32), block=32)
    np.testing.assert_array_equal(result, (a.astype(np.int64) @ b.astype(np.int64).T + 2147483647).astype(np.int32))
