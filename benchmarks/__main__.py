"""Command line: `python -m benchmarks --workload W --contender A,B --threads 1,2 --out FILE.json`."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.machine import machine, versions
from benchmarks.measure import BASELINES, Outcome, measure
from benchmarks.registry import Case, Contender, contender, names, workload


def texts(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def counts(value: str) -> list[int]:
    found = [int(part) for part in texts(value)]
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"'{value}' is not a list of positive numbers such as 1,2")
    return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of all workloads, then those of the workload that was asked for."""
    everyone = sorted(names("contenders"), key=lambda name: name not in BASELINES)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", allow_abbrev=False, add_help=False)
    parser.add_argument("--workload", choices=names("workloads"), help="the family of cases to run")
    parser.add_argument("--contender", type=texts, default=everyone, help="who runs (default: all)")
    parser.add_argument("--threads", type=counts, default=[1], help="CPU threads, each in turn (default 1)")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds, at least 2 (default 20)")
    parser.add_argument("--min-sample-ms", type=float, default=2.0, help="shortest sample (default 2)")
    parser.add_argument("--cold", action="store_true", help="empty Inductor's caches before each compilation")
    parser.add_argument("--out", type=Path, help="where to write the JSON; it is rewritten after every case")
    parser.add_argument("--list", action="store_true", help="list the plug-ins, or the workload's cases")
    selected = parser.parse_known_args(argv)[0].workload
    parser.add_argument("-h", "--help", action="help", help="this help; with --workload, its options too")
    if selected:
        workload(selected).add_arguments(parser.add_argument_group(f"workload {selected}"))
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.contender) - set(everyone)):
        parser.error(f"unknown contender {', '.join(unknown)}; there are {', '.join(everyone)}")
    if args.repeats < 2:
        parser.error("--repeats must be at least 2, for a median and a range")
    if not args.list and not (args.workload and args.out):
        parser.error("--workload and --out are needed (or --list)")
    return args


def listing(args: argparse.Namespace) -> None:
    if args.workload:
        for case in workload(args.workload).cases(args):
            print(case.name)
        return
    print("workloads")
    for name in names("workloads"):
        print(f"  {name:<16}{workload(name).summary}")
    print("contenders")
    for name in names("contenders"):
        found = contender(name)
        missing = found.missing()
        absent = f" (not here: {missing})" if missing else ""
        print(f"  {name:<16}{found.label}, {found.precision}{absent}")


def line(case: Case, threads: int, outcomes: dict[str, Outcome]) -> str:
    """A case's outcome for the terminal."""
    cells = []
    for name, outcome in outcomes.items():
        if "median_ms" in outcome:
            over = outcome["speedup"].get("dense")
            ratio = f" ({over:.2f}x)" if over and name != "dense" else ""
            cells.append(f"{name} {outcome['median_ms']:.3f} ms{ratio}")
        else:
            cells.append(f"{name}: {outcome.get('error') or outcome['skipped']}")
    return f"{case.name}, {threads}T: " + " · ".join(cells)


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measures every case at every thread count; the report is written as it grows."""
    contenders: dict[str, Contender] = {name: contender(name) for name in args.contender}
    missing = {name: found.missing() for name, found in contenders.items()}
    present = {name: found for name, found in contenders.items() if not missing[name]}
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": {"repeats": args.repeats, "min_sample_ms": args.min_sample_ms, "cold": args.cold},
        "contenders": {
            name: {"label": found.label, "precision": found.precision, "skipped": missing[name]}
            for name, found in contenders.items()
        },
        "cases": [],
    }
    cases = workload(args.workload).cases(args)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases) * len(args.threads))
        for case in cases:
            problem = case.build()
            for threads in args.threads:
                progress.update(task, description=f"{case.name}, {threads}T")
                outcomes = measure(
                    problem,
                    present,
                    threads=threads,
                    repeats=args.repeats,
                    min_sample=args.min_sample_ms / 1e3,
                    cold=args.cold,
                )
                report["cases"].append(
                    {
                        "workload": args.workload,
                        "name": case.name,
                        "parameters": dict(case.parameters),
                        "threads": threads,
                        "results": outcomes,
                    }
                )
                args.out.write_text(json.dumps(report, indent=1) + "\n")
                console.print(line(case, threads, outcomes), markup=False, highlight=False, soft_wrap=True)
                progress.advance(task)
    return report


def main(argv: list[str] | None = None) -> int:
    """0 if every contender that ran was right in every case, else 1."""
    args = parse(argv)
    if args.list:
        listing(args)
        return 0
    warnings.filterwarnings("ignore", module="torch|transformers")
    console = Console(stderr=True)
    report = run(args, console)
    for name, found in report["contenders"].items():
        if found["skipped"]:
            console.print(f"{name} did not run: {found['skipped']}", markup=False)
    console.print(f"written to {args.out}; a table: python -m benchmarks.tables {args.out}", markup=False)
    wrong = [result for case in report["cases"] for result in case["results"].values() if "error" in result]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
