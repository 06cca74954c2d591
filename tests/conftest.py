"""For all tests: one temporary cache on disk for the whole run, and the machine that `--machine` names instead of this one."""

import gc
import logging
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.machines import MACHINES, pretend

_CACHE = "GOSSAMER_CACHE_DIR"
_CALIBRATE = "GOSSAMER_CALIBRATE"
_VECTORS = "TORCHINDUCTOR_VEC_ISA_OK"


settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--machine", choices=[*MACHINES], help="pretend to be another machine (tests/machines.py)")


def pytest_collection_finish() -> None:
    """What is loaded by now stays loaded: the garbage collector, whom tracing keeps busy, need not walk through it."""
    gc.collect()
    gc.freeze()
    # pytest listens to every logger that does not propagate, and for whoever listens to this one torch prints all its graphs.
    trace = logging.getLogger("torch.__trace")
    trace.handlers.clear()
    trace.propagate = True


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are collected, which already ask what this machine can do. Processes that share the work share the cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv(_CALIBRATE, "0")
    # Or each process in which Inductor compiles takes seconds to make sure that the CPU and g++ are not mistaken about vectors.
    patch.setenv(_VECTORS, "1")
    patch.setattr("torch._inductor.config.cpp.vec_isa_ok", True)
    config.add_cleanup(patch.undo)
    if not hasattr(config, "workerinput"):
        cache = tempfile.TemporaryDirectory(prefix="gossamer-tests-")
        patch = pytest.MonkeyPatch()
        patch.setenv(_CACHE, cache.name)
        config.add_cleanup(cache.cleanup)
        config.add_cleanup(patch.undo)
    if name := config.getoption("--machine"):
        patch = pytest.MonkeyPatch()
        pretend(MACHINES[name], Path(tempfile.mkdtemp(dir=os.environ[_CACHE])), patch.setattr)
        config.add_cleanup(patch.undo)
