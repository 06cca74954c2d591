"""For all tests: one temporary cache on disk for the whole run, the machine that `--machine` names instead of this one, how
much LLVM optimises (`--llvm-level`; 3 as for users, unless it is given), and which combinations of parameters run (`--thin`).

The cache begins with the machine code of earlier runs in this checkout, unless the compiler's source has changed since: LLVM
takes about half of the time of tests that compile. `pytest --cache-clear` forgets it, and a clean checkout has none.
"""

import gc
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from gossamer.runtime.versions import compiler
from tests.arm64 import emulator
from tests.machines import MACHINES, pretend
from tests.thinned import thinned

_CACHE = "GOSSAMER_CACHE_DIR"
_CALIBRATE = "GOSSAMER_CALIBRATE"
_LEVEL = "GOSSAMER_LLVM_LEVEL"
_VECTORS = "TORCHINDUCTOR_VEC_ISA_OK"


settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--machine", choices=[*MACHINES], help="pretend to be another machine (tests/machines.py)")
    parser.addoption("--thin", action="store_true", help="of many combinations of parameters, run those that cover each value")
    parser.addoption("--llvm-level", choices="0123", help="how much LLVM optimises kernels: 0 compiles fastest (default 3)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--thin` leaves combinations of parameters out. Without an emulator nothing runs as on another architecture."""
    if config.getoption("--thin"):
        kept = thinned(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    name = config.getoption("--machine")
    if name and MACHINES[name].target is not None and (reason := emulator.missing()):
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """What is loaded by now stays loaded: the garbage collector, whom tracing keeps busy, need not walk through it.

    It comes less often, too: tracing makes many objects, which are all in use.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    # pytest listens to every logger that does not propagate, and for whoever listens to this one torch prints all its graphs.
    trace = logging.getLogger("torch.__trace")
    trace.handlers.clear()
    trace.propagate = True


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are collected, which already ask what this machine can do. Processes that share the work share the cache."""
    gc.disable()  # until all is loaded
    patch = pytest.MonkeyPatch()
    patch.setenv(_CALIBRATE, "0")
    if level := config.getoption("--llvm-level"):
        patch.setenv(_LEVEL, level)
    patch.setattr("gossamer.backend.devices.others._STAT", os.devnull)  # nor do other processes change what tests see
    patch.setattr("gossamer.backend.devices.pace.loop_us", lambda: None)
    # Or each process in which Inductor compiles takes seconds to make sure that the CPU and g++ are not mistaken about vectors.
    patch.setenv(_VECTORS, "1")
    patch.setattr("torch._inductor.config.cpp.vec_isa_ok", True)
    # After each compilation Dynamo collects garbage and times its guards on empty caches. Each takes some per cent of all time.
    patch.setattr("torch._dynamo.config.run_gc_after_compile", False)
    patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
    config.add_cleanup(patch.undo)
    if not hasattr(config, "workerinput"):
        cache = tempfile.TemporaryDirectory(prefix="gossamer-tests-")
        patch = pytest.MonkeyPatch()
        patch.setenv(_CACHE, cache.name)
        config.add_cleanup(cache.cleanup)
        _keep_machine_code(config, Path(cache.name))
        config.add_cleanup(patch.undo)
    if (name := config.getoption("--machine")) and (MACHINES[name].target is None or emulator.missing() is None):
        patch = pytest.MonkeyPatch()
        pretend(MACHINES[name], Path(tempfile.mkdtemp(dir=os.environ[_CACHE])), patch.setattr)
        config.add_cleanup(patch.undo)


def _keep_machine_code(config: pytest.Config, cache: Path) -> None:
    """Has the run begin with what earlier ones have left in pytest's own cache, and leave there what it adds."""
    if not hasattr(config, "cache"):
        return
    everything = config.cache.mkdir("machine-code")
    kept = everything / hashlib.sha256(compiler().encode()).hexdigest()[:16]
    for outdated in everything.iterdir():
        if outdated != kept:
            shutil.rmtree(outdated, ignore_errors=True)
    kept.mkdir(exist_ok=True)
    _copy_machine_code(kept, cache)
    config.add_cleanup(lambda: _copy_machine_code(cache, kept))


def _copy_machine_code(source: Path, target: Path) -> None:
    """That alone, with the key it is signed with: whatever else a cache holds is there to be tested."""
    ours, theirs = source / "key", target / "key"
    if not ours.exists() or (theirs.exists() and theirs.read_bytes() != ours.read_bytes()):
        return  # of two first runs at once, that which ends first is kept
    for path in (ours, *source.glob(f"{'[0-9a-f]' * 32}.o")):
        if not (target / path.name).exists():
            shutil.copy2(path, target / f"{path.name}.{os.getpid()}")
            os.replace(target / f"{path.name}.{os.getpid()}", target / path.name)
