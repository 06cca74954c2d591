"""The bundle for machines with a GPU: it is whole, and runs without a compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.bundle import contract, open_contract, write
from benchmarks.gpu.cases import Layer, checked, layers, timed
from benchmarks.gpu.open_products import CHECKED, PRODUCTS, OpenProduct
from benchmarks.gpu.run import main
from gossamer.passes import gpu_pipelines, pipelines
from gossamer.runtime.ptx import Architecture

FEW = [
    Layer("gpu-kblock", 33, 129, "f32", ("bias", "gelu")),
    Layer("gpu-blocks", 64, 72, "bf16", ("bias", "relu", "residual"), 32),
    Layer("gpu-twofour", 40, 72, "f16", two_four=True),
    Layer("gpu-expand", 40, 72, "bf16"),
    Layer("gpu-deltas", 40, 70, "f16", planned=0.5),
    Layer("gpu-vnm", 40, 72, "bf16", vnm=(64, 2, 8)),
    Layer("gpu-quads", 40, 70, "i8", ("step", "scale", "bias", "gelu")),
]
PACKED = PRODUCTS[::3]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "bundle"
    write(folder, FEW, PACKED, Architecture(90))
    return folder


def test_a_dry_run(bundle: Path) -> None:
    command = [sys.executable, str(bundle / "run.py"), "--dry-run"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=bundle.parent)
    assert result.returncode == 0, result.stderr
    assert "gpu-kblock-33x129-f32-bias-gelu: 3 kernels, region_t32 for 4096 rows" in result.stdout
    count = len(FEW) + len(PACKED)
    assert f"{count} layers and products for sm_90: the bundle is whole. Nothing ran on a GPU." in result.stdout


def test_it_needs_python_numpy_and_torch_only(bundle: Path) -> None:
    script = (
        "import sys\n"
        "sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in repr(finder).lower()]\n"  # of this repository
        "sys.modules.update(dict.fromkeys(('torch_mlir', 'llvmlite')))\n"
        f"sys.path.insert(0, {str(bundle)!r})\n"
        "import benchmarks.gpu.run, gossamer; print(gossamer.__file__)"
    )
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=bundle.parent, env=environment)
    assert Path(result.stdout.strip()).parents[1] == bundle


def test_a_damaged_file_is_noticed(bundle: Path) -> None:
    file = bundle / "kernels" / f"{FEW[0].name}.ptx"
    text = file.read_text()
    try:
        file.write_text(text.replace("fma.rn.f32", "mul.rn.f32", 1))
        with pytest.raises(ValueError, match="is not the file that was packed"):
            main(bundle, ["--dry-run"])
    finally:
        file.write_text(text)


def test_without_a_gpu_it_says_so(bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(bundle, []) == 2
    assert "--dry-run needs none" in capsys.readouterr().err


def test_the_manifest_can_be_read(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert [Layer.from_json(entry["layer"]) for entry in manifest["kernels"]] == FEW
    assert [OpenProduct.from_json(entry["product"]) for entry in manifest["products"]] == PACKED


def test_every_layer_has_a_name_of_its_own_and_a_schedule() -> None:
    found = layers()
    assert len({layer.name for layer in found}) == len(found)
    assert {layer for layer, _ in checked()} | {timing.layer for timing in timed()} == set(found)
    for layer in found[:: len(found) // 8]:
        assert '"kernel.spmm"' in pipelines.plan(contract(layer), layer.schedule, gpu_pipelines.WARP_BITS).text


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.name)
def test_products_have_a_contract_and_operands_that_fit(product: OpenProduct) -> None:
    plan = pipelines.plan(open_contract(product), product.schedule, gpu_pipelines.WARP_BITS)
    assert '"kernel.' in plan.text
    for shape in CHECKED:
        positions, columns = shape.coordinates(torch.device("cpu"))
        rows = torch.arange(shape.rows).repeat_interleave(positions.diff())
        a = torch.zeros(shape.rows, shape.columns).double()
        a[rows, columns] = 1.0
        dense = [t.double() for t in product.dense(a, shape.width)]
        assert product.reference(a, (rows, columns), dense).shape == product.size(shape.rows, shape.width, len(columns))
