"""The documents say what is so: options are those of `Options`, figures those of the recorded runs, and code runs."""

import ast
import inspect
import itertools
import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import gossamer
from benchmarks.tables import updated
from gossamer import Options
from gossamer.backend.graph_passes import STEPS
from gossamer.backend.report.report import collect

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "guide.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [
    "docs/guide.md",
    "docs/deploy.md",
    "docs/training.md",
    "docs/low_rank.md",
    "docs/experts.md",
    "docs/embeddings.md",
    "docs/report.md",
    "docs/troubleshooting.md",
    *(
        f"docs/{p.parent.name}/{p.name}"
        for p in PAGES
        if p.parent.name in ("migrate", "tutorials") and p.stem != "own_schedule"
    ),
]  # test_skeletons runs that of schedules
MESSAGES = re.sub(r"^```.*?^```", "", (ROOT / "docs" / "troubleshooting.md").read_text(), flags=re.DOTALL | re.MULTILINE)
_NUMBERS = itertools.count()
ROOMS = ("gossamer", "backend", "sparsity", "passes", "runtime", "dialects")


def programs(page: str) -> list[str]:
    """The blocks of Python on a page; those of the guide are programs each, those of others go on from the last."""
    found = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return found if page in ("docs/guide.md", "docs/migrate/deepsparse.md", "docs/migrate/torchao.md") else ["".join(found)]


def shown(page: str) -> list[str]:
    """The first line of each output that a tutorial shows."""
    return re.findall(r"^```text\n(.*)$", (ROOT / page).read_text(), re.MULTILINE) if "tutorials" in page else []


def without_figures(text: str) -> str:
    """Without shares and gains, which differ from machine to machine."""
    return re.sub(r"[\d.]+[%x]", "", text)


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page, those in cells of tables, too; without code, measured figures, and addresses of links."""
    text = re.sub(r"^```.*?^```|<!-- measured:.*?<!-- /measured -->", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|]|\d+\.) ?)", text):
        for cell in block.split("|"):
            yield from re.split(r"(?<=[.!?:])\s+(?=[A-Z`\"(])", " ".join(cell.split()))


def run(program: str, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a program as a module, so that Dynamo finds its globals; without g++, which takes its time.

    Torch 2.11 remembers modules by their names, so each program has a name of its own.
    """
    module = ModuleType(f"page_{next(_NUMBERS)}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("gossamer.backend.compile_module.has_cpp_compiler", lambda: False)
    torch._dynamo.reset()
    torch.manual_seed(0)
    setting = "capture_dynamic_output_shape_ops"  # a page that writes it ends with it
    with torch._dynamo.config.patch(setting, getattr(torch._dynamo.config, setting)):
        exec(compile(program, page, "exec"), module.__dict__)
    torch._dynamo.reset()


def test_the_table_of_options_is_complete_and_its_defaults_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_DUMP_IR", raising=False)
    documented = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", GUIDE, re.MULTILINE))
    assert documented == {f.name: repr(getattr(Options(), f.name)).replace("'", '"') for f in fields(Options)}


def test_the_guide_lists_all_that_can_be_disabled() -> None:
    table = GUIDE.partition("that `disable` takes")[2].partition("\n\n**")[0]
    assert sorted(re.findall(r'`"([a-z-]+)"`', table)) == sorted(STEPS)


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        *(f"docs/{name}.md" for name in ("benchmarks", "deploy", "embeddings", "experts", "low_rank", "structured_matrices")),
    ],
)
def test_measured_tables_are_those_of_the_recorded_runs(document: str) -> None:
    text = (ROOT / document).read_text()
    assert "<!-- measured: " in text
    assert updated(text, (ROOT / document).parent) == text


