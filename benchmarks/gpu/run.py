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
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.checks import check
from benchmarks.gpu.kernels import Bundled, manifest
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
    if options.dry_run:
        return _dry_run(kernels, entries["architecture"])
    if not torch.cuda.is_available():
        print("there is no GPU that torch can use; --dry-run needs none", file=sys.stderr)
        return 2
    if options.sanitize:
        return _sanitize(folder)
    device = torch.device("cuda", options.device)
    torch.cuda.set_device(device)
    results: dict[str, Any] = {"machine": _machine(device), "architecture": entries["architecture"], "made": entries["made"]}
    if options.only != "timings":
        results["checks"] = _printed(check(kernels, device))
        _write(options.out, results)
    if options.only != "checks":
        results["timings"] = _printed(time_all(kernels, device))
        _write(options.out, results)
    failed = [record for record in results.get("checks", []) if not record["ok"]]
    print(f"{len(failed)} of {len(results.get('checks', []))} checks failed; {options.out}")
    return int(bool(failed))


def _dry_run(kernels: dict[str, Bundled], architecture: str) -> int:
    for name, bundled in kernels.items():
        layer, tokens = bundled.layer, 5
        arrays = bundled.packed(layer.weight(0.1), torch.device("cpu"))
        x, *extras = layer.operands(tokens)
        words = bundled.words([x, *arrays, *extras, torch.empty(tokens, layer.rows, dtype=layer.dtype)])
        for kernel in bundled.launches:
            parameters = bundled.ptx.partition(f".entry {kernel}(")[2].partition(")")[0].count(".param")
            if parameters != len(words) or f".target {architecture}" not in bundled.ptx:
                print(f"{name}: {kernel} takes {parameters} words, {len(words)} are given", file=sys.stderr)
                return 1
        chosen = choose(bundled.launches, 4096, _MULTIPROCESSORS)
        print(f"{name}: {len(bundled.launches)} kernels, {chosen} for 4096 tokens")
    print(f"{len(kernels)} layers for {architecture}: the bundle is whole. Nothing ran on a GPU.")
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
