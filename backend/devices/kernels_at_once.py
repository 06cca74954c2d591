"""Runs several kernels at once, each on one thread. The team of threads shares the calls, not the work inside each call.

Small products with many weights are faster this way. Only one thread reads each weight, and tiles of tokens stay as large as on
one thread. A call may first copy some rows into memory of its thread, from which its kernel reads them.

    lists of calls, one a thread       [[a, d], [b, c]]
    a call in memory, seven int64       number of rows to copy, address of their indices, address of row 0, bytes of a row,
                                        where they go, the function, its arguments
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from gossamer.runtime import jit
from gossamer.runtime.compiled_kernel import CACHE_LINE, Given, Kernel, workspace
from gossamer.runtime.target import host
from gossamer.runtime.watching.calls import watched

_EVEN = 1.5
"""The longest list may take so many times the average. Above this, threads had better share the work inside each call."""

_CODE = """
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define private void @call(ptr %call) {
entry:
  %count = load i64, ptr %call
  %numbers.at = getelementptr i64, ptr %call, i64 1
  %numbers = load ptr, ptr %numbers.at
  %rows.at = getelementptr i64, ptr %call, i64 2
  %rows = load ptr, ptr %rows.at
  %bytes.at = getelementptr i64, ptr %call, i64 3
  %bytes = load i64, ptr %bytes.at
  %own.at = getelementptr i64, ptr %call, i64 4
  %own = load ptr, ptr %own.at
  %function.at = getelementptr i64, ptr %call, i64 5
  %function = load ptr, ptr %function.at
  %words.at = getelementptr i64, ptr %call, i64 6
  %words = load ptr, ptr %words.at
  %some = icmp sgt i64 %count, 0
  br i1 %some, label %copy, label %run
copy:
  %n = phi i64 [0, %entry], [%next, %copy]
  %number.at = getelementptr i64, ptr %numbers, i64 %n
  %number = load i64, ptr %number.at
  %from.offset = mul i64 %number, %bytes
  %from = getelementptr i8, ptr %rows, i64 %from.offset
  %to.offset = mul i64 %n, %bytes
  %to = getelementptr i8, ptr %own, i64 %to.offset
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %bytes, i1 false)
  %next = add i64 %n, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %copy, label %run
run:
  call void @GOMP_parallel(ptr %function, ptr %words, i32 1, i32 0)
  ret void
}

define private void @team(ptr %given) {
entry:
  %lists = load i64, ptr %given
  %ends.at = getelementptr i64, ptr %given, i64 1
  %ends = load ptr, ptr %ends.at
  %calls.at = getelementptr i64, ptr %given, i64 2
  %calls = load ptr, ptr %calls.at
  %own = call i32 @omp_get_thread_num()
  %first = zext i32 %own to i64
  %size = call i32 @omp_get_num_threads()
  %step = zext i32 %size to i64
  br label %list
list:
  %l = phi i64 [%first, %entry], [%l.next, %after]
  %there = icmp slt i64 %l, %lists
  br i1 %there, label %calls.of, label %done
calls.of:
  %begin.at = getelementptr i64, ptr %ends, i64 %l
  %begin = load i64, ptr %begin.at
  %end.at = getelementptr i64, ptr %begin.at, i64 1
  %end = load i64, ptr %end.at
  br label %next.call
next.call:
  %c = phi i64 [%begin, %calls.of], [%c.next, %one]
  %left = icmp slt i64 %c, %end
  br i1 %left, label %one, label %after
one:
  %place = mul i64 %c, 7
  %call = getelementptr i64, ptr %calls, i64 %place
  call void @call(ptr %call)
  %c.next = add i64 %c, 1
  br label %next.call
after:
  %l.next = add i64 %l, %step
  br label %list
done:
  ret void
}

define void @at_once(ptr %given) {
  %lists = load i64, ptr %given
  %team = trunc i64 %lists to i32
  call void @GOMP_parallel(ptr @team, ptr %given, i32 %team, i32 0)
  ret void
}
"""


@dataclass(frozen=True, slots=True)
class Copied:
    """Rows that are copied before a call.

    rows     the address of row 0
    numbers  the address of the indices of the rows to copy, int64
    count    the number of rows to copy
    bytes    the bytes of a row
    """

    rows: int
    numbers: int
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """The call of a kernel.

    kernel     the kernel
    words      its arguments, as of `Kernel.words`; Given(0) is the place that rows are copied to
    workspace  bytes of workspace that it needs
    work       how long it takes, relative to the other calls
    copied     the rows that are copied first, if any
    kept       objects that must stay alive until it has run
    """

    kernel: Kernel
    words: Sequence[int | Given]
    workspace: int
    work: int
    copied: Copied | None = None
    kept: Any = field(default=None, repr=False)


def run_at_once(calls: Sequence[Call], threads: int) -> bool:
    """Runs calls on so many threads. They must write to different places.

    Returns False, and runs none, if the other threads would have to wait for one long list.
    """
    lists = _shared(calls, threads)
    if max(sum(each.work for each in own) for own in lists) * threads > _EVEN * sum(each.work for each in calls):
        return False
    scratch = -(-max(each.workspace for each in calls) // CACHE_LINE) * CACHE_LINE
    copied = max((each.copied.count * each.copied.bytes for each in calls if each.copied is not None), default=0)
    each_thread = scratch + -(-copied // CACHE_LINE) * CACHE_LINE
    memory = workspace()
    if memory.size < each_thread * threads:
        memory.grow(each_thread * threads)
    ends, lines = array("q", [0]), array("q")
    words: list[array[int]] = []
    for number, own in enumerate(lists):
        place = memory.address + number * each_thread
        for call in own:
            buffer = place + scratch
            known = [buffer + word.offset if isinstance(word, Given) else word for word in call.words]
            words.append(array("q", [*known, place, call.workspace, 1]))
            copy = call.copied
            first = (0, 0, 0, 0) if copy is None else (copy.count, copy.numbers, copy.rows, copy.bytes)
            lines.extend((*first, buffer, call.kernel.address, words[-1].buffer_info()[0]))
        ends.append(ends[-1] + len(own))
    given = array("q", [threads, ends.buffer_info()[0], lines.buffer_info()[0]])
    watched("kernel", _function())(given.buffer_info()[0])
    return True


def _shared(calls: Sequence[Call], threads: int) -> list[list[Call]]:
    """Returns the calls of each thread. The longest are dealt first, each to the thread that has the least to do."""
    lists, loads = [list[Call]() for _ in range(threads)], [0] * threads
    for call in sorted(calls, key=lambda each: each.work, reverse=True):
        least = loads.index(min(loads))
        lists[least].append(call)
        loads[least] += call.work
    return lists


@cache
def _function() -> Any:
    code = jit.load(jit.object_code(jit.optimize(_CODE, host()), host()), "at_once")
    function: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)
    function.code = code  # keeps the machine code in memory
    return function
