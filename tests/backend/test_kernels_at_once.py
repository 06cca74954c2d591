"""Calls of kernels that run at once: each on one thread, with workspace and copied rows of its own."""

from collections.abc import Iterator

import pytest
import torch

from gossamer.backend.devices.kernels_at_once import Call, Copied, run_at_once
from gossamer.runtime import jit
from gossamer.runtime.compiled_kernel import Given, Kernel
from gossamer.runtime.target import host

WORKSPACE = 96


@pytest.fixture(autouse=True)
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def kernel() -> Kernel:
    """A kernel of the words (where, source, bytes): copies what its source has, and tells its team and its last words.

    It fills its workspace, so that one of two calls would see what the other one writes there.
    """
    text = f"""
      declare i32 @omp_get_thread_num()
      declare i32 @omp_get_num_threads()
      declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
      declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
      define void @entry(ptr %words) {{
        %out = load ptr, ptr %words
        %source.at = getelementptr i64, ptr %words, i64 1
        %source = load ptr, ptr %source.at
        %bytes.at = getelementptr i64, ptr %words, i64 2
        %bytes = load i64, ptr %bytes.at
        %scratch.at = getelementptr i64, ptr %words, i64 3
        %scratch = load ptr, ptr %scratch.at
        call void @llvm.memset.p0.i64(ptr %scratch, i8 1, i64 {WORKSPACE}, i1 false)
        %own = call i32 @omp_get_thread_num()
        %number = zext i32 %own to i64
        store i64 %number, ptr %out
        %size = call i32 @omp_get_num_threads()
        %team = zext i32 %size to i64
        %team.at = getelementptr i64, ptr %out, i64 1
        store i64 %team, ptr %team.at
        %threads.at = getelementptr i64, ptr %words, i64 5
        %threads = load i64, ptr %threads.at
        %told.at = getelementptr i64, ptr %out, i64 2
        store i64 %threads, ptr %told.at
        %rest = getelementptr i64, ptr %out, i64 3
        call void @llvm.memcpy.p0.p0.i64(ptr %rest, ptr %source, i64 %bytes, i1 false)
        ret void
      }}
    """
    code = jit.load(jit.object_code(jit.optimize(text, host()), host()), "entry")
    return Kernel(code, 3, WORKSPACE)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_call_runs_alone_on_rows_of_its_own(threads: int) -> None:
    entry, rows = kernel(), torch.arange(40 * 3).view(40, 3)
    numbers = torch.randint(0, 40, (60,))
    out = torch.zeros(12, 3 + 5 * 3, dtype=torch.int64)
    calls = [
        Call(
            entry, [line.data_ptr(), Given(0), 5 * 24], WORKSPACE, 5,
            Copied(rows.data_ptr(), numbers.data_ptr() + 8 * 5 * number, 5, 24),
        )
        for number, line in enumerate(out)
    ]  # fmt: skip
    assert run_at_once(calls, threads)
    assert out[:, :3].tolist() == [[0, 1, 1]] * 12
    assert torch.equal(out[:, 3:].reshape(60, 3), rows[numbers])


def test_calls_may_copy_nothing() -> None:
    entry, source, out = kernel(), torch.tensor([7, 9]), torch.zeros(2, 5, dtype=torch.int64)
    assert run_at_once([Call(entry, [line.data_ptr(), source.data_ptr(), 16], WORKSPACE, 1) for line in out], 2)
    assert out[:, 3:].tolist() == [[7, 9]] * 2


def test_a_long_call_is_left_to_a_team_of_its_own() -> None:
    entry, out = kernel(), torch.zeros(3, 3, dtype=torch.int64)
    calls = [Call(entry, [line.data_ptr(), 0, 0], WORKSPACE, work) for line, work in zip(out, (100, 1, 1), strict=True)]
    assert not run_at_once(calls, 2)
    assert run_at_once(calls, 1)
