"""How long the first call takes, in a new process: with empty caches (cold) and with those of a run before (warm); and memory.

Each start is a process of its own. Timed is from the call of torch.compile to the first result, so with the imports that
it causes, but without the import of torch and the loading of the model. Gossamer's share of it is found by sampling
the stack: whose code is the innermost that is either Gossamer's or one of torch's compilers'.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from benchmarks.arguments import add_list, shares
from benchmarks.own_process import printed
from benchmarks.registry import Case, Contender, Outcome, Settings, Workload, contender
from benchmarks.workloads import minilm

NAMES = ("inductor", "sparse")
STARTS = 3
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch")
OURS = "gossamer"


def add_arguments(parser: argparse._ActionsContainer) -> None:
    add_list(parser, "--sparsity", shares, ".9", "shares of zeros")
    add_list(parser, "--inputs", minilm.inputs, "1x128", "batch x tokens")


def cases(args: argparse.Namespace) -> list[Case]:
    found = minilm.cases(argparse.Namespace(**vars(args), pattern="unstructured", dtype="f32"))
    return [Case(f"MiniLM {case.name}", case.parameters, case.build) for case in found]


def measure(case: Case, contenders: Mapping[str, Contender], threads: int, settings: Settings) -> dict[str, Outcome]:
    """The medians of a few cold and warm starts."""
    starts: dict[str, list[dict[str, Outcome]]] = {name: [] for name in contenders}
    outcomes: dict[str, Outcome] = {}
    for _ in range(STARTS):
        for name in contenders:
            with tempfile.TemporaryDirectory() as caches:
                try:
                    starts[name].append({kind: start(name, case, threads, Path(caches)) for kind in ("cold", "warm")})
                except RuntimeError as error:
                    outcomes[name] = {"error": str(error)}
    for name in contenders:
        if name not in outcomes:
            outcomes[name] = {"notes": starts[name][0]["warm"].pop("notes")}
            for kind in ("cold", "warm"):
                for key in ("total_s", "own_s"):
                    outcomes[name][f"{kind}_{key}"] = statistics.median(found[kind][key] for found in starts[name])
    return outcomes


def start(name: str, case: Case, threads: int, caches: Path) -> Outcome:
    """What `main` prints, run in a new process whose caches are in a folder; RuntimeError if it fails."""
    arguments = [name, case.parameters["input"], case.parameters["sparsity"], threads]
    return printed(__spec__.name, arguments, caches)


class Sampler:
    """Samples this thread's stack in another one, about every millisecond, and adds up the seconds that are ours."""

    def __init__(self) -> None:
        self.own_s = 0.0
        self._thread = threading.Thread(target=self._run, args=(threading.get_ident(),), daemon=True)
        self._done = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def _run(self, thread: int) -> None:
        last = time.perf_counter()
        while not self._done.wait(1e-3):
            frame, now = sys._current_frames().get(thread), time.perf_counter()
            if owner(frame) == OURS:
                self.own_s += now - last
            last = now


def owner(frame: FrameType | None) -> str | None:
    """Gossamer or one of torch's compilers: who is innermost in the stack."""
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.startswith(OURS):
            return OURS
        if module.startswith(COMPILERS):
            return module
        frame = frame.f_back
    return None


def conclude(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of the starts, and the bytes of the weights."""
    lines = ["| case | who | cold, s | of it Gossamer | warm, s | of it Gossamer |", "| --- | --- | --: | --: | --: | --: |"]
    memory = []
    for case in cases:
        for name, result in case["results"].items():
            if "cold_total_s" in result:
                figures = [result[key] for key in ("cold_total_s", "cold_own_s", "warm_total_s", "warm_own_s")]
                lines.append(f"| {case['name']} | {name} | {' | '.join(f'{figure:.2f}' for figure in figures)} |")
            if packed := result.get("notes", {}).get("packed_bytes"):
                dense = result["notes"]["dense_bytes"]
                memory.append(f"{case['name']}: sparse layers of {dense / 1e6:.1f} MB take {packed / 1e6:.1f} MB packed.")
    return [*lines, "", *memory]


def main(name: str, text: str, sparsity: str, threads: str) -> None:
    """Starts a contender on MiniLM and prints, as JSON, the seconds until its first result."""
    import torch

    problem = minilm.build(text, "unstructured", float(sparsity))
    torch.set_num_threads(int(threads))
    with torch.no_grad(), Sampler() as sampler:
        begin = time.perf_counter()
        prepared = contender(name).prepare(problem)
        prepared.call()
        total = time.perf_counter() - begin
    print(json.dumps({"total_s": total, "own_s": sampler.own_s, "notes": prepared.notes()}))


WORKLOAD = Workload(
    "seconds to the first result of MiniLM, cold and warm, and memory",
    add_arguments,
    cases,
    contenders=lambda: {name: contender(name) for name in NAMES},
    measure=measure,
    conclude=conclude,
)

if __name__ == "__main__":
    main(*sys.argv[1:])
