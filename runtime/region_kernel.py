"""Kernels of regions: machine code with what is needed to call it, shared by key, and recalled from the cache on disk.

Nothing of MLIR is loaded here: see `gossamer.sparsity.compiler.compile_kernel` for how kernels are made.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing
from gossamer.runtime import disk_cache, jit
from gossamer.runtime.compiled_kernel import Given, Kernel, Memory
from gossamer.runtime.data_cache import first_level_bytes
from gossamer.runtime.recall import Note
from gossamer.runtime.target import Target, host
from gossamer.runtime.versions import compiler

log = logging.getLogger("gossamer")

_lock = threading.Lock()
_by_key: WeakValueDictionary[str, "RegionKernel"] = WeakValueDictionary()


class SparseOperand(Protocol):
    """A sparse operand as a kernel takes it: the addresses and lengths of its arrays, as far as they vary, then its sizes."""

    @property
    def words(self) -> Sequence[int]: ...


_Operands = Sequence[torch.Tensor | Memory | SparseOperand | int]


class RegionKernel:
    """A region's kernel.

    formats   one entry per argument of the region's function: how its packed operand must be stored, None if dense
    schedule  one of pipelines.SCHEDULES, or an open one
    key       hash of kernel IR and target: equal keys are the same machine code
    words, workspace  as of a `Kernel`
    tiles     tokens of a tile, then the bytes that each tile needs more, for all threads and for each; empty without tiles
    """

    def __init__(self, note: Note, entry: disk_cache.Entry) -> None:
        """CompileError if the code cannot be loaded; KeyError, TypeError or ValueError if the entry is none of ours."""
        self.note, self.formats, self.schedule, self.key = note, note.formats, note.schedule, note.key
        *dynamic, _workspace, _threads = entry.call["words"]
        code = jit.load(entry.code, entry.call["entry"])
        terms = _terms(note.formats, note.sized, note.numbers, dynamic)
        self._kernel = Kernel(code, sum(1 + len(dims) for dims in dynamic), entry.call["workspace"], terms)
        self.words, self.workspace = self._kernel.words, self._kernel.workspace
        self.tiles = tuple(entry.call["tile_workspace"])

    def __reduce__(self) -> tuple[Callable[[Note], "RegionKernel"], tuple[Note]]:
        return _recalled, (self.note,)

    def __call__(self, operands: _Operands, out: torch.Tensor | Sequence[torch.Tensor], length: int = 0) -> None:
        """Compute into `out`, a list where there are several results, all with as many rows; dense tensors are contiguous CPU
        tensors of the types the region was compiled for.

        `length` is that of a sequence where the region has attention.

        A region with a sparse result fills `out` (int64) with address and elements of each of its arrays, for the caller to
        free (see expose-specifiers).
        """
        if not self.tiles:
            self._kernel.run(operands, out)
            return
        tokens, shared, scratch = self.tiles
        rows = (out if isinstance(out, torch.Tensor) else out[0]).size(0)
        length = length or rows
        tiles = -(-length // tokens)
        self._kernel.run(operands, out, rows // length * tiles * shared, tiles * scratch)

    @property
    def code(self) -> Kernel | None:
        """What runs; None where its workspace depends on the call."""
        return None if self.tiles else self._kernel

    def alone(self, operands: _Operands, out: torch.Tensor | Memory) -> tuple[Kernel, list[int | Given], int]:
        """A call on one thread: the code, its words, and the bytes of its workspace."""
        rows, needed = out.shape[0], self.workspace
        if self.tiles:
            tokens, shared, scratch = self.tiles
            needed += -(-rows // tokens) * (shared + scratch)
        return self._kernel, self._kernel.words(operands, out), needed

    def bound(self, words: Sequence[int]) -> Callable[..., None]:
        """A function of the words that follow these ones, of the operands and the output: see `Kernel.bound`."""
        return self._kernel.bound(words)

    def into(self, outputs: Sequence[torch.Tensor], operands: _Operands) -> None:
        """Compute all results of a region, which may have several."""
        self._kernel.run(operands, outputs if len(outputs) > 1 else outputs[0])


def made(note: Note, entry: disk_cache.Entry) -> RegionKernel:
    """The kernel of new code, which is kept on disk. CompileError if it cannot be loaded."""
    kernel = RegionKernel(note, entry)
    disk_cache.write(note.key, entry)
    return _by_key.setdefault(note.key, kernel)


def find(note: Note) -> RegionKernel | None:
    """The kernel of a note, if this process has it or its code is on disk."""
    with _lock:
        return _by_key.get(note.key) or _from_disk(note)


def recall_region(request: str, target: Target | None = None) -> RegionKernel | None:
    """The kernel that `compile_region` made for the same request before, if code and plan are still in the cache on disk.

    `request` is any text that determines the contract IR and the schedule.
    """
    note = Note.read(full(request, target or host()))
    return None if note is None else find(note)


def full(request: str, target: Target) -> str:
    """A request with all else that its kernel depends on."""
    return f"{request}\n{target}\n{first_level_bytes()}\n{compiler()}"


def _recalled(note: Note) -> RegionKernel:
    """The kernel of a note, as unpickling wants it."""
    kernel = find(note)
    if kernel is None:
        raise CompileError(f"the code of kernel {note.key} is not in the cache on disk any more")
    return kernel


def _from_disk(note: Note) -> RegionKernel | None:
    """The kernel whose code is on disk; None if it is not there, or cannot be loaded."""
    entry = disk_cache.read(note.key)
    if entry is None:
        return None
    try:
        return _by_key.setdefault(note.key, RegionKernel(note, entry))
    except (CompileError, KeyError, TypeError, ValueError) as problem:
        log.warning("kernel cache: the code of %s cannot be used (%s), it is compiled anew", note.key, problem)
        return None


def _terms(
    formats: Sequence[Format | Packing | None],
    sized: Sequence[bool],
    numbers: Sequence[bool],
    dynamic: Sequence[tuple[int, ...]],
) -> str:
    """The words of a call from operands `o` and output (or outputs) `out`, as Python.

    o[0].data_ptr(), o[0].shape[0], *o[1].words, o[2].data_ptr(), out.data_ptr(), out.shape[0]

    The words of a sparse operand are its arrays' and, where its shape is open, the sizes of its levels.
    """
    remaining = iter(dynamic)
    terms: list[str] = []
    for position, format in enumerate(formats):
        name = f"o[{position}]"
        if position < len(numbers) and numbers[position]:
            terms.append(name)
            next(remaining)
        elif format is None:
            terms += _dense_words(name, next(remaining))
        else:
            terms.append(f"*{name}.words")
            sizes = len(format.levels) if isinstance(format, Format) and sized[position] else 0
            for _ in range(len(format.components()) + sizes):
                next(remaining)
    outputs = list(remaining)
    for number, open_dims in enumerate(outputs):
        terms += _dense_words("out" if len(outputs) == 1 else f"out[{number}]", open_dims)
    return ", ".join(terms)


def _dense_words(name: str, open_dims: Sequence[int]) -> list[str]:
    return [f"{name}.data_ptr()", *(f"{name}.shape[{dim}]" for dim in open_dims)]
