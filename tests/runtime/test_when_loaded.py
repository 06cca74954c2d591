"""Who computes without torch.compile loads neither Dynamo nor Inductor; who compiles later has all that waits for them."""

import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.runtime.modules.when_loaded import when_loaded

EAGER = """
import sys
import torch
import gossamer
a = gossamer.SparseTensor.from_dense(torch.eye(16))
x = torch.randn(16, 4)
y = gossamer.einsum("ij,jk->ik", a, x)[:5] + (a @ x)[:5]
assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
compiled = torch.compile(lambda a: gossamer.einsum("ij,jk->ik", a, x)[:5] + (a[:5] @ x), backend="eager", fullgraph=True)
assert torch.equal(compiled(a), y)
from torch._dynamo.variables.tensor import TensorVariable
assert hasattr(TensorVariable.method_add_, "__wrapped__")
"""


def test_eager_operations_need_no_dynamo_and_are_traced_later() -> None:
    done = subprocess.run([sys.executable, "-c", EAGER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_waits_is_done_once_the_module_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waited_for.py").write_text("value = [1]")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    when_loaded("waited_for", lambda: seen.append(list(sys.modules["waited_for"].value)))
    when_loaded("waited_for", lambda: sys.modules["waited_for"].value.append(2))
    assert not seen
    import waited_for  # type: ignore[import-not-found]

    assert seen == [[1]] and waited_for.value == [1, 2]
    when_loaded("waited_for", lambda: seen.append("now"))
    assert seen[1:] == ["now"]
    del sys.modules["waited_for"]


def test_a_module_that_is_being_loaded_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own imports may lead to what waits for it, as that of torch leads to our registration."""
    (tmp_path / "slow_to_load.py").write_text("import leads_here\nvalue = 1\n")
    (tmp_path / "leads_here.py").write_text(
        "from gossamer.runtime.modules.when_loaded import when_loaded\n"
        "import sys\nseen = []\n"
        'when_loaded("slow_to_load", lambda: seen.append(sys.modules["slow_to_load"].value))\n'
    )
    (tmp_path / "loaded_next.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    import leads_here  # type: ignore[import-not-found]
    import slow_to_load  # type: ignore[import-not-found]

    del sys.modules["leads_here"], sys.modules["slow_to_load"], leads_here
    import slow_to_load  # noqa: F811, F401

    seen = sys.modules["leads_here"].seen
    assert seen == []
    import loaded_next  # type: ignore[import-not-found]  # noqa: F401

    assert seen == [1]


def test_a_module_that_is_not_there_is_an_import_error_as_ever() -> None:
    when_loaded("waited_for_in_vain", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="waited_for_in_vain"):
        import waited_for_in_vain  # type: ignore[import-not-found]  # noqa: F401
