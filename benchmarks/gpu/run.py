"""Command line of a bundle: checks, then timings.

python run.py                       checks and timings on cuda:0, to results.jsonl: one record a line, the machine first
python run.py --only checks         or timings; --seconds 180 ends them in time, the rest is left out
python run.py --sanitize            small checks again, under NVIDIA's compute-sanitizer
python run.py --profile             a few calls of each kind of kernel, for `ncu`
python run.py --dry-run             without a GPU: the bundle is whole, weights pack, operands fit
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import open_products
from benchmarks.gpu.checks import check
from benchmarks.gpu.kernels import Bundled, Code, manifest
from benchmarks.gpu.open_products import OpenProduct
from benchmarks.gpu.timings import call_each_kind, elapsed, time_all
from gossamer.dialects.launch import choose
from gossamer.runtime import cuda

_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_MULTIPROCESSORS = 132  # of an H100, for a dry run
_PACKED = 1 << 20  # elements up to which weights are no zeros in a dry run, so that it takes seconds


def main(folder: Path, argv: list[str] | None = None) -> int:
    """Run what the arguments say with the bundle of a folder; returns the exit status, 1 if a check failed."""
    parser = argparse.ArgumentParser(description="Checks and timings of GPU kernels.")
    parser.add_argument("--dry-run", action="store_true", help="look at the bundle, without a GPU")
    parser.add_argument("--only", choices=["checks", "timings"])
    parser.add_argument("--small", action="store_true", help="check small layers only")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing new after so long")
    parser.add_argument("--sanitize", action="store_true", help="run small checks under compute-sanitizer")
    parser.add_argument("--profile", action="store_true", help="call each kind of kernel a few times")
    parser.add_argument("--device", type=int, default=0, help="number of the GPU (default 0)")
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    options = parser.parse_args(argv)
    end = time.monotonic() + options.seconds
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
        return _sanitize(folder, options.out)
    device = torch.device("cuda", options.device)
    torch.cuda.set_device(device)
    if options.profile:
        call_each_kind(kernels, device)
        return 0
    records: list[Iterable[dict[str, Any]]] = [[_machine(device) | {name: entries[name] for name in ("architecture", "made")}]]
    if options.only != "timings":
        records += [check(kernels, device, options.small), open_products.check(products, device, options.small)]
    if options.only != "checks":
        # In turns: if time is short, some of each is timed.
        records.append(_in_turns(time_all(kernels, device), open_products.time_all(products, device)))
    written = _written(chain.from_iterable(records), options.out, end)
    failed = [record for record in written if not record.get("ok", True)]
    print(f"{len(failed)} of {sum('ok' in record for record in written)} checks failed; {options.out}")
    return int(bool(failed))


def _dry_run(kernels: dict[str, Bundled], products: dict[OpenProduct, Code], architecture: str) -> int:
    codes: dict[str, tuple[Code, int]] = {}  # and how many words they are given
    for name, bundled in kernels.items():
        layer, tokens = bundled.layer, 5
        is_small = layer.rows * layer.columns <= _PACKED
        weight = layer.weight(0.1) if is_small else torch.zeros(layer.rows, layer.columns, dtype=layer.given)
        arrays = bundled.packed(weight, torch.device("cpu"))
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


def _sanitize(folder: Path, out: Path) -> int:
    command = [sys.executable, str(folder / "run.py"), "--only", "checks", "--small"]
    status = 0
    for tool in _TOOLS:
        results = ["--out", str(out.with_suffix(f".{tool}{out.suffix}"))]
        found = subprocess.call(["compute-sanitizer", "--tool", tool, "--error-exitcode", "3", *command, *results])
        print(f"{tool}: {'no error' if found == 0 else f'exit status {found}'}", flush=True)
        status = max(status, found)
    return status


def _machine(device: torch.device) -> dict[str, Any]:
    """The GPU as its driver describes it, and how fast it copies."""
    described = cuda.device(device.index or 0)
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {
        "device": described.name,
        "capability": described.capability,
        "multiprocessors": described.multiprocessors,
        "clock_mhz": described.clock_mhz,
        "bytes_a_us": described.bytes_a_us,
        "copied_bytes_a_us": 2 * source.numel() / min(elapsed(lambda: target.copy_(source)) for _ in range(5)),
        "clocks": _clocks(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _clocks() -> str | None:
    """What the driver's own tool says about clocks and power, if it is there."""
    query = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu,driver_version"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _written(records: Iterable[dict[str, Any]], path: Path, end: float) -> list[dict[str, Any]]:
    """The records, each of which is a line of the file as soon as it is there; none after the end."""
    found = []
    with path.open("w") as file:
        for record in records:
            line = json.dumps(record)
            print(line, flush=True)
            print(line, file=file, flush=True)
            found.append(record)
            if time.monotonic() > end:
                break
    return found


def _in_turns(*sources: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A record of each source, then the next of each, until all are empty."""
    waiting = list(sources)
    while waiting:
        for source in list(waiting):
            record = next(source, None)
            if record is None:
                waiting.remove(source)
            else:
                yield record
