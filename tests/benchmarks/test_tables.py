"""Tables from a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import main, render

Report = dict[str, Any]


def test_table_of_a_report(report: Report) -> None:
    assert (
        render(report)
        == """\
**linear, 1 thread**: ms (speed-up over Dense)

| case | Dense | Compiled | Sparse | *Half* |
| --- | --: | --: | --: | --: |
| 8 tokens | 12.0 | 6.00 (2.00x) | **3.00 (4.00x)** | 0.500 (24.00x) |
| 32 tokens † | 40.0 | - | **2.50 (16.00x) ‡** | - |
| geometric mean |  | 2.00x (1 of 2) | 8.00x | 24.00x (1 of 2) |

**linear, 2 threads**: ms (speed-up over Dense)

| case | Dense |
| --- | --: |
| 32 tokens | 20.0 |

*Italic*: another precision. Bold: the fastest in float32.

‡: left dense.

†: other processes were running; the figures are not to be trusted.

Without a time:

- peer: not installed
- sparse: wrong result (32 tokens, 2T)

Medians of 20 interleaved samples. Some CPU, 4 cores (avx2); torch 2.13.0; 2026-01-02.
"""
    )


def test_table_of_chosen_cases(report: Report) -> None:
    text = render(report, where={"tokens": "32", "threads": "1"})
    assert "| 32 tokens † |" in text and "| 8 tokens |" not in text and "2 threads" not in text
    with pytest.raises(ValueError, match="no case of the report has"):
        render(report, where={"tokens": "7"})


def test_speedups_over_the_best_dense(report: Report) -> None:
    text = render(report, over="best")
    assert "| 8 tokens | 12.0 (0.50x) | 6.00 (1.00x) | **3.00 (2.00x)** | 0.500 (12.00x) |" in text


def test_the_precision_of_the_model_is_not_another_one(report: Report) -> None:
    for case in report["cases"]:
        case["parameters"]["dtype"] = "bf16"
    assert "| Half |" in render(report)
    assert "*Half*" not in render(report)


@pytest.fixture
def written(report: Report, tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    return path


def test_pivot(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(written), "--pivot", "tokens,sparsity", "--over", "best"])
    assert capsys.readouterr().out.startswith("| tokens \\ sparsity | 0.9 |\n| --- | --: |\n| 8 | 2.00 |\n| 32 | 16.00 |\n")


def test_roofline(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(written), "--roofline", "--where", "threads=1"])
    text = capsys.readouterr().out
    assert "| 8 tokens | 3.00 | 30.0 | 1.50 | 20.0 | 60.0 | 50% |" in text
    assert "1 thread: dense products 100 GF/s in float32, 200 in bfloat16; copies, GB/s: l2 80, l3 60, dram 20." in text


def test_a_document_is_updated(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = written.with_name("README.md")
    block = "<!-- measured: report.json --where tokens=32 --where threads=2 -->\nold\n<!-- /measured -->\n"
    document.write_text(f"# Speed\n\n{block}\nend\n")
    assert main([str(document), "--update"]) == 0
    main([str(written), "--where", "tokens=32", "--where", "threads=2"])
    table = capsys.readouterr().out
    assert document.read_text() == "# Speed\n\n" + block.replace("old\n", table) + "\nend\n"


def test_tables_and_the_range_of_several_machines(report: Report, tmp_path: Path) -> None:
    for cpu in ("Some CPU", "Other CPU"):
        folder = tmp_path / cpu
        folder.mkdir()
        (folder / "linear.json").write_text(json.dumps({**report, "machine": {**report["machine"], "cpu": cpu}}))
    document = tmp_path / "README.md"
    document.write_text(
        "It is <!-- measured: */linear.json --range --where threads=1 --><!-- /measured --> as fast.\n"
        "<!-- measured: */linear.json --where tokens=8 -->\n<!-- /measured -->\n"
    )
    main([str(document), "--update"])
    line, tables = document.read_text().split("\n", 1)
    assert "-->4.0 to 16.0x on Other CPU, 4.0 to 16.0x on Some CPU<!--" in line
    assert tables.count("| 8 tokens |") == 2 and tables.index("**Other CPU**") < tables.index("**Some CPU**")


def test_a_contender_that_did_not_run_is_refused(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(written), "--over", "tpu"])
    assert "'tpu' did not run; there are inductor-bf16, dense" in capsys.readouterr().err


def test_summary_of_several_reports(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(written), str(written), "--summary", "--where", "threads=1"])
    text = capsys.readouterr().out
    assert text.startswith("**1 thread**: times as fast, geometric mean (least)\n\n| Sparse against | linear |\n| --- | --: |")
    assert "| Dense | 8.00 (4.00) |" in text and "| Compiled | 2.00 (2.00) |" in text and "Peer" not in text
