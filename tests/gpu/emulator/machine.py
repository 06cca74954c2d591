"""Threads: which of them run next, their registers, and the barriers they wait at."""

from collections.abc import Sequence

import numpy as np

from .instructions import EXECUTE
from .memory import Array, Fault, Memory, SharedMemory
from .parser import Instruction, Operand, Program, Register
from .values import TYPES, bits_of, typed

_NEVER = np.iinfo(np.int64).max
_BLOCKS_AT_ONCE = 8
_BURST = 200  # instructions a warp runs at most before another may


def launch(
    program: Program,
    memory: Memory,
    *,
    grid: int,
    block: int,
    arguments: Sequence[int],
    shared: int = 0,
    seed: int | None = None,
) -> int:
    """Run a kernel on `grid` blocks of `block` threads. Raises Fault.

    Returns how often the rows of a matrix that ldmatrix reads at once share a bank of shared memory.
    """
    if block % 32 or len(arguments) != len(program.parameters):
        raise ValueError(f"{block} threads a block, {len(arguments)} arguments for {len(program.parameters)} parameters")
    conflicts = 0
    for first in range(0, grid, _BLOCKS_AT_ONCE):
        blocks = range(first, min(first + _BLOCKS_AT_ONCE, grid))
        machine = Machine(program, memory, blocks, block, grid, arguments, shared)
        machine.run(None if seed is None else np.random.default_rng([seed, first]))
        conflicts += machine.bank_conflicts
    return conflicts


class Machine:
    """Some blocks of a launch, all threads of which are numbered through. `selected` are those that run an instruction."""

    def __init__(
        self,
        program: Program,
        memory: Memory,
        blocks: range,
        block: int,
        grid: int,
        arguments: Sequence[int],
        shared: int,
    ) -> None:
        self.program, self.memory, self.block = program, memory, block
        self.count = len(blocks) * block
        self.thread = np.arange(self.count)
        self.arguments = dict(zip(program.parameters, arguments, strict=True))
        size = -(-program.static_bytes // 16) * 16 + shared
        self.shared = SharedMemory(len(blocks), -(-size // 16) * 16, block)
        self._special = {
            "%tid.x": self.thread % block,
            "%ctaid.x": blocks.start + self.thread // block,
            "%ntid.x": np.full(self.count, block),
            "%nctaid.x": np.full(self.count, grid),
            "%laneid": self.thread % 32,
            "%tid.y": np.zeros(self.count, int),
            "%ctaid.y": np.zeros(self.count, int),
        }
        self.registers: dict[str, Array] = {}
        self.pc = np.zeros(self.count, np.int64)
        self.live = np.ones(self.count, bool)
        self.at_barrier = np.zeros(self.count, bool)
        self.at_warp_barrier = np.zeros(self.count, bool)
        self.bank_conflicts = 0
        self.groups = np.zeros(self.count, np.int64)  # asynchronous copies: groups committed
        self.copies: list[tuple[Array, Array, Array, Array, int, Array]] = []

    def run(self, random: np.random.Generator | None) -> None:
        """Run all threads to their end."""
        warp, burst = 0, 0
        while True:
            ready = np.where(self.live & ~self.at_barrier & ~self.at_warp_barrier, self.pc, _NEVER)
            if (at := ready.min()) == _NEVER:
                if not self.live.any():
                    return
                self._release()
                continue
            if random is not None:
                by_warp = ready.reshape(-1, 32).min(1)
                if burst == 0 or by_warp[warp] == _NEVER:
                    warp, burst = int(random.choice(np.nonzero(by_warp != _NEVER)[0])), int(random.integers(1, _BURST))
                burst, at = burst - 1, by_warp[warp]
                threads = warp * 32 + np.nonzero(ready[warp * 32 : warp * 32 + 32] == at)[0]
            else:
                threads = np.nonzero(ready == at)[0]
            if at >= len(self.program.code):
                self.live[threads] = False
                continue
            self._step(self.program.code[at], threads)

    def _step(self, instruction: Instruction, threads: Array) -> None:
        self.pc[threads] += 1
        if instruction.guard is not None:
            register, wanted = instruction.guard
            threads = threads[self._register(register.name, "pred")[threads] == wanted]
        if threads.size:
            self.selected = threads
            execute = EXECUTE.get(instruction.op)
            if execute is None:
                raise NotImplementedError(f"the emulator does not know {instruction.text!r}")
            try:
                execute(self, instruction)
            except Fault as fault:
                raise Fault(f"{self.program.name}: {fault}, in {instruction.text!r}") from None

    def get(self, operand: Operand, kind: str) -> Array:
        """The operand's value in each selected thread, as the NumPy type of a PTX type."""
        if isinstance(operand, Register):
            if operand.name in self._special:
                return typed(self._special[operand.name][self.selected].astype(np.uint32), kind)
            return typed(self._register(operand.name, kind)[self.selected], kind)
        if isinstance(operand, int):
            raw = np.full(self.selected.size, operand & 0xFFFFFFFFFFFFFFFF, np.uint64)
            return typed(raw.astype(bits_of(kind)), kind)
        if isinstance(operand, str) and operand in self.program.shared:
            return np.full(self.selected.size, self.program.shared[operand], TYPES[kind])
        raise NotImplementedError(f"operand {operand}")

    def set(self, operand: Operand, value: Array) -> None:
        """Give a register a value in each selected thread."""
        assert isinstance(operand, Register)
        file = self._register(operand.name, "")
        raw = value if value.dtype == bool else value.view(f"u{value.dtype.itemsize}")
        file[self.selected] = raw.astype(file.dtype)

    def _register(self, name: str, kind: str) -> Array:
        if name not in self.registers:
            width = self.program.widths[name.rstrip("0123456789")]
            # What was never written differs from thread to thread and from zero.
            start = np.zeros(self.count, bool) if width == 1 else (self.thread + 0x7FC1).astype(f"u{width // 8}")
            self.registers[name] = start
        return self.registers[name]

    def whole_warps(self, instruction: Instruction) -> int:
        """The number of warps selected; Fault if one of them is not complete."""
        lanes = self.selected[: self.selected.size // 32 * 32].reshape(-1, 32)
        if self.selected.size % 32 or (lanes % 32 != np.arange(32)).any():
            raise Fault(f"{instruction.op} is executed by a part of a warp")
        return len(lanes)

    def wait_for_warp(self) -> None:
        """A barrier of the warp: go on once all its live threads are there."""
        self.at_warp_barrier[self.selected] = True
        for warp in np.unique(self.selected // 32):
            lanes = slice(warp * 32, warp * 32 + 32)
            if (self.at_warp_barrier[lanes] | ~self.live[lanes]).all():
                self.at_warp_barrier[lanes] = False
                self.shared.warp_barriers[warp] += 1

    def _release(self) -> None:
        """All threads wait: let the blocks go on that wait at one barrier."""
        if self.at_warp_barrier.any():
            raise Fault(f"{self.program.name}: a part of a warp waits for the rest, which waits elsewhere")
        for number in range(self.count // self.block):
            block = slice(number * self.block, (number + 1) * self.block)
            waiting = self.pc[block][self.live[block]]
            if (waiting != waiting[:1]).any():
                raise Fault(f"{self.program.name}: threads of a block wait at different barriers")
            self.shared.block_barriers[number] += 1
        self.at_barrier[:] = False
