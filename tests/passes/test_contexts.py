"""A thread builds its modules in one context, which is replaced now and then."""

import os
import threading

import pytest
from torch_mlir import ir

from gossamer.passes.framework import context


@pytest.fixture(autouse=True)
def thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_building", threading.local())


def used() -> ir.Context:
    with context.building():
        module = ir.Module.parse("func.func private @f(tensor<3xf32>)")
        assert module.operation.verify()
        return module.context


def test_a_thread_keeps_its_context() -> None:
    others: list[ir.Context] = []
    thread = threading.Thread(target=lambda: others.append(used()))
    thread.start()
    thread.join()
    first = used()
    assert used() == first and others[0] != first


def test_no_context_grows_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_MODULES", 3)
    before = ir.Context._get_live_count()
    found = [used() for _ in range(7)]
    assert [found.index(each) for each in found] == [0, 0, 0, 3, 3, 3, 6]
    found.clear()
    assert ir.Context._get_live_count() <= before + 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked on Unix")
def test_a_forked_process_builds_and_ends() -> None:
    used()
    child = os.fork()
    if child == 0:
        used()
        del context._building.context
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
