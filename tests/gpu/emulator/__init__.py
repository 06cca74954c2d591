"""An emulator of PTX for the tests: it runs the text that LLVM emits, thread by thread, on NumPy arrays.

    program = parse(ptx)["region_t128"]
    memory = GlobalMemory()
    address = memory.place(array)
    launch(program, memory, grid=8, block=512, arguments=[address, 100], shared=98304, seed=1)
    result = memory.read(address)

What a GPU lets pass, or answers with wrong numbers now and then, is a `Fault` here: an access outside of a tensor or of shared
memory, a misaligned one, two threads that touch the same shared memory without a barrier between them (one of them writing),
collective instructions that part of a warp executes, barriers that part of a block reaches. Shared memory starts as NaN, and so
does what an asynchronous copy will fill until it has been waited for. Without a seed all warps run in step; with one, they run
in bursts of random length. It knows nothing of speed, and what it accepts has not run on a GPU.
"""

from .machine import launch
from .memory import Fault, GlobalMemory
from .parser import Program, parse

__all__ = ["Fault", "GlobalMemory", "Program", "launch", "parse"]
