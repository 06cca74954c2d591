"""The documents say what is so: options are those of `Options`, figures those of the recorded runs, and code runs."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from benchmarks.tables import updated
from gossamer import Options

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "guide.md").read_text()


def programs(page: str) -> list[str]:
    """The blocks of Python on a page; those of the guide are programs each, those of others go on from the last."""
    found = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return found if page == "docs/guide.md" else ["".join(found)]


def test_the_table_of_options_is_complete_and_its_defaults_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_DUMP_IR", raising=False)
    documented = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", GUIDE, re.MULTILINE))
    assert documented == {f.name: repr(getattr(Options(), f.name)).replace("'", '"') for f in fields(Options)}


@pytest.mark.parametrize("document", ["README.md", "docs/benchmarks.md"])
def test_measured_tables_are_those_of_the_recorded_runs(document: str) -> None:
    text = (ROOT / document).read_text()
    assert "<!-- measured: " in text
    assert updated(text, (ROOT / document).parent) == text


@pytest.mark.parametrize(
    ("page", "program"),
    [pytest.param(page, program, id=f"{page}-{number}")
     for page in ("docs/guide.md", "docs/training.md", "docs/low_rank.md") for number, program in enumerate(programs(page))],
)  # fmt: skip
def test_code_runs_as_it_stands(page: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "torch_geometric" in program:
        pytest.importorskip("torch_geometric")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gossamer.backend.compile_module.has_cpp_compiler", lambda: False)  # which takes its time
    torch._dynamo.reset()
    torch.manual_seed(0)
    exec(compile(program, page, "exec"), {"__name__": "page"})
    torch._dynamo.reset()


def test_the_code_of_the_readme_compiles_one_chain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = programs("README.md")
    monkeypatch.setattr("gossamer.backend.compile_module.has_cpp_compiler", lambda: False)
    torch._dynamo.reset()
    exec(compile(program, "README.md", "exec"), {"__name__": "page"})
    assert "2 sparse on 1 kernel, 0 left dense" in capsys.readouterr().out
    assert "2 sparse on 1 kernel, 0 left dense" in (ROOT / "README.md").read_text()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 600
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 40


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", each).lower().replace(" ", "-") for each in headings}, link
