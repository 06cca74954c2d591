"""A kernel's call: the words that arrive, and the workspace that comes with them."""

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gossamer.runtime import jit
from gossamer.runtime.compiled_kernel import Kernel
from gossamer.runtime.target import host


@pytest.fixture(autouse=True)
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def copier(words: int, workspace: int) -> Kernel:
    """A kernel that copies its words to the address in its first one, and fills its workspace with ones."""
    text = f"""
      define void @entry(ptr %words) {{
        %out = load ptr, ptr %words
        call void @llvm.memcpy.p0.p0.i64(ptr %out, ptr %words, i64 {8 * (words + 3)}, i1 false)
        %at = getelementptr i64, ptr %words, i64 {words}
        %scratch = load ptr, ptr %at
        %after = getelementptr i64, ptr %words, i64 {words + 1}
        %size = load i64, ptr %after
        call void @llvm.memset.p0.i64(ptr %scratch, i8 1, i64 %size, i1 false)
        ret void
      }}
      declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
      declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)"""
    return Kernel(jit.load(jit.object_code(jit.optimize(text, host()), host()), "entry"), words, workspace)


def words_seen(kernel: Kernel, *more: int) -> list[int]:
    seen = (ctypes.c_int64 * (len(more) + 4))()
    kernel.run([ctypes.addressof(seen), *more])
    return list(seen)


def test_words_arrive_in_order_and_the_callers_come_first() -> None:
    assert words_seen(copier(4, 0), 1, -2, 1 << 40)[1:4] == [1, -2, 1 << 40]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_workspace_is_for_all_threads_and_aligned(threads: int) -> None:
    torch.set_num_threads(threads)
    *_, address, size, team = words_seen(copier(2, 100_000), 5)
    assert (size, team) == (100_000 * threads, threads)
    assert address % 64 == 0


def test_the_workspace_stays_from_call_to_call() -> None:
    small, large = copier(2, 64), copier(2, 1 << 20)
    grown = words_seen(large, 0)[2]
    assert words_seen(small, 0)[2] == grown
    assert words_seen(large, 0)[2] == grown


def test_each_python_thread_has_its_own() -> None:
    kernel, start = copier(2, 1 << 16), threading.Barrier(3)

    def run(i: int) -> set[tuple[int, ...]]:
        start.wait()
        return {tuple(words_seen(kernel, i)[1:3]) for _ in range(200)}

    with ThreadPoolExecutor(3) as threads:
        seen = list(threads.map(run, range(3)))
    assert all(len(s) == 1 for s in seen)
    (words,) = zip(*seen, strict=True)
    assert [first for first, _ in words] == [0, 1, 2]
    assert len({address for _, address in words}) == 3


def test_a_wrong_number_of_words_is_refused() -> None:
    kernel = copier(2, 0)
    for words in ([], [0], [0, 0, 0]):
        with pytest.raises(ValueError, match="sequence of same size"):
            kernel.run(words)
