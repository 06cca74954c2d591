"""Markdown from the JSON of `python -m benchmarks`.

python -m benchmarks.tables FILE.json                                           every case
python -m benchmarks.tables FILE.json --where tokens=128 --over best            over the faster of dense and Inductor
python -m benchmarks.tables FILE.json --pivot tokens,sparsity --of sparse       mean speed-ups by two parameters
python -m benchmarks.tables FILE.json FILE.json --summary --of sparse           against everybody else, a column a workload
python -m benchmarks.tables FILE.json --range --of sparse                       the least and the most, on one line

Files of several machines (`results/*/FILE.json`) give all of it machine by machine.
"""

from __future__ import annotations

import argparse
import glob
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import counted
from benchmarks.registry import workload
from gossamer.dialects.command_line import ends_with_its_reader

Record = Mapping[str, Any]

_TYPES = {"f32": "float32", "bf16": "bfloat16"}
_LONGEST = 160  # characters of a message that are shown
_MEASURED = re.compile(r"(<!-- measured: ([^\n]+?) -->\n?)(.*?)(<!-- /measured -->)", re.DOTALL)

BEST = "best"  # the faster of the baselines, case by case


def timed(case: Record, name: str) -> float | None:
    """Milliseconds of a contender, or of the best of the baselines; None if it has no time."""
    if name == BEST:
        return min((ms for base in workload(case["workload"]).baselines if (ms := timed(case, base)) is not None), default=None)
    median: float | None = case["results"].get(name, {}).get("median_ms")
    return median


def other_precision(case: Record, found: Record) -> bool:
    """Whether a contender computes in another precision than the case's model has."""
    own: str = case["parameters"].get("dtype", "f32")
    return (found["precision"] or own) != own


def digits(ms: float) -> str:
    """Three significant digits, no exponent."""
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


def brief(reason: str) -> str:
    """The start of a message, on one line."""
    line = " ".join(reason.split())
    return line if len(line) <= _LONGEST else line[:_LONGEST] + " …"


def cell(case: Record, name: str, over: str, fastest: str | None) -> str:
    """Milliseconds and the speed-up; bold for the fastest in the model's precision; "failed" or "-" for no time."""
    median = timed(case, name)
    if median is None:
        return "failed" if "error" in case["results"].get(name, {}) else "-"
    base = timed(case, over)
    text = digits(median) + (f" ({base / median:.2f}x)" if base and name != over else "")
    text += " ‡" * (case["results"][name].get("notes", {}).get("sparse") == 0)
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
    return bool(case.get("cores_elsewhere", 0) > 0.2)


def fits(case: Record, where: Mapping[str, str]) -> bool:
    found = case["parameters"] | {"threads": case["threads"]}
    return all(str(found.get(key)) == value for key, value in where.items())


def chosen(report: Record, where: Mapping[str, str]) -> list[Record]:
    """The cases whose parameters (or threads) read so. ValueError if there is none."""
    kept = [case for case in report["cases"] if fits(case, where)]
    if not kept:
        raise ValueError(f"no case of the report has {where}" if where else "the report holds no case")
    return kept


def table(cases: Sequence[Record], contenders: Mapping[str, Record], over: str) -> list[str]:
    """Rows of one workload at one thread count, and the geometric mean of the speed-ups."""
    shown = [name for name in contenders if any(timed(case, name) is not None for case in cases)]
    other = {name for name in shown if other_precision(cases[0], contenders[name])}
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


def pivot(cases: Sequence[Record], axes: tuple[str, str], of: str, over: str) -> list[str]:
    """The geometric means of a contender's speed-ups, and the least of several, by two parameters of the cases."""
    rows, columns = axes
    ratios: dict[tuple[Any, Any], list[float]] = {}
    for case in cases:
        base, own = timed(case, over), timed(case, of)
        if base and own:
            ratios.setdefault((case["parameters"][rows], case["parameters"][columns]), []).append(base / own)
    across = sorted({column for _, column in ratios})
    lines = [row([f"{rows} \\ {columns}", *map(str, across)]), row(["---", *["--:"] * len(across)])]
    for down in dict.fromkeys(line for line, _ in ratios):
        cells = (ratios.get((down, column)) for column in across)
        lines.append(row([str(down), *map(mean_and_least, cells)]))
    return lines


def mean_and_least(ratios: Sequence[float] | None) -> str:
    if not ratios:
        return "-"
    mean = f"{statistics.geometric_mean(ratios):.2f}"
    return f"{mean} ({min(ratios):.2f})" if len(ratios) > 1 else mean


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def failures(cases: Sequence[Record]) -> list[str]:
    """One line for each reason for which a contender has no time."""
    where: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for name, result in case["results"].items():
            if why := result.get("error") or result.get("skipped"):
                where.setdefault((name, brief(why)), []).append(f"{case['name']}, {case['threads']}T")
    return [
        f"- {name}: {why} ({found[0] if len(found) == 1 else f'{len(found)} cases'})" for (name, why), found in where.items()
    ]


