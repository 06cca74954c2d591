"""From contract IR to results through the compiler, the cache, the packer and the launcher; the GPU is the emulator."""

import pytest
import torch

from gossamer.runtime.gpu_kernel import GpuKernel
from gossamer.runtime.packing import pack
from gossamer.runtime.ptx import Architecture
from gossamer.sparsity.compiler.gpu_kernels import compile_gpu_region
from tests.contracts import Region, assert_near
from tests.gpu.emulated_driver import EmulatedDriver


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize(
    ("schedule", "region"),
    [
        ("gpu-kblock", Region(70, 136, "f32", ("bias", "gelu", "residual"))),
        ("gpu-gather", Region(70, 136, "f32", ("bias", "gelu", "residual"))),
        ("gpu-blocks", Region(70, 136, "bf16", ("bias", "relu", "residual"), block=(32, 32))),
        ("gpu-deltas", Region(70, 136, "bf16", ("bias", "relu", "residual"))),
        ("gpu-expand", Region(70, 136, "bf16", ("bias", "relu", "residual"))),
    ],
)
def test_the_words_of_a_call_run_the_emulated_kernel(schedule: str, region: Region, tokens: int) -> None:
    torch.manual_seed(0)
    kernel = compile_gpu_region(region.text(), Architecture(90), schedule=schedule)
    x, w, extras = region.operands(tokens)
    (stored,) = (format for format in kernel.formats if format is not None)
    tensors = [x, *pack(w, stored).components, *extras, torch.full((tokens, region.m), float("nan"), dtype=region.dtype)]
    words = kernel.words(tensors)
    emulated = EmulatedDriver(tensors)
    GpuKernel(kernel.ptx, kernel.launches, len(words), emulated.open).run(words, tokens, 0, 0)
    assert emulated.fault is None
    assert_near(tensors[-1], region.reference(x, w, extras))
