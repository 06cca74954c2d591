"""Machine code of kernels: linked by the driver once, and found on disk by the next process."""

from pathlib import Path

import pytest

from gossamer.dialects.errors import DeviceError
from gossamer.runtime.cuda_module import Module
from tests.gpu.recording_driver import CUBIN, LINKER, RecordingDriver

PTX = ".version 8.5\n.target sm_90\n"
LINKING = ["cuLinkCreate_v2", "cuLinkAddData_v2", "cuLinkComplete", "cuLinkDestroy"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test."""
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    return tmp_path


def process(
    ptx: str = PTX, version: int = 13000, major: int = 9, kind: type[RecordingDriver] = RecordingDriver, **failures: int
) -> RecordingDriver:
    """What a new process asks of its driver to load some PTX."""
    recording = kind(**failures)
    recording.version, recording.attributes[75] = version, major
    Module(recording.open(0), ptx)
    return recording


def linked(recording: RecordingDriver) -> bool:
    """Whether the driver has linked, and given back what that takes; what was loaded last is the PTX's code."""
    calls = [call[0] for call in recording.named(*LINKING)]
    assert calls in ([], LINKING)
    assert recording.named("cuModuleLoadData")[-1][2] == CUBIN + PTX.encode()
    return bool(calls)


def test_the_first_process_links_and_the_second_loads(cache: Path) -> None:
    assert linked(process())
    (file,) = cache.glob("*.o")
    assert file.name.startswith("cubin-") and file.read_bytes().endswith(CUBIN + PTX.encode())
    assert not linked(process())


def test_machine_code_is_for_a_gpu_and_a_driver() -> None:
    assert [linked(process(version=version, major=major)) for version, major in ((13000, 9), (13010, 9), (13000, 10))] == [
        True
    ] * 3


@pytest.mark.parametrize("damage", [lambda code: code[:-1], lambda code: code + b"!", lambda code: b""])
def test_a_damaged_entry_is_linked_anew(cache: Path, damage: object) -> None:
    process()
    (file,) = cache.glob("*.o")
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    assert linked(process()) and not linked(process())


def test_an_entry_of_other_code_is_not_taken(cache: Path) -> None:
    process()
    (ours,) = cache.glob("*.o")
    process(PTX + "// another")
    (other,) = set(cache.glob("*.o")) - {ours}
    ours.write_bytes(other.read_bytes())
    assert linked(process())


def test_what_the_driver_refuses_is_linked_anew(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(RecordingDriver):
        def _cuModuleLoadData(self, out: object, image: bytes) -> int | None:
            return 209 if not self.named("cuLinkComplete") else super()._cuModuleLoadData(out, image)

    process()
    recording = process(kind=Refusing)
    assert linked(recording) and len(recording.named("cuModuleLoadData")) == 2
    assert "cannot use the code of cubin-" in caplog.text and "CUDA_ERROR_209" in caplog.text


def test_without_a_cache_and_with_one_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.chmod(0o500)
    monkeypatch.setattr("gossamer.runtime.cache_files.replace", lambda *_: (_ for _ in ()).throw(OSError("read-only")))
    assert linked(process()) and linked(process()) and not list(cache.glob("*.o"))
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", "")
    assert linked(process())


@pytest.mark.parametrize("function", ["cuLinkAddData_v2", "cuLinkComplete"])
def test_the_compiler_s_words_are_in_the_error(function: str) -> None:
    recording = RecordingDriver(**{function: 218})
    recording.log = b"ptxas application ptx input, line 9; fatal: Unresolved extern function '__nv_logf'"
    recording.info = b"info: 0 bytes gmem"
    with pytest.raises(DeviceError) as error:
        Module(recording.open(0), PTX)
    assert "the driver (CUDA 99.0) of cuda:0" in str(error.value) and "compute capability 9.0" in str(error.value)
    assert f".version 8.5 .target sm_90: {function.removesuffix('_v2')}: CUDA_ERROR_218 (words about 218)" in str(error.value)
    assert str(error.value).endswith("Unresolved extern function '__nv_logf'\ninfo: 0 bytes gmem")
    assert recording.named("cuLinkDestroy") == [("cuLinkDestroy", LINKER)] and recording.named("cuCtxPopCurrent_v2")


def test_code_that_cannot_be_loaded_even_when_it_is_new() -> None:
    with pytest.raises(DeviceError, match=r"cuModuleLoadData failed: CUDA_ERROR_2 "):
        process(cuModuleLoadData=2)