@pytest.mark.parametrize(
    ("page", "program"),
    [pytest.param(page, program, id=f"{page}-{number}") for page in RUN for number, program in enumerate(programs(page))],
)
def test_code_runs_as_it_stands(
    page: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("torch_geometric", "transformers", "sklearn"):
        if package in program:
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    if page.startswith("docs/migrate"):  # what pays depends on the machine, not whether the code is compiled
        parse = Options.parse
        monkeypatch.setattr(Options, "parse", lambda given: replace(parse(given), min_gain=0))
    with collect() as collected, warnings.catch_warnings():
        if page.count("/") == 2:  # migration, tutorials
            warnings.filterwarnings("error", message="torch.compile (broke|gave up)")
        run(program, page, monkeypatch)
    if page.count("/") == 2:
        assert any(decision.sparse for decision in collected.decisions), collected.decisions
    printed = without_figures(capsys.readouterr().out)
    assert [line for line in shown(page) if without_figures(line) not in printed] == []


def test_the_code_of_the_readme_compiles_one_chain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = programs("README.md")
    run(program, "README.md", monkeypatch)
    assert "2 sparse on 1 kernel, 0 left dense" in capsys.readouterr().out
    assert "2 sparse on 1 kernel, 0 left dense" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_is_longer_than_thirty_words(page: Path) -> None:
    assert [each for each in sentences(page.read_text()) if len(each.split()) > 30] == []


@pytest.mark.parametrize(("page", "written"), [("api.md", r"`{}\b"), ("reference.md", r"gossamer\.{}\n")])
def test_the_map_and_the_reference_have_all_public_names(page: str, written: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    inside = [f"{each}.{name}" for each in ("distributed", "recipes") for name in getattr(gossamer, each).__all__]
    names = [*gossamer.__all__, *inside]
    said = names if page == "reference.md" else [name.rpartition(".")[2] for name in names]
    assert [name for name in said if not re.search(written.format(name), text)] == ["__version__"]


def test_the_navigation_of_the_site_has_all_pages() -> None:
    navigation = runpy.run_path(str(ROOT / "docs" / "conf.py"))["NAVIGATION"]
    pages = {str(page.relative_to(ROOT).with_suffix("")) for page in (*PAGES, ROOT / "CHANGELOG.md")}
    assert sorted(name for names in navigation.values() for name in names) == sorted(pages - {"README"})


def test_the_site_shows_all_words_of_docstrings_and_arguments_as_lists() -> None:
    as_rst = runpy.run_path(str(ROOT / "docs" / "docstrings.py"))["as_rst"]
    for name in gossamer.__all__:
        docstring = inspect.getdoc(getattr(gossamer, name)) or ""
        lines = as_rst(docstring)
        shown = re.sub(r"``|\\ ?|\.\. code-block:: python", "", "\n".join(lines))
        assert re.findall(r"\w+", shown) == re.findall(r"\w+", docstring), name
        assert not any(re.search(r"\S {3,}\S", line) for line in lines if not line.startswith("    ")), name
    lines = as_rst(inspect.getdoc(gossamer.sparsify) or "")
    at = lines.index("``only, skip``")
    assert lines[at + 1].startswith("    which layers: a name") and '    ``"nm" n=2, m=4``' in lines


def _texts(tree: ast.AST) -> list[str]:
    """The fixed parts of all strings below a node."""
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def _trees() -> Iterator[ast.Module]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield ast.parse(path.read_text())


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    """The first cell of each line quotes parts of messages; "…" stands for what differs."""
    said = "\n".join(text for tree in _trees() for text in _texts(tree))
    quoted = [text for cell in re.findall(r"^\| (.*?) \|", MESSAGES, re.MULTILINE) for text in re.findall(r"`([^`]+)`", cell)]
    parts = [part for text in quoted for part in re.split(r"…|dense|small|1\.1x|^0 ", text)]
    assert [part for part in parts if part not in said] == []
    assert len(quoted) > 50


def test_each_warning_is_on_the_troubleshooting_page() -> None:
    """At least one part of each message that is given to `warnings.warn` is quoted there."""
    parts = [part for text in re.findall(r"`([^`]+)`", MESSAGES) for part in text.split("…") if len(part) > 8]
    missing = []
    for tree in _trees():
        named = {
            target.id: node.value
            for node in tree.body if isinstance(node, ast.Assign) for target in node.targets if isinstance(target, ast.Name)
        }  # fmt: skip
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) not in ("warnings.warn", "warn_once", "cache_files.warn_once", "log.warning"):
                continue
            message = call.args[0]
            texts = _texts(named.get(message.id, message) if isinstance(message, ast.Name) else message)
            if any(len(text) > 12 for text in texts) and not any(part in text for part in parts for text in texts):
                missing.append(ast.unparse(message))
    assert missing == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 600
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 40


def test_pages_of_migration_are_short() -> None:
    assert [page.name for page in PAGES if page.parent.name == "migrate" and len(page.read_text().splitlines()) > 80] == []


def paths_in(page: Path) -> Iterator[str]:
    """The files and folders of the repository that a page names as code; `name_of_the_pass.py` stands for one to write."""
    text = re.sub(r"^```.*?^```|<!-- measured:.*?<!-- /measured -->", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for name in re.findall(r"`([\w/.-]+(?:\.(?:py|md|mlir|js|toml|svg)|/))`", text):
        if not re.search("name.of.the.pass|__init__", name):
            yield name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_that_a_page_names_lead_to_one_file(page: Path) -> None:
    """A path may begin in a room, as `run/region_op.py` does, if no other file has that end."""
    tops = (*ROOMS, "benchmarks", "docs", "examples", "tests")
    found = (path.relative_to(ROOT).parts for top in tops for path in (ROOT / top).rglob("*"))
    files = [parts for parts in found if "__pycache__" not in parts]
    for name in paths_in(page):
        end = Path(name).parts
        assert (ROOT / name).exists() or sum(file[-len(end) :] == end for file in files) == 1, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", each).lower().replace(" ", "-") for each in headings}, link
