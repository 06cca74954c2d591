"""The bundle for machines with a GPU: it is whole, and runs without a compiler."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.bundle import contract, write
from benchmarks.gpu.cases import Layer, checked, layers, timed
from gossamer.passes import gpu_pipelines, pipelines
from gossamer.runtime.ptx import Architecture

FEW = [
    Layer("gpu-kblock", 33, 129, "f32", ("bias", "gelu")),
    Layer("gpu-blocks", 64, 72, "bf16", ("bias", "relu", "residual"), 32),
    Layer("gpu-twofour", 40, 72, "f16", two_four=True),
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "bundle"
    write(folder, FEW, Architecture(90))
    return folder


def run(bundle: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(bundle / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=bundle.parent)


def test_a_dry_run(bundle: Path) -> None:
    result = run(bundle, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "gpu-kblock-33x129-f32-bias-gelu: 3 kernels, region_t32 for 4096 tokens" in result.stdout
    assert "3 layers for sm_90: the bundle is whole. Nothing ran on a GPU." in result.stdout


def test_it_needs_python_numpy_and_torch_only(bundle: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(bundle)!r}); sys.modules.update(dict.fromkeys(('torch_mlir', 'llvmlite')))\n"
        "import benchmarks.gpu.run, gossamer; print(gossamer.__file__)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert Path(result.stdout.strip()).parents[1] == bundle


def test_a_damaged_file_is_noticed(bundle: Path, tmp_path: Path) -> None:
    file = bundle / "kernels" / f"{FEW[0].name}.ptx"
    text = file.read_text()
    try:
        file.write_text(text.replace("fma.rn.f32", "mul.rn.f32", 1))
        result = run(bundle, "--dry-run")
    finally:
        file.write_text(text)
    assert result.returncode == 1 and "is not the file that was packed" in result.stderr


def test_without_a_gpu_it_says_so(bundle: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = run(bundle)
    assert result.returncode == 2 and "--dry-run needs none" in result.stderr


def test_the_manifest_can_be_read(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert [Layer.from_json(entry["layer"]) for entry in manifest["kernels"]] == FEW


def test_every_layer_has_a_name_of_its_own_and_a_schedule() -> None:
    found = layers()
    assert len({layer.name for layer in found}) == len(found)
    assert {layer for layer, _ in checked()} | {timing.layer for timing in timed()} == set(found)
    for layer in found[:: len(found) // 8]:
        assert '"kernel.spmm"' in pipelines.plan(contract(layer), layer.schedule, gpu_pipelines.WARP_BITS).text
