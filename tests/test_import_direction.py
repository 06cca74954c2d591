"""The rooms import downwards: gossamer, backend, sparsity, then passes and runtime side by side, dialects; and so do the rooms
in them, from the door of each down to what all of it stands on."""

import ast
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BELOW = {
    "gossamer": {"backend", "sparsity", "passes", "runtime", "dialects"},
    "backend": {"sparsity", "passes", "runtime", "dialects"},
    "sparsity": {"passes", "runtime", "dialects"},
    "passes": {"dialects"},
    "runtime": {"dialects"},
    "dialects": set[str](),
}
INSIDE = {
    "gossamer": ["hub", "torchsparse", "torchsparse/nn", "torchsparse/utils"],
    "backend": [
        "deploy", "structures", "smaller", "weights", "experts", "embeddings", "messages", "operations", "convolution",
        "attention", "edges", "chains", "checking", "measuring", "regions", "profiling", "run", "owners", "graph", "devices",
        "report", "page",
    ],
    "runtime": ["experts", "memory", "modules", "packages", "packers", "watching"],
    "sparsity": [
        "torchsparse", "nn", "checkpoints", "training", "quantization", "pruning", "torch_functions", "tensor",
        "experts", "edges", "attention", "bags", "operations", "arrays", "compiler",
    ],
    "passes": [
        "convolution", "contract", "chains", "attention", "gpu", "points", "experts", "bags", "sparse_rows", "token_sums",
        "sorting",
        "codegen", "schedules", "weights_int8", "weights_bf16", "weights", "loops", "framework",
    ],
}  # fmt: skip
"""The rooms in a room: each may import those after it. The files at the door may import all, and none imports them."""
LARGEST = 31
FILES = sorted(path for room in BELOW for path in (ROOT / room).rglob("*.py"))


def module_name(path: Path) -> str:
    """The import name of a file of ours."""
    room, *rest = path.relative_to(ROOT).with_suffix("").parts
    parts = ["gossamer", *([] if room == "gossamer" else [room]), *rest]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, name: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and absolute name of all that a file imports, inside of functions and `if TYPE_CHECKING` too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".")[: len(name.split(".")) - node.level + is_package] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def room_of(imported: str) -> str | None:
    """The room of an absolute name: the front door for `gossamer.sparse`, None for what is not ours."""
    first, _, rest = imported.partition(".")
    if first != "gossamer":
        return None
    second = rest.partition(".")[0]
    return second if second in BELOW else "gossamer"


def imports_of(path: Path) -> list[tuple[int, str]]:
    return list(imports(path.read_text(encoding="utf-8"), module_name(path), path.name == "__init__.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    upward = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for line, name in imports_of(path)
        if (target := room_of(name)) is not None and target not in {room, *BELOW[room]}
    ]
    assert not upward, f"{room} may import {sorted(BELOW[room]) or 'no other room'}"


def inner_room(room: str, name: str) -> str:
    """The room in `room` of an absolute name, "" for the door."""
    inner = name.removeprefix(f"gossamer.{room}.").partition(".")[0]
    return inner if inner in INSIDE[room] else ""


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.relative_to(ROOT).parts[0] in INSIDE], ids=lambda p: str(p.relative_to(ROOT))
)
def test_imports_go_down_within_a_room(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    order = ["", *INSIDE[room]]
    own = inner_room(room, module_name(path))
    upward = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for line, name in imports_of(path)
        if room_of(name) == room and order.index(inner_room(room, name)) < order.index(own)
    ]
    assert not upward, f"{room}/{own} may import {order[order.index(own) :]}"


def test_no_file_imports_itself_by_way_of_others() -> None:
    files = {module_name(path): path for path in FILES}

    def file_of(name: str) -> str:
        return name if name in files or "." not in name else file_of(name.rpartition(".")[0])

    TopologicalSorter({own: {file_of(name) for _, name in imports_of(path)} - {own} for own, path in files.items()}).prepare()


def test_every_room_is_listed_and_none_is_crowded() -> None:
    folders = {path.parent.relative_to(ROOT) for path in FILES}
    assert {str(f) for f in folders} == {*BELOW, *(f"{room}/{inner}" for room, rooms in INSIDE.items() for inner in rooms)}
    for folder in folders:
        assert len(list((ROOT / folder).glob("*.py"))) <= LARGEST, f"{folder} wants rooms of its own"


def test_the_package_has_every_room() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert set(listed) == {module_name(path) for path in FILES if path.name == "__init__.py"}


@pytest.mark.parametrize("start", ["gossamer.dialects.format", "gossamer.dialects.errors"])
def test_formats_need_neither_torch_nor_mlir(start: str) -> None:
    files = {module_name(path): path for path in FILES}
    reached, waiting = set[str](), [start]
    while waiting:
        name = waiting.pop()
        for _, imported in imports_of(files[name]):
            assert imported.partition(".")[0] not in {"torch", "torch_mlir"}, f"{name} imports {imported}"
            ours = {imported, imported.rpartition(".")[0]} & files.keys() - reached
            waiting += ours
            reached |= ours


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("import gossamer.backend.entry as e", ["backend"]),
        ("from gossamer import runtime, sparse", ["runtime", "gossamer"]),
        ("from gossamer.dialects import format", ["dialects"]),
        ("def f():\n    from gossamer.sparsity.tensor.sparse_tensor import SparseTensor", ["sparsity"]),
        ("from . import jit", ["passes"]),
        ("from .registry import get", ["passes"]),
        ("from ..runtime import jit", ["runtime"]),
        ("from .. import dialects", ["dialects"]),
        ("import torch, gossamers", [None, None]),
    ],
)
def test_every_way_to_import_is_seen(statement: str, found: list[str | None]) -> None:
    assert [room_of(name) for _, name in imports(statement, "gossamer.passes.registry", False)] == found


def test_relative_imports_of_a_package_start_at_itself() -> None:
    found = list(imports("from .entry import sparse", "gossamer.backend", True))
    assert found == [(1, "gossamer.backend.entry.sparse")]
