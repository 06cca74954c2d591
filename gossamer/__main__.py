"""python -m gossamer: the doctor. It prints what is installed and where it runs, and tests that it works.

    python -m gossamer                  takes some seconds; paste its output into a bug report
    python -m gossamer --no-self-test   without the test

The test compiles a small pruned model without the cache. It checks that both layers become sparse, and that the results are
those of the dense model. Exit status: 0, 1 if something is wrong, 2 for a wrong command line.
"""

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

import gossamer
from gossamer.dialects.command_line import ends_with_its_reader
from gossamer.dialects.settings import CACHE_DIR, SETTINGS

_CLOSE = 1e-4
"""Largest difference of the self-test's results, as a share of the largest result."""


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line for each fact and returns the exit status. `argv` defaults to the command line."""
    parser = argparse.ArgumentParser("python -m gossamer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-self-test", action="store_true", help="only print the facts")
    facts = FACTS if parser.parse_args(argv).no_self_test else {**FACTS, "self-test": self_test}
    width, status = max(len(name) for name in (*facts, *(each.name for each in SETTINGS))) + 2, 0
    for name, fact in facts.items():
        try:
            text = fact()
        except Exception as problem:  # one thing that is broken must not hide the others
            text, status = f"FAILED, {type(problem).__name__}: {problem}", 1
        print(f"{name:{width}}{text}", flush=True)
        if name == "cache":
            for each in SETTINGS:
                print(f"{each.name:{width}}{'not set' if each.text is None else repr(each.text)} ({each.means})")
    return status


def self_test() -> str:
    """Compiles a small pruned model without the cache. Returns a line for the user, or raises GossamerError."""
    from gossamer.backend.report.report import collect
    from gossamer.dialects.errors import GossamerError
    from gossamer.runtime.torch_internals import known_off

    start = time.perf_counter()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).eval(), torch.randn(32, 256)
    with torch.no_grad(), CACHE_DIR.set_to(""), collect() as found:
        for layer in (model[0], model[2]):
            weight: torch.Tensor = layer.weight  # type: ignore[assignment]
            weight[weight.abs() < weight.abs().quantile(0.9)] = 0
        compiled = torch.compile(model, backend="sparse", fullgraph=True, options={"min_gain": 0, "strict": True})
        result, expected = compiled(x), model(x)
    seconds = time.perf_counter() - start
    refused = [str(decision) for decision in found.decisions if not decision.sparse]
    difference = float((result - expected).abs().max() / expected.abs().max())
    if refused or len(found.decisions) != 2:
        raise GossamerError(
            f"a small pruned model did not become sparse ({'; '.join(refused) or 'no weight was found'}): "
            "please report this output"
        )
    if not difference <= _CLOSE:
        raise GossamerError(
            f"results of sparse and dense layers differ by {difference:.1e} of the largest result: please report this output"
        )
    schedule = ", ".join(sorted({str(decision.schedule) for decision in found.decisions}))
    off = "".join(f"\n  {sentence}" for sentence in known_off())
    return f"passed in {seconds:.1f} s: 2 sparse layers ({schedule}), largest relative difference {difference:.1e}{off}"


def _versions() -> str:
    return f"torch-mlir {version('torch-mlir')}, llvmlite {version('llvmlite')}"


def _cpp_compiler() -> str:
    from gossamer.backend.dense import has_cpp_compiler
    from gossamer.runtime.torch_internals import get_cpp_compiler

    return str(get_cpp_compiler()) if has_cpp_compiler() else "none found, so dense parts of a model run uncompiled"


def _cpu() -> str:
    from gossamer.backend.devices.identity import cpu_name
    from gossamer.runtime.data_cache import first_level_bytes
    from gossamer.runtime.target import host

    return f"{cpu_name()} ({host().cpu}), first-level data cache {first_level_bytes() >> 10} KB"


def _vectors() -> str:
    from gossamer.runtime.target import host

    return ", ".join([f"{host().vector_bits} bits", *sorted(host().instructions)])


def _calibrated() -> str:
    from gossamer.backend.devices.calibrated import this_machine

    return ", ".join(sorted(this_machine().measured)) or "no, so times are predicted as for a usual server"


def _cache() -> str:
    from gossamer.runtime import cache_files

    base = cache_files.directory()
    if base is None:
        return "off"
    sizes = []
    for path in base.iterdir():
        with suppress(FileNotFoundError):  # another process has removed it
            sizes.append(path.lstat().st_size)
    return f"{base}, {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB"


FACTS: dict[str, Callable[[], str]] = {
    "gossamer": lambda: f"{gossamer.__version__}, in {Path(gossamer.__file__).parent}",
    "Python": lambda: f"{platform.python_version()}, {platform.platform()}",
    "torch": lambda: f"{torch.__version__}, {torch.get_num_threads()} threads",
    "compilers": _versions,
    "C++ compiler": _cpp_compiler,
    "CPU": _cpu,
    "vectors": _vectors,
    "GPU": lambda: torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    "calibrated": _calibrated,
    "cache": _cache,
}
"""The functions that make the printed lines. Each imports its own modules, so a broken module does not hide other lines."""


if __name__ == "__main__":
    raise SystemExit(main())
