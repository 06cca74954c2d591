"""Makes the kernel of a region callable, and finds it again: in this process by its key, or in the cache on disk.

`gossamer.sparsity.compiler.compile_kernel` compiles kernels. This file does not load MLIR, so that a process that finds all its
kernels on disk never loads it.
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
    """A sparse operand as a kernel takes it. Its words are the addresses and lengths of its arrays, then its sizes, as far as
    these are not fixed in the kernel."""

    @property
    def words(self) -> Sequence[int]: ...


_Operands = Sequence[torch.Tensor | Memory | SparseOperand | int]


class RegionKernel:
    """A region's kernel.

    formats   one entry for each argument of the region's function: how its packed operand must be stored, None if dense
    schedule  one of pipelines.SCHEDULES, or an open one
    key       hash of kernel IR and target: equal keys have the same machine code
    words, workspace  as in `Kernel`
    tiles     (tokens of a tile, more workspace for each tile, more for each tile and thread; in bytes); empty without tiles
    """

    def __init__(self, note: Note, entry: disk_cache.Entry) -> None:
        """Raises CompileError if the code cannot be loaded; KeyError, TypeError or ValueError if the entry is not ours."""
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
        """Computes into `out`: a tensor, or a list of tensors with the same number of rows for a region with several results.

        Dense tensors are contiguous CPU tensors of the types that the region was compiled for. For a region with attention,
        `length` is the length of a sequence.

        A region with a sparse result fills `out` (int64) with the address and the number of elements of each array. The caller
        frees these arrays (see the pass expose-specifiers).
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
        """The kernel that runs; None where its workspace depends on the call."""
        return None if self.tiles else self._kernel

    def alone(self, operands: _Operands, out: torch.Tensor | Memory) -> tuple[Kernel, list[int | Given], int]:
        """Returns what a call on one thread needs: the code, its words, and the bytes of its workspace."""
        rows, needed = out.shape[0], self.workspace
        if self.tiles:
            tokens, shared, scratch = self.tiles
            needed += -(-rows // tokens) * (shared + scratch)
        return self._kernel, self._kernel.words(operands, out), needed

    def bound(self, words: Sequence[int]) -> Callable[..., None]:
        """Returns a function of the words that follow these ones; see `Kernel.bound`."""
        return self._kernel.bound(words)

    def into(self, outputs: Sequence[torch.Tensor], operands: _Operands) -> None:
        """Computes all results of a region, which may have several."""
        self._kernel.run(operands, outputs if len(outputs) > 1 else outputs[0])


def made(note: Note, entry: disk_cache.Entry) -> RegionKernel:
    """Returns the kernel of new code, and writes the code to the disk. Raises CompileError if the code cannot be loaded."""
    kernel = RegionKernel(note, entry)
    disk_cache.write(note.key, entry)
    return _by_key.setdefault(note.key, kernel)


def find(note: Note) -> RegionKernel | None:
    """Returns the kernel of a note if this process has it or its code is on disk, else None."""
    with _lock:
        return _by_key.get(note.key) or _from_disk(note)


def recall_region(request: str, target: Target | None = None) -> RegionKernel | None:
    """Returns the kernel that `compile_region` made for the same request before; None unless code and plan are still on disk.

    `request` is any text that determines the contract IR and the schedule.
    """
    note = Note.read(full(request, target or host()))
    return None if note is None else find(note)


def full(request: str, target: Target) -> str:
    """Returns the request, followed by everything else that its kernel depends on."""
    return f"{request}\n{target}\n{first_level_bytes()}\n{compiler()}"


def _recalled(note: Note) -> RegionKernel:
    """Returns the kernel of a note. Unpickling a `RegionKernel` calls this function."""
    kernel = find(note)
    if kernel is None:
        raise CompileError(f"the code of kernel {note.key} is not in the cache on disk any more")
    return kernel


def _from_disk(note: Note) -> RegionKernel | None:
    """Returns the kernel whose code is on disk; None if no code is there, or it cannot be loaded."""
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
    """Returns Python code for the words of a call, in terms of operands `o` and output (or outputs) `out`.

    o[0].data_ptr(), o[0].shape[0], *o[1].words, o[2].data_ptr(), out.data_ptr(), out.shape[0]

    A sparse operand has the words of its arrays. If its shape is open, the sizes of its levels follow.
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
