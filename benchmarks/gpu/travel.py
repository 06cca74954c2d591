"""Packs all that a machine with a GPU and without package registries needs: `python -m benchmarks.gpu.travel build/gpu-travel`.

    torch_mlir-VERSION.tar.xz    torch-mlir for that machine's Python, with only what we import: packed once, minutes
    site.tar.xz                  gossamer and these benchmarks
    bundle.tar.xz                compiled kernels with their checks and timings (bundle.py)
    run_all.sh                   unpacks them and runs all steps (run_all.py)

There, torch, numpy, scipy and llvmlite must be installed. transformers, torch_geometric and Triton serve more checks.
"""

import argparse
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import distribution, version
from pathlib import Path

import benchmarks
import gossamer
from benchmarks.gpu import bundle
from benchmarks.gpu.cases import layers
from benchmarks.gpu.open_products import PRODUCTS
from gossamer.runtime.ptx import Architecture

_ROOT = Path(benchmarks.__path__[0]).parent
# What gossamer never imports of torch-mlir's wheel.
_LEFT_OUT = ("torch-mlir-opt", "_stablehlo*", "*rocdl*", "*spirv*", "*_acc_ops*", "stablehlo*", "chlo*", "vhlo*", "tools")
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_MOST = 42 << 20
_RUN_ALL = '#!/bin/bash\nexec "${PYTHON:-python3}" "$(dirname "$0")/run_all.py" "$@"\n'


def write(folder: Path, python: str, preset: int, architecture: Architecture) -> None:
    """The travel folder; of one that is there only torch-mlir is kept. `preset`: how hard xz works, 0 to 9."""
    folder.mkdir(parents=True, exist_ok=True)
    mlir = folder / f"torch_mlir-{version('torch-mlir')}-cp{python.replace('.', '')}.tar.xz"
    for path in folder.iterdir():
        if path != mlir:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with tempfile.TemporaryDirectory() as room:
        site, kernels, wheel = (Path(room, name) for name in ("site", "bundle", "torch_mlir"))
        bundle.write(kernels, layers(), PRODUCTS, architecture)
        archive(folder / "bundle.tar.xz", kernels, preset)
        ours(site)
        archive(folder / "site.tar.xz", site, preset)
        if not mlir.exists():
            _torch_mlir(wheel, python)
            archive(Path(room, mlir.name), wheel, preset)
            shutil.move(Path(room, mlir.name), mlir)
    shutil.copy(_ROOT / "benchmarks/gpu/run_all.py", folder)
    (folder / "run_all.sh").write_text(_RUN_ALL)
    (folder / "run_all.sh").chmod(0o755)


def _torch_mlir(site: Path, python: str) -> None:
    """torch-mlir's wheel for a version of Python, without what we do not import, and without symbols for debuggers."""
    with tempfile.TemporaryDirectory() as room:
        platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", room,
             "--implementation", "cp", "--python-version", python, *platforms, f"torch-mlir=={version('torch-mlir')}"],
            check=True,
        )  # fmt: skip
        (wheel,) = Path(room).glob("*.whl")
        shutil.unpack_archive(wheel, site, "zip")
    for pattern in _LEFT_OUT:
        for path in site.glob(f"torch_mlir/**/{pattern}"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    strip = shutil.which("strip")
    for library in site.glob("torch_mlir/_mlir_libs/*.so"):
        library.chmod(0o755)
        if strip:
            subprocess.run([strip, "--strip-unneeded", str(library)], check=True)


def ours(site: Path) -> None:
    """gossamer as if it were installed, and the benchmarks of GPUs."""
    for package in ("gossamer", *(f"gossamer/{room}" for room in ("backend", "sparsity", "passes", "runtime", "dialects"))):
        source = Path(__import__(package.replace("/", "."), fromlist=["_"]).__path__[0])
        shutil.copytree(source, site / package, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    information = site / f"gossamer-{gossamer.__version__}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gossamer\nVersion: {gossamer.__version__}\n")
    (information / "entry_points.txt").write_text(_entry_points())
    (site / "benchmarks").mkdir()
    (site / "benchmarks/__init__.py").touch()
    shutil.copytree(_ROOT / "benchmarks/gpu", site / "benchmarks/gpu", ignore=shutil.ignore_patterns("__pycache__"))


def _entry_points() -> str:
    """By which torch finds the backend, as the installed package declares them."""
    groups = dict[str, list[str]]()
    for point in distribution("gossamer").entry_points:
        if point.group != "console_scripts":
            groups.setdefault(point.group, []).append(f"{point.name} = {point.value}")
    return "\n".join(f"[{group}]\n" + "\n".join(lines) + "\n" for group, lines in groups.items())


def archive(file: Path, folder: Path, preset: int) -> None:
    """A folder as an archive of its own name. Most of it is x86 code, which packs better with relative jumps made absolute."""
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": preset | lzma.PRESET_EXTREME}]
    with lzma.open(file, "w", filters=filters) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, folder.name)


def sizes(folder: Path) -> str:
    """Of the files, as lines. ValueError if they are more than fits beside a checkout."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    total = sum(path.stat().st_size for path in files)
    if total > _MOST:
        raise ValueError(
            f"{folder} has {total / 2**20:.1f} MiB, which is more than {_MOST >> 20}: leave out more of torch-mlir"
        )
    lines = [f"{path.stat().st_size / 2**20:6.1f} MiB  {path.relative_to(folder)}" for path in files]
    return "\n".join([*lines, f"{total / 2**20:6.1f} MiB  in all"])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Pack what a machine with a GPU needs that can fetch nothing.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of that machine's Python (default 3.12)")
    parser.add_argument("--capability", type=int, default=90, help="compute capability of its GPU (default 90)")
    parser.add_argument("--preset", type=int, default=9, help="how hard xz works, 0 to 9 (default 9: minutes)")
    options = parser.parse_args()
    write(options.folder, options.python, options.preset, Architecture(options.capability))
    print(sizes(options.folder))


if __name__ == "__main__":
    main()