def machine_name(report: Record) -> str:
    """What its machine is called: makers have one name for several microarchitectures."""
    machine = report["machine"]
    cpu = re.sub(r"\((R|TM)\)| Processor\b", "", str(machine["cpu"]))
    return f"{cpu} ({machine['architecture']})" if "architecture" in machine else cpu


def footer(report: Record) -> str:
    machine, versions = report["machine"], report["versions"]
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    features = ", ".join(machine["features"])
    raced = [result for case in report["cases"] for result in case["results"].values() if "median_ms" in result]
    most = report["settings"]["repeats"]
    least = min((result.get("samples", most) for result in raced), default=most)
    samples = f"{most}" if least >= most else f"{least} to {most}"
    medians = f"Medians of {samples} interleaved samples. " if raced else ""
    return f"{medians}{machine_name(report)}, {machine['cores']} cores ({features}); {packages}; {report['date'][:10]}."


def render(report: Record, *, where: Mapping[str, str] | None = None, over: str = "dense") -> str:
    """A table for each workload and thread count of the report.

    `where` keeps the cases whose parameters (or threads) read so, e.g. {"tokens": "32"}; speed-ups are over
    the contender `over`. ValueError if no case is left.
    """
    kept = chosen(report, where or {})
    parts: list[str] = []
    for family, threads in dict.fromkeys((case["workload"], case["threads"]) for case in kept):
        cases = [case for case in kept if (case["workload"], case["threads"]) == (family, threads)]
        count = counted(threads, "thread")
        baseline = "the fastest baseline" if over == BEST else report["contenders"][over]["label"]
        if any("median_ms" in result for case in cases for result in case["results"].values()):
            parts += [f"**{family}, {count}**: ms (speed-up over {baseline})", ""]
            parts += [*table(cases, report["contenders"], over), ""]
        else:
            parts += [f"**{family}, {count}**", ""]
        if concluded := workload(family).conclude(cases):
            parts += [*concluded, ""]
    if any(other_precision(case, found) for case in kept for found in report["contenders"].values()):
        own = " or ".join(sorted({_TYPES[case["parameters"].get("dtype", "f32")] for case in kept}))
        parts += [f"*Italic*: another precision. Bold: the fastest in {own}.", ""]
    if any(result.get("notes", {}).get("sparse") == 0 for case in kept for result in case["results"].values()):
        parts += ["‡: left dense.", ""]
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


def roofline(cases: Sequence[Record], of: str, peaks: Record) -> list[str]:
    """Where a contender's results lie under the roof that was measured in the same run."""
    lines = [row(["case", "ms", "useful GF/s", "GB/s", "flop/byte", "roof, GF/s", "of it"])]
    lines.append(row(["---", *["--:"] * 6]))
    for case in cases:
        result = case["results"].get(of, {})
        if found := result.get("roofline"):
            useful, intensity, roof = (found[name] for name in ("useful_gflops", "intensity", "roof_gflops"))
            figures, share = (useful, useful / intensity, intensity, roof), f"{useful / roof:.0%}"
            lines.append(row([case["name"], digits(result["median_ms"]), *(digits(figure) for figure in figures), share]))
    for threads in dict.fromkeys(case["threads"] for case in cases):
        machine = peaks[str(threads)]
        copies = ", ".join(f"{name} {level['copy_gbytes_s']:.0f}" for name, level in machine["levels"].items())
        products = f"{machine['f32_gflops']:.0f} GF/s in float32, {machine['bf16_gflops']:.0f} in bfloat16"
        lines += ["", f"{counted(threads, 'thread')}: dense products {products}; copies, GB/s: {copies}."]
    return lines


def summary(reports: Sequence[Record], of: str, where: Mapping[str, str]) -> list[str]:
    """How many times as fast as everybody else a contender is: the geometric mean and the least, a column a workload."""
    label = {name: found["label"] for report in reports for name, found in report["contenders"].items()}
    cases = [case for report in reports for case in chosen(report, where) if timed(case, of)]
    families = list(dict.fromkeys(case["workload"] for case in cases))
    lines: list[str] = []
    for threads in sorted({case["threads"] for case in cases}):
        lines += [f"**{counted(threads, 'thread')}**: times as fast, geometric mean (least)", ""]
        lines += [row([f"{label[of]} against", *families]), row(["---", *["--:"] * len(families)])]
        for name in (name for name in label if name != of):
            ratios: dict[str, list[float]] = {family: [] for family in families}
            for case in cases:
                ms, own = timed(case, name), timed(case, of)
                if case["threads"] == threads and ms and own:
                    ratios[case["workload"]].append(ms / own)
            if any(ratios.values()):
                lines.append(row([label[name], *map(mean_and_least, ratios.values())]))
        lines.append("")
    return lines


