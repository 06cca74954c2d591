"""python -m benchmarks.spread: how differently fast a compiled layer is from process to process, the same code each time.

    PROCESSES TOKENS...     20 128 1024 by default; a record `spread` of this machine is written

Where weights, x, results and workspace lie is chance, and one choice lasts as long as a process does. Timed is the layer as a
user calls it, one thread, 768 x 3072, 90 % zeros: the median of its calls in a third of a second, in each process. Processes
run one after the other, one more before them fills the caches on disk.
"""

import json
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.machine import machine, record, versions
from gossamer.dialects.command_line import ends_with_its_reader

FEATURES, SPARSITY, SECONDS = (768, 3072), 0.9, 0.3


@ends_with_its_reader
def main(arguments: list[str]) -> None:
    """Runs the processes and prints, for each number of tokens, the medians and their spread."""
    count, *tokens = [int(each) for each in arguments] or [20, 128, 1024]
    found = [json.loads(begun(*map(str, tokens))) for _ in range(1 + count)][1:]
    cases = []
    for number, each in enumerate(tokens):
        medians = [process[number] for process in found]
        cases.append({"tokens": each, "median_ms": medians, "spread": spread(medians)})
        print(f"T = {each}: {min(medians):.3f} to {max(medians):.3f} ms, spread {spread(medians):.1%}")
    settings = {"features": FEATURES, "sparsity": SPARSITY, "threads": 1, "processes": count}
    report = {"machine": machine(), "versions": versions(), "settings": settings, "cases": cases}
    record("spread").write_text(json.dumps(report, indent=1) + "\n")


def spread(medians: list[float]) -> float:
    """How far the slowest process is from the fastest one, as a share of the median one."""
    return (max(medians) - min(medians)) / statistics.median(medians)


def begun(*tokens: str) -> str:
    """What a process prints that measures."""
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "process", *tokens]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def measured(tokens: int) -> float:
    """The median milliseconds of a call in this process."""
    import torch

    from benchmarks.workloads import linear

    problem = linear.build(FEATURES, "unstructured", SPARSITY, tokens)
    compiled: Any = torch.compile(problem.model, backend="sparse")
    (x,), times = problem.inputs, []
    with torch.no_grad():
        for _ in range(5):
            compiled(x)
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            start = time.perf_counter()
            compiled(x)
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


if __name__ == "__main__":
    if sys.argv[1:2] == ["process"]:
        import torch

        torch.set_num_threads(1)
        print(json.dumps([measured(int(each)) for each in sys.argv[2:]]))
    else:
        main(sys.argv[1:])
