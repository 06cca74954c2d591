"""All that is worth knowing of a GPU, in order of worth, within minutes: `bash run_all.sh` in the travel folder.

    bash run_all.sh --dry-run        print the plan; start nothing
    bash run_all.sh --rehearse       without a GPU: each step does what needs none
    bash run_all.sh --out FOLDER     where results go: $OUT if it is set, else results/ here

Every step has a time limit and writes its results line by line, so a step that is cut leaves what it has done. plan.json says
how each step ended. This file needs nothing but Python: what the steps need is in the archives beside it.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
UNPACKED = Path(os.environ.get("GOSSAMER_TRAVEL_ROOM", "/tmp/gossamer-travel"))
REHEARSED = 10  # times as long as on a GPU a step may take without one
OUT = "{out}"  # in commands: the folder of the results


@dataclass(frozen=True)
class Step:
    """A command and how many seconds it may take. `alone`: what it runs where there is no GPU; nothing if empty."""

    name: str
    seconds: int
    command: tuple[str, ...]
    alone: tuple[str, ...] = ()
    tool: str = ""  # a program that must be on the path


PATH = "site", "torch_mlir"
RUN, END = "bundle/run.py", "site/benchmarks/gpu/end_to_end.py"
STEPS = (
    Step(
        "checks", 60,
        (RUN, "--only", "checks", "--out", f"{OUT}/checks.jsonl"),
        (RUN, "--dry-run"),
    ),
    Step(
        "sanitizer", 60,
        (RUN, "--sanitize", "--out", f"{OUT}/sanitizer.jsonl"),
        tool="compute-sanitizer",
    ),
    Step(
        "end to end", 130,
        (END, "--out", f"{OUT}/end_to_end.jsonl"),
        (END, "--device", "cpu", "--few", "--out", f"{OUT}/end_to_end.jsonl"),
    ),
    Step(
        "timings", 190,
        (RUN, "--only", "timings", "--seconds", "180", "--out", f"{OUT}/timings.jsonl"),
    ),
    Step(
        "fit", 20,
        ("site/benchmarks/gpu/fit.py", f"{OUT}/timings.jsonl", "--out", f"{OUT}/fit.json"),
        ("site/benchmarks/gpu/fit.py", "--help"),
    ),
    Step(
        "counters", 60,
        ("ncu", "--clock-control", "none", "--csv", "--set", "basic", "--kernel-name", "regex:^region",
         "--log-file", f"{OUT}/counters.csv", sys.executable, RUN, "--profile"),
        tool="ncu",
    ),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 if a step failed or was cut."""
    parser = argparse.ArgumentParser(description="Check and time Gossamer's kernels on a GPU, within minutes.")
    parser.add_argument("--dry-run", action="store_true", help="print the plan")
    parser.add_argument("--rehearse", action="store_true", help="run what needs no GPU")
    parser.add_argument("--only", help="names of steps, by commas")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", HERE / "results")))
    options = parser.parse_args(argv)
    wanted = options.only.split(",") if options.only else [step.name for step in STEPS]
    if unknown := set(wanted) - {step.name for step in STEPS}:
        parser.error(f"no step is called {', '.join(sorted(unknown))}; there are {', '.join(step.name for step in STEPS)}")
    steps = [step for step in STEPS if step.name in wanted]
    if options.dry_run:
        for step in steps:
            print(f"{step.seconds:4} s  {step.name:11} {' '.join(step.alone if options.rehearse else step.command)}")
        print(f"{sum(step.seconds for step in steps):4} s  at most, and some ten to unpack")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    unpack()
    ended = [{"step": "unpack", "status": "done", "seconds": time.monotonic() - start}]
    print(json.dumps(machine()), flush=True)
    for step in steps:
        if options.rehearse:
            step = replace(step, seconds=REHEARSED * step.seconds, command=step.alone)
        ended.append(run(step, options.out.resolve()))
        print(json.dumps(ended[-1]), flush=True)
        (options.out / "plan.json").write_text(json.dumps({"machine": machine(), "steps": ended}, indent=1) + "\n")
    return int(any(each["status"] not in ("done", "skipped") for each in ended))


def unpack() -> None:
    """The archives, into a folder with room, unless it has them: `site` has gossamer, `bundle` compiled kernels."""
    for file in sorted(HERE.glob("*.tar.xz")):
        name = re.split("[-.]", file.name)[0]
        seal, digest = UNPACKED / f"{name}.sha256", hashlib.sha256(file.read_bytes()).hexdigest()
        if seal.is_file() and seal.read_text() == digest:
            continue
        shutil.rmtree(UNPACKED / name, ignore_errors=True)
        with tarfile.open(file) as archive:
            archive.extractall(UNPACKED, filter="data")
        seal.write_text(digest)


def run(step: Step, out: Path) -> dict[str, object]:
    """How a step ended: "done", "failed" with its exit status, "cut" at its limit, or "skipped" with the reason."""
    record: dict[str, object] = {"step": step.name, "limit": step.seconds}
    if not step.command:
        return record | {"status": "skipped", "reason": "it needs a GPU"}
    if step.tool and shutil.which(step.tool) is None:
        return record | {"status": "skipped", "reason": f"there is no {step.tool}"}
    words = [word.replace(OUT, str(out)) for word in step.command]
    words = [sys.executable, *words] if words[0].endswith(".py") else words
    cache = {"GOSSAMER_CACHE_DIR": str(UNPACKED / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(UNPACKED / "inductor")}
    path = os.pathsep.join(filter(None, (*(str(UNPACKED / name) for name in PATH), os.environ.get("PYTHONPATH"))))
    start = time.monotonic()
    with (out / "log.txt").open("a") as log:
        log.write(f"\n== {step.name}: {' '.join(words)}\n")
        log.flush()
        process = subprocess.Popen(
            words, cwd=UNPACKED, env={**os.environ, **cache, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(step.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return record | {"status": "cut", "seconds": time.monotonic() - start}
    return record | {"status": "failed" if status else "done", "exit": status, "seconds": time.monotonic() - start}


def machine() -> dict[str, object]:
    """What is here of what the steps need."""
    packages = ("torch", "triton", "llvmlite", "numpy", "transformers", "torch_geometric")
    here = {name: _version(name) for name in packages}
    tools = {name: shutil.which(name) is not None for name in ("compute-sanitizer", "ncu", "nvcc", "g++", "nvidia-smi")}
    return {"python": sys.version.split()[0], "packages": here, "tools": tools}


def _version(name: str) -> str | None:
    try:
        return version(name) if importlib.util.find_spec(name) else None
    except PackageNotFoundError:
        return "?"


if __name__ == "__main__":
    sys.exit(main())
