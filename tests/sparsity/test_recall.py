"""A process finds the kernel of a region that another has compiled, without planning it."""

from pathlib import Path

import pytest
import torch

from gossamer.dialects.format import Format
from gossamer.dialects.packing import Padded
from gossamer.runtime import disk_cache, region_kernel
from gossamer.runtime.packing import pack
from gossamer.runtime.recall import Note
from gossamer.runtime.region_kernel import recall_region
from gossamer.sparsity.compiler import compile_kernel
from gossamer.sparsity.compiler.compile_kernel import compile_region
from tests.contracts import Region

REGION = Region(23, 45, epilogue=("bias",))


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    another_process(monkeypatch)
    return tmp_path


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_kernel, "_by_contract", {})
    monkeypatch.setattr(region_kernel, "_by_key", {})


def test_the_next_process_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_region(REGION.text(), schedule="broadcast", request="a region")
    another_process(monkeypatch)
    monkeypatch.setattr(compile_kernel.pipelines, "plan", lambda *_: pytest.fail("planned again"))
    kernel = recall_region("a region")
    assert kernel is not None and recall_region("a region") is kernel
    assert (kernel.key, kernel.schedule, kernel.formats) == (first.key, first.schedule, first.formats)
    w, bias, x, out = torch.randn(23, 45), torch.randn(23), torch.randn(9, 45), torch.empty(9, 23)
    kernel([x, pack(w, kernel.formats[1]), bias], out)  # type: ignore[arg-type]
    torch.testing.assert_close(out, x @ w.T + bias, rtol=1e-4, atol=1e-4)


def test_nothing_is_recalled_for_another_request_or_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_region(REGION.text(), schedule="broadcast", request="a region")
    assert recall_region("another region") is None
    monkeypatch.setattr(region_kernel, "compiler", lambda: "another compiler")
    assert recall_region("a region") is None


@pytest.mark.parametrize("lost", ["code", "note", "unlinkable"])
def test_what_is_lost_is_compiled_anew(lost: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = compile_region(REGION.text(), schedule="broadcast", request="a region").key
    another_process(monkeypatch)
    if lost == "unlinkable":
        entry = disk_cache.read(key)
        assert entry is not None
        disk_cache.write(key, disk_cache.Entry(b"no object code", entry.call))
    else:
        for path in directory.glob("plan-*" if lost == "note" else f"{key}*"):
            path.unlink()
    assert recall_region("a region") is None
    assert compile_region(REGION.text(), schedule="broadcast", request="a region").key == key
    another_process(monkeypatch)
    assert recall_region("a region") is not None


def test_a_note_comes_back_as_it_was() -> None:
    formats = (None, Format.kblock(64), Padded(1, 48), Format.CSR.with_widths(32, 16))
    note = Note("key", "broadcast", formats, (False, True, False, False), (True, False, False, False))
    note.write("request")
    assert Note.read("request") == note