def updated(text: str, folder: Path) -> str:
    """A document with its tables between `<!-- measured: FILE.json … -->` and `<!-- /measured -->` made anew."""
    return _MEASURED.sub(lambda block: f"{block[1]}{made(block[2].split(), folder)}{block[4]}", text)


def made(arguments: Sequence[str], folder: Path = Path()) -> str:
    """What the command line prints for its arguments; ValueError if they do not fit the reports."""
    args = parser().parse_args(arguments)
    machines: dict[str, list[Record]] = {}
    for file in args.files:
        found = sorted(glob.glob(str(file), root_dir=folder))
        if not found:
            raise ValueError(f"there is no {file}")
        for path in found:
            report = json.loads((folder / path).read_text())
            machines.setdefault(machine_name(report), []).append(report)
    if args.range:
        return ", ".join(f"{least_and_most(reports, args)} on {cpu}" for cpu, reports in machines.items())
    parts = []
    for cpu, reports in machines.items():
        parts += [f"**{cpu}**\n"] * (len(machines) > 1)
        if args.summary:
            parts.append("\n".join([*summary(reports, args.of or "sparse", dict(args.where)), footer(reports[0])]) + "\n")
        else:
            parts += [printed(report, args) for report in reports]
    return "\n".join(parts)


def least_and_most(reports: Sequence[Record], args: argparse.Namespace) -> str:
    """Between which speed-ups of a contender the cases are, such as 3.8 to 5.9x."""
    ratios = []
    for report in reports:
        over, of = baseline(report, args), args.of or "sparse"
        for case in chosen(report, dict(args.where)):
            base, own = timed(case, over), timed(case, of)
            ratios += [base / own] if base and own else []
    if not ratios:
        raise ValueError("no case has both times")
    least, most = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
    return f"{least} to {most}x" if least != most else f"{most}x"


def baseline(report: Record, args: argparse.Namespace) -> str:
    """Whom speed-ups are over. ValueError if it, or the contender that is asked for, did not run."""
    baselines = (name for case in report["cases"] for name in workload(case["workload"]).baselines)
    over: str = args.over or next(name for name in (*baselines, *report["contenders"]) if name in report["contenders"])
    for name in {over, args.of} - {BEST, None}:
        if name not in report["contenders"]:
            raise ValueError(f"'{name}' did not run; there are {', '.join(report['contenders'])}")
    return over


def printed(report: Record, args: argparse.Namespace) -> str:
    over, where = baseline(report, args), dict(args.where)
    if not (args.pivot or args.roofline):
        return render(report, where=where, over=over)
    of, cases = args.of or "sparse", chosen(report, where)
    lines = roofline(cases, of, report["peaks"]) if args.roofline else pivot(cases, args.pivot, of, over)
    return "\n".join([*lines, "", footer(report)]) + "\n"


def pair(value: str) -> tuple[str, str]:
    rows, comma, columns = value.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"'{value}' is not a pair of parameters such as tokens,sparsity")
    return rows, columns


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.tables", allow_abbrev=False)
    found.add_argument(
        "files", type=Path, nargs="+", help="JSON of python -m benchmarks (* for any), or a document to --update"
    )
    found.add_argument("--where", type=condition, action="append", default=[], help="keep, e.g., tokens=32")
    found.add_argument("--over", help="what speed-ups are over (default the first baseline), or best: of the baselines")
    found.add_argument("--pivot", type=pair, help="mean (least) speed-up by two parameters, e.g. tokens,sparsity")
    found.add_argument("--roofline", action="store_true", help="GF/s and GB/s beside the machine's peaks")
    found.add_argument("--summary", action="store_true", help="the mean (least) of its speed-ups over each other contender")
    found.add_argument("--range", action="store_true", help="the least and the most of its speed-ups, on one line")
    found.add_argument("--of", help="the contender of --pivot, --roofline, --summary and --range (default sparse)")
    found.add_argument("--update", action="store_true", help="make the document's tables anew from the runs that they name")
    return found


@ends_with_its_reader
def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.update:
            for file in args.files:
                file.write_text(updated(file.read_text(), file.parent))
        else:
            print(made(sys.argv[1:] if argv is None else argv), end="")
    except ValueError as error:
        parser().error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
