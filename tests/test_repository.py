"""Files for hosts and readers of the repository agree with the project: versions, targets, paths."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def parsed(name: str) -> dict[Any, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[Any, Any] = yaml.safe_load((ROOT / name).read_text())
    return found


def test_the_workflow_runs_targets_that_exist_on_the_oldest_and_the_newest_versions() -> None:
    jobs = parsed(".github/workflows/test.yml")["jobs"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    steps = [step["run"].split() for job in jobs.values() for step in job["steps"] if "run" in step]
    asked = [word for words in steps if words[0] == "make" for word in words[1:] if re.fullmatch("[a-z-]+", word)]
    assert {"lint", "types", "test", "docs"} <= set(asked) <= set(targets)
    matrix = jobs["test"]["strategy"]["matrix"]
    assert PROJECT["requires-python"] == f">={matrix['python'][0]}"
    (torch,) = (each for each in PROJECT["dependencies"] if re.match(r"torch\b(?!-)", each))
    bounds = re.findall(r"\d+(?:\.\d+)+", torch)
    assert matrix["torch"][0].startswith(bounds[0])
    assert len(bounds) == 1 or matrix["torch"][-1] == bounds[1]


def test_the_citation_has_the_version_and_the_licence_of_the_project() -> None:
    citation = parsed("CITATION.cff")
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert [each["name"] for each in citation["authors"]] == [each["name"] for each in PROJECT["authors"]]


def test_an_issue_has_the_output_of_the_doctor() -> None:
    fields = {field.get("id"): field for field in parsed(".github/ISSUE_TEMPLATE/bug.yml")["body"]}
    assert "python -m gossamer" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"]["validations"] == {"required": True}


def test_the_container_runs_the_demo() -> None:
    text = (ROOT / "Dockerfile").read_text()
    (program,) = re.findall(r'^CMD \["\.venv/bin/python", "(.+)"\]$', text, re.MULTILINE)
    assert program in (ROOT / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    assert (ROOT / program).is_file()
    (torch,) = re.findall(r"^ARG TORCH=(\S+)$", text, re.MULTILINE)
    assert f"TORCH ?= {torch}\n" in (ROOT / "Makefile").read_text()
