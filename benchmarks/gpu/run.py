"""Command line of a bundle: checks, then timings.

python run.py                       checks and timings on cuda:0, to results.json
python run.py --only checks         or timings
python run.py --sanitize            the checks again, under NVIDIA's compute-sanitizer
python run.py --dry-run             without a GPU: the bundle is whole, weights pack, operands fit
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import open_products
from benchmarks.gpu.checks import check
from benchmarks.gpu.kernels import Bundled, Code, manifest
from benchmarks.gpu.open_products import OpenProduct
from benchmarks.gpu.timings import time_all
from gossamer.dialects.launch import choose

_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_MULTIPROCESSORS = 132  # of an H100, for a dry run


def main(folder: Path, argv: list[str] | None = None) -> int:
    """Run what the arguments say with the bundle of a folder; returns the exit status, 1 if a check failed."""
    parser = argparse.ArgumentParser(description="Checks and timings of GPU kernels.")
    parser.add_argument("--dry-run", action="store_true", help="look at the bundle, without a GPU")
    parser.add_argument("--only", choices=["checks", "timings"])
    parser.add_argument("--sanitize", action="store_true", help="run the checks under compute-sanitizer")
    parser.add_argument("--device", type=int, default=0, help="number of the GPU (default 0)")
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    entries = manifest(folder)
    kernels = {entry["name"]: Bundled.read(folder, entry) for entry in entries["kernels"]}
    products = {OpenProduct.from_json(entry["product"]): Code.read(folder, entry) for entry in entries["products"]}
    if options.dry_run:
        return _dry_run(kernels, products, entries["architecture"])
    if not torch.cuda.is_available():
        print("there is no GPU that torch can use; --dry-run needs none", file=sys.stderr)
        return 2
    if options.sanitize:
        return _sanitize(folder)
    device = torch.device("cuda", options.device)
    torch.cuda.set_device(device)
    results: dict[str, Any] = {"machine": _machine(device), "architecture": entries["architecture"], "made": entries["made"]}
    if options.only != "timings":
        results["checks"] = _printed(chain(check(kernels, device), open_products.check(products, device)))
        _write(options.out, results)
    if options.only != "checks":
        results["timings"] = _printed(chain(time_all(kernels, device), open_products.time_all(products, device)))
        _write(options.out, results)
    failed = [record for record in results.get("checks", []) if not record["ok"]]
    print(f"{len(failed)} of {len(results.get('checks', []))} checks failed; {options.out}")
    return int(bool(failed))


def _dry_run(kernels: dict[str, Bundled], products: dict[OpenProduct, Code], architecture: str) -> int:
    codes: dict[str, tuple[Code, int]] = {}  # and how many words they are given
    for name, bundled in kernels.items():
        layer, tokens = bundled.layer, 5
        arrays = bundled.packed(layer.weight(0.1), torch.device("cpu"))
        x, *extras = layer.operands(tokens)
        tensors = [x, *arrays, *extras, torch.empty(tokens, layer.rows, dtype=layer.dtype)]
        codes[name] = bundled.code, len(bundled.code.words(tensors))
    for product, code in products.items():
        # Of arrays an address and a size, of matrices an address and two.
        codes[product.name] = code, {"rows": 3 * 2 + 2 * 3, "dots": 3 * 2 + 2 * 3 + 2, "segments": 3 * 2}[product.schedule]
    for name, (code, words) in codes.items():
        for kernel in code.launches:
            parameters = code.ptx.partition(f".entry {kernel}(")[2].partition(")")[0].count(".param")
            if parameters != words or f".target {architecture}" not in code.ptx:
                print(f"{name}: {kernel} takes {parameters} words, {words} are given", file=sys.stderr)
                return 1
        print(f"{name}: {len(code.launches)} kernels, {choose(code.launches, 4096, _MULTIPROCESSORS)} for 4096 rows")
    print(f"{len(codes)} layers and products for {architecture}: the bundle is whole. Nothing ran on a GPU.")
    return 0


def _sanitize(folder: Path) -> int:
    command = [sys.executable, str(folder / "run.py"), "--only", "checks", "--out", "sanitized.json"]
    return max(subprocess.call(["compute-sanitizer", "--tool", tool, "--error-exitcode", "3", *command]) for tool in _TOOLS)


def _machine(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _printed(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for record in records:
        print(json.dumps(record), flush=True)
        found.append(record)
    return found


def _write(path: Path, results: dict[str, Any]) -> None:
    path.write_text(json.dumps(results, indent=1) + "\n")
