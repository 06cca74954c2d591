"""Markdown from the JSON of `python -m benchmarks`: `python -m benchmarks.tables FILE.json`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]


def timed(case: Record, name: str) -> float | None:
    median: float | None = case["results"].get(name, {}).get("median_ms")
    return median


def digits(ms: float) -> str:
    """Three significant digits, no exponent."""
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


def cell(case: Record, name: str, over: str, fastest: str | None) -> str:
    """Milliseconds and the speed-up; bold for the fastest in float32; "failed" or "-" for no time."""
    median = timed(case, name)
    if median is None:
        return "failed" if "error" in case["results"].get(name, {}) else "-"
    base = timed(case, over)
    text = digits(median) + (f" ({base / median:.2f}x)" if base and name != over else "")
    return f"**{text}**" if name == fastest else text


def mean_speedup(cases: Sequence[Record], name: str, over: str) -> str:
    pairs = [(timed(case, over), timed(case, name)) for case in cases]
    ratios = [base / own for base, own in pairs if base and own]
    if name == over or not ratios:
        return ""
    partly = f" ({len(ratios)} of {len(cases)})" if len(ratios) < len(cases) else ""
    return f"{statistics.geometric_mean(ratios):.2f}x{partly}"


def disturbed(case: Record) -> bool:
    """Other processes kept more than a fifth of a core busy while this case was timed."""
    return any(result.get("cores_elsewhere", 0) > 0.2 for result in case["results"].values())


def fits(case: Record, where: Mapping[str, str]) -> bool:
    found = case["parameters"] | {"threads": case["threads"]}
    return all(str(found.get(key)) == value for key, value in where.items())


def table(cases: Sequence[Record], contenders: Mapping[str, Record], over: str) -> list[str]:
    """Rows of one workload at one thread count, and the geometric mean of the speed-ups."""
    shown = [name for name in contenders if any(timed(case, name) is not None for case in cases)]
    other = {name for name in shown if contenders[name]["precision"] != "f32"}
    shown.sort(key=other.__contains__)
    label = {name: contenders[name]["label"] for name in shown}
    labels = [f"*{label[name]}*" if name in other else label[name] for name in shown]
    lines = [row(["case", *labels]), row(["---", *["--:"] * len(shown)])]
    for case in cases:
        rivals = {name: ms for name in shown if name not in other and (ms := timed(case, name)) is not None}
        fastest = min(rivals, key=rivals.__getitem__) if len(rivals) > 1 else None
        lines.append(row([case["name"] + " †" * disturbed(case), *(cell(case, name, over, fastest) for name in shown)]))
    if len(cases) > 1:
        lines.append(row(["geometric mean", *(mean_speedup(cases, name, over) for name in shown)]))
    return lines


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def failures(cases: Sequence[Record]) -> list[str]:
    """One line for each outcome without a time."""
    return [
        f"- {case['name']}, {case['threads']}T, {name}: {result.get('error') or result['skipped']}"
        for case in cases
        for name, result in case["results"].items()
        if "median_ms" not in result
    ]


def footer(report: Record) -> str:
    machine, versions = report["machine"], report["versions"]
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    features = ", ".join(machine["features"])
    return (
        f"Medians of {report['settings']['repeats']} interleaved samples. "
        f"{machine['cpu']}, {machine['cores']} cores ({features}); {packages}; {report['date'][:10]}."
    )


def render(report: Record, *, where: Mapping[str, str] | None = None, over: str = "dense") -> str:
    """A table for each workload and thread count of the report.

    `where` keeps the cases whose parameters (or threads) read so, e.g. {"tokens": "32"}; speed-ups are over
    the contender `over`. ValueError if no case is left.
    """
    kept = [case for case in report["cases"] if fits(case, where or {})]
    if not kept:
        raise ValueError(f"no case of the report has {where}" if where else "the report holds no case")
    parts: list[str] = []
    for workload, threads in dict.fromkeys((case["workload"], case["threads"]) for case in kept):
        cases = [case for case in kept if (case["workload"], case["threads"]) == (workload, threads)]
        count = f"{threads} thread{'s' * (threads > 1)}"
        title = f"**{workload}, {count}**: ms (speed-up over {report['contenders'][over]['label']})"
        parts += [title, "", *table(cases, report["contenders"], over), ""]
    if any(found["precision"] != "f32" for found in report["contenders"].values()):
        parts += ["*Italic*: another precision. Bold: the fastest in float32.", ""]
    if any(disturbed(case) for case in kept):
        parts += ["†: other processes were running; the figures are not to be trusted.", ""]
    absent = {name: found["skipped"] for name, found in report["contenders"].items() if found["skipped"]}
    if without := [f"- {name}: {why}" for name, why in absent.items()] + failures(kept):
        parts += ["Without a time:", "", *without, ""]
    return "\n".join([*parts, footer(report)]) + "\n"


def condition(value: str) -> tuple[str, str]:
    key, equals, wanted = value.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"'{value}' is not a condition such as tokens=32")
    return key, wanted


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", allow_abbrev=False)
    parser.add_argument("file", type=Path, help="JSON written by python -m benchmarks")
    parser.add_argument("--where", type=condition, action="append", default=[], help="keep, e.g., tokens=32")
    parser.add_argument("--over", default="dense", help="what speed-ups are over (default dense)")
    args = parser.parse_args(argv)
    report = json.loads(args.file.read_text())
    if args.over not in report["contenders"]:
        parser.error(f"'{args.over}' did not run; there are {', '.join(report['contenders'])}")
    try:
        print(render(report, where=dict(args.where), over=args.over), end="")
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
