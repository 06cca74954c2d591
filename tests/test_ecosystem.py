"""docs/ecosystem.md, docs/hugging_face.md: blocks run as they stand, where packages are installed, and compile something."""

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo import config
from torch.torch_version import TorchVersion

from gossamer.backend.report.report import collect

PAGE = "\n".join((Path(__file__).parent.parent / "docs" / name).read_text() for name in ("ecosystem.md", "hugging_face.md"))
BLOCKS = re.findall(r"^## ([^\n]+)|^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def blocks() -> Iterator[object]:
    """Each block, named by its heading and its number."""
    heading = ""
    for number, (new, block) in enumerate(BLOCKS):
        heading = new or heading
        if block:
            yield pytest.param(block, id=f"{heading}-{number}")


def missing(block: str) -> list[str]:
    """The packages that it imports and that are not here."""
    nodes = list(ast.walk(ast.parse(block)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return [name for name in names if importlib.util.find_spec(name.split(".")[0]) is None]


@pytest.fixture(autouse=True)
def settings_of_today() -> Iterator[None]:
    torch._dynamo.reset()
    if "accelerate" in sys.modules:  # it keeps the backend of an earlier test
        sys.modules["accelerate"].state.AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    kept = {name: getattr(config, name) for name in ("allow_rnn", "capture_dynamic_output_shape_ops")}
    with config.patch(kept):
        yield
    torch._dynamo.reset()
    for module in filter(None, list(sys.modules.values())):  # where Dynamo leaves some of the functions that it has compiled
        for name in [name for name in vars(module) if name.startswith("__compiled_fn")]:
            delattr(module, name)


@pytest.mark.parametrize("block", list(blocks()))
def test_a_block_runs_and_is_sparse(block: str) -> None:
    if absent := missing(block):
        pytest.skip(f"not installed: {', '.join(absent)}")
    if "model.generate(" in block and TorchVersion(torch.__version__) < "2.12":
        pytest.skip("this Inductor writes C++ for the lengths of a prompt that does not compile, dense models included")
    with collect() as collected:
        exec(compile(block, "docs", "exec"), {"__name__": "ecosystem"})
    assert any(decision.sparse for decision in collected.decisions), collected.decisions
