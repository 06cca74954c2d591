"""The launcher, against a driver that records what it is called with."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from gossamer.dialects.errors import DeviceError, FormatError, OptionError
from gossamer.dialects.launch import Launch, choose
from gossamer.runtime import cuda, ptx
from gossamer.runtime.gpu_kernel import GpuKernel
from gossamer.runtime.packing import pack
from gossamer.runtime.ptx import Architecture
from gossamer.sparsity.compiler import gpu_kernels
from gossamer.sparsity.compiler.gpu_kernels import compile_gpu_region
from tests.contracts import Region
from tests.gpu.recording_driver import CONTEXT, CUBIN, FUNCTION, MODULE, RecordingDriver

PTX = ".version 8.0\n.target sm_90\n"
WIDE, NARROW = Launch(tokens=128, blocks=24, threads=512, shared=98304), Launch(tokens=32, blocks=96, threads=512, shared=24576)
LAUNCHES = {"wide": WIDE, "narrow": NARROW}


def test_a_launch_passes_grid_block_memory_stream_and_words() -> None:
    recording = RecordingDriver(parameters=3)
    GpuKernel(PTX, LAUNCHES, 3, recording.open).run([1 << 40, -5, 7], tokens=1000, index=0, stream=0x77)
    (call,) = recording.named("cuLaunchKernel")
    assert call[1:8] == (FUNCTION, 8 * 24, 1, 1, 512, 1, 1)
    assert call[8:10] == (98304, 0x77)
    assert recording.launched == [1 << 40, -5, 7]


@pytest.mark.parametrize(("tokens", "name"), [(1, "narrow"), (128, "narrow"), (640, "narrow"), (641, "wide"), (4096, "wide")])
def test_the_widest_tile_that_keeps_the_gpu_busy(tokens: int, name: str) -> None:
    assert choose(LAUNCHES, tokens, 132) == name


def test_where_nothing_keeps_it_busy_the_most_blocks_do() -> None:
    assert choose({"wide": Launch(128, 2, 512, 0), "narrow": Launch(32, 4, 512, 0)}, 40, 132) == "narrow"


def test_no_tokens_no_launch() -> None:
    recording = RecordingDriver()
    GpuKernel(PTX, LAUNCHES, 1, recording.open).run([0], tokens=0, index=0, stream=0)
    assert recording.calls[1:] == []


def test_a_module_is_loaded_once_a_device() -> None:
    recording = RecordingDriver(parameters=1)
    kernel = GpuKernel(PTX, LAUNCHES, 1, recording.open)
    for index in (0, 1, 0, 1):
        kernel.run([0], tokens=4096, index=index, stream=0)
    loads = recording.named("cuModuleLoadData")
    assert [load[2] for load in loads] == [CUBIN + PTX.encode()] * 2
    assert len(recording.named("cuLaunchKernel")) == 4


def test_threads_that_meet_load_it_once_too() -> None:
    recording = RecordingDriver(parameters=1)
    kernel = GpuKernel(PTX, LAUNCHES, 1, recording.open)
    threads = [threading.Thread(target=kernel.run, args=([i], 4096, 0, 0)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recording.named("cuModuleLoadData")) == 1 and len(recording.named("cuLaunchKernel")) == 8


def test_the_device_s_context_is_current_during_a_launch() -> None:
    recording = RecordingDriver(parameters=1)
    kernel = GpuKernel(PTX, LAUNCHES, 1, recording.open)
    kernel.load(1)
    recording.calls.clear()
    kernel.run([0], tokens=1, index=1, stream=0)
    assert [call[0] for call in recording.calls] == [
        "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuLaunchKernel", "cuCtxPopCurrent_v2",
    ]  # fmt: skip
    assert recording.named("cuCtxPushCurrent_v2") == [("cuCtxPushCurrent_v2", CONTEXT + 1)]
    recording.calls.clear()
    recording.current = CONTEXT + 1
    kernel.run([0], tokens=1, index=1, stream=0)
    assert [call[0] for call in recording.calls] == ["cuCtxGetCurrent", "cuLaunchKernel"]


def test_shared_memory_is_asked_for() -> None:
    recording = RecordingDriver(parameters=1)
    GpuKernel(PTX, LAUNCHES, 1, recording.open).load(0)
    asked = [call[1:] for call in recording.named("cuFuncSetAttribute")]
    assert asked == [(FUNCTION, 8, 98304), (FUNCTION, 8, 24576)]
    assert [call[2:] for call in recording.named("cuModuleGetFunction")] == [(MODULE, b"wide"), (MODULE, b"narrow")]


def test_kernels_that_need_more_shared_memory_than_there_is_are_left_out() -> None:
    recording = RecordingDriver(parameters=1)
    recording.attributes[97] = 65536
    kernel = GpuKernel(PTX, LAUNCHES, 1, recording.open)
    kernel.run([0], tokens=4096, index=0, stream=0)
    assert recording.named("cuLaunchKernel")[0][2] == 128 * 96
    recording.attributes[97] = 1024
    with pytest.raises(DeviceError, match=r"needs 24576 bytes of shared memory a block, cuda:0 .* has 1024"):
        GpuKernel(PTX, LAUNCHES, 1, recording.open).load(0)


def test_a_launch_that_fails_says_so() -> None:
    recording = RecordingDriver(parameters=1, cuLaunchKernel=701)
    with pytest.raises(DeviceError, match=r"cuLaunchKernel failed: CUDA_ERROR_701 \(words about 701\)"):
        GpuKernel(PTX, LAUNCHES, 1, recording.open).run([0], tokens=1, index=0, stream=0)
    assert recording.named("cuCtxPopCurrent_v2"), "the context is left as it was"


def test_more_blocks_than_a_gpu_takes() -> None:
    with pytest.raises(DeviceError, match="split the input"):
        WIDE.grid(2**36)


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_LIBRARY", "libno-such-driver.so.1")
    cuda.driver.cache_clear()
    with pytest.raises(DeviceError, match=r"no NVIDIA driver on this machine: libno-such-driver.*Keep the model on the CPU"):
        cuda.device(0)


def test_importing_does_not_look_for_a_driver() -> None:
    script = "import gossamer.runtime.gpu_kernel, gossamer.runtime.cuda as cuda; print(cuda.driver.cache_info().misses)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "0\n"


@pytest.mark.parametrize(
    ("capability", "chosen"), [((8, 0), 80), ((8, 6), 86), ((9, 0), 90), ((10, 0), 100), ((12, 1), 120), ((13, 0), 120)]
)
def test_architectures_of_devices(capability: tuple[int, int], chosen: int) -> None:
    assert Architecture.of_device(*capability).capability == chosen


def test_a_device_too_old() -> None:
    with pytest.raises(OptionError, match=r"has compute capability 7\.5, kernels need 8\.0 or newer"):
        Architecture.of_device(7, 5)


def test_regions_share_kernels_and_find_their_ptx_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gpu_kernels, "_by_contract", {})
    monkeypatch.setattr(gpu_kernels, "_by_key", {})
    first = compile_gpu_region(Region(24, 40, density=0.1).text(), Architecture(90))
    assert compile_gpu_region(Region(24, 40, density=0.2).text(), Architecture(90)) is first
    (file,) = tmp_path.glob("*.o")
    assert file.stem == first.key
    monkeypatch.setattr(gpu_kernels, "_by_contract", {})
    monkeypatch.setattr(gpu_kernels, "_by_key", {})
    monkeypatch.setattr(ptx, "assemble", lambda *_: pytest.fail("compiled again"))
    again = compile_gpu_region(Region(24, 40, density=0.1).text(), Architecture(90))
    assert again is not first and again.ptx == first.ptx and again.launches == first.launches


def test_words_of_a_region() -> None:
    kernel = compile_gpu_region(Region(24, 40, epilogue=("bias",)).text(), Architecture(90))
    x, bias, out = torch.zeros(5, 40), torch.zeros(24), torch.zeros(5, 24)
    arrays = [torch.zeros(25, dtype=torch.int32), torch.zeros(9, dtype=torch.int16), torch.zeros(9)]
    words = kernel.words([x, *arrays, bias, out])
    pointers = [t.data_ptr() for t in (x, *arrays, bias, out)]
    assert words == [pointers[0], 5, pointers[1], 25, pointers[2], 9, pointers[3], 9, pointers[4], pointers[5], 5]


def test_a_call_checks_devices_and_alignment_and_asks_torch_for_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = RecordingDriver(parameters=8)
    monkeypatch.setattr(cuda, "_devices", {1: recording.open(1)})
    monkeypatch.setattr(cuda, "current_stream", lambda index: 100 + index)
    region = Region(24, 40, "f16", ("bias",))
    loaded = compile_gpu_region(region.text(), Architecture(90)).on(torch.device("cpu", 1))
    loaded.device = torch.device("cpu")  # where these tensors are
    (stored,) = (format for format in loaded.formats if format is not None)
    packed, bias, out = pack(region.operands(1)[1], stored), torch.zeros(24).half(), torch.zeros(5, 24).half()
    shifted = torch.zeros(201).half()[1:].view(5, 40)
    loaded([shifted, packed, bias], out)
    (call,) = recording.named("cuLaunchKernel")
    assert call[9] == 101 and recording.launched[0] % 16 == 0 and recording.launched[0] != shifted.data_ptr()
    assert recording.launched[1:4] == [5, *packed.words[:2]]
    with pytest.raises(FormatError, match="a kernel for cpu was given a tensor on meta: move it there"):
        loaded([shifted, packed, bias.to("meta")], out)


def test_an_unknown_schedule_and_architecture() -> None:
    with pytest.raises(OptionError, match=r"unknown schedule 'broadcast' for GPUs, there are gpu-blocks, .*gpu-kblock"):
        compile_gpu_region(Region(24, 40).text(), Architecture(90), schedule="broadcast")
    with pytest.raises(OptionError, match="no PTX is made for compute capability 75, only for 80, 86"):
        Architecture(75)
