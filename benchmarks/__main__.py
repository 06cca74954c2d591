"""Command line: `python -m benchmarks --workload W --contender A,B --threads 1,2 --out FILE.json`."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.arguments import counted, sizes, texts
from benchmarks.machine import machine, record, versions
from benchmarks.measure import race
from benchmarks.records import recorded, save
from benchmarks.registry import BASELINES, Case, Contender, Outcome, Settings, names, plugins, workload
from benchmarks.roofline import peaks
from benchmarks.tables import brief
from gossamer.dialects.command_line import ends_with_its_reader


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of all workloads, then those of the workload that was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", allow_abbrev=False, add_help=False)
    parser.add_argument("--workload", choices=names("workloads"), help="the family of cases to run")
    parser.add_argument("--contender", type=texts, help="who runs (default: all)")
    parser.add_argument("--threads", type=sizes, default=[1], help="CPU threads, each in turn (default 1)")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds, at least 2 (default 20)")
    parser.add_argument("--min-sample-ms", type=float, default=1.0, help="shortest sample (default 1)")
    seconds = "a contender that would need longer for all rounds takes part in fewer, at least 5 (default 2)"
    parser.add_argument("--seconds", type=float, default=2.0, help=seconds)
    parser.add_argument("--cold", action="store_true", help="empty Inductor's caches before each compilation")
    parser.add_argument("--out", type=Path, help="where to write the JSON; it is rewritten after every case")
    parser.add_argument("--record", metavar="NAME", help="instead of --out: NAME.json in the folder of this machine's results")
    parser.add_argument(
        "--resume", action="store_true", help="keep what was written there without errors, of the same settings and machine"
    )
    parser.add_argument("--list", action="store_true", help="list the plug-ins, or the workload's cases and how long they take")
    selected = parser.parse_known_args(argv)[0].workload
    parser.add_argument("-h", "--help", action="help", help="this help; with --workload, its options too")
    if selected:
        workload(selected).add_arguments(parser.add_argument_group(f"workload {selected}"))
    args = parser.parse_args(argv)
    everyone = list(workload(selected).contenders() if selected else plugins())
    if unknown := sorted(set(args.contender or ()) - set(everyone)):
        parser.error(f"unknown contender {', '.join(unknown)}; there are {', '.join(everyone)}")
    if args.repeats < 2:
        parser.error("--repeats must be at least 2, for a median and a range")
    if args.record:
        args.out = record(args.record)
    if not args.list and not (args.workload and args.out):
        parser.error("--workload and --out or --record are needed (or --list)")
    args.contender = [name for name in everyone if not args.contender or name in args.contender]
    return args


def listing(args: argparse.Namespace) -> None:
    if args.workload:
        cases = workload(args.workload).cases(args)
        for case in cases:
            print(case.name)
        print(foretold(cases, args))
        return
    print("workloads")
    for name in names("workloads"):
        print(f"  {name:<16}{workload(name).summary}")
    for package in BASELINES:
        print(package)
        for name, found in plugins(package).items():
            missing = found.missing()
            absent = f" (not here: {missing})" if missing else ""
            print(f"  {name:<16}{found.label}, {found.precision or 'as the problem'}{absent}")


def foretold(cases: list[Case], args: argparse.Namespace) -> str:
    """About how long the cases take."""
    family = workload(args.workload)
    if family.measure is not None:
        return f"{counted(len(cases), 'case')}, a few minutes each"
    seconds = 0.0
    for case in cases:
        for threads in args.threads:
            sample = max(args.min_sample_ms / 1e3, case.gflop / family.gflops / threads)
            seconds += len(args.contender) * (family.preparing + max(5 * sample, min(args.seconds, args.repeats * sample)))
    counts = " and ".join(map(str, args.threads))
    duration = f"{seconds / 60:.0f} minutes" if seconds > 100 else f"{seconds:.0f} seconds"
    return f"{counted(len(cases), 'case')}, threads {counts}, {counted(len(args.contender), 'contender')}: about {duration}"


def line(case: Case, threads: int, outcomes: dict[str, Outcome]) -> str:
    """A case's outcome for the terminal, without the contenders that were skipped."""
    cells = []
    for name, outcome in outcomes.items():
        if "median_ms" in outcome:
            base, over = next(iter(outcome["speedup"].items()), (name, 1.0))
            ratio = f" ({over:.2f}x)" if name != base else ""
            dense = " dense" if outcome["notes"].get("sparse") == 0 else ""
            cells.append(f"{name} {outcome['median_ms']:.3f} ms{ratio}{dense}")
        elif "error" in outcome:
            cells.append(f"{name}: {brief(outcome['error'])}")
        elif "skipped" not in outcome:
            cells.append(f"{name}: " + " ".join(f"{key} {value:.2f}" for key, value in outcome.items() if key != "notes"))
    return f"{case.name}, {threads}T: " + " · ".join(cells)


def begun(args: argparse.Namespace, contenders: Mapping[str, Contender], missing: Mapping[str, str | None]) -> dict[str, Any]:
    """A report without cases or, to resume, the one that is there. SystemExit if that was taken otherwise."""
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": {
            "repeats": args.repeats,
            "min_sample_ms": args.min_sample_ms,
            "seconds": args.seconds,
            "cold": args.cold,
        },
        "contenders": {
            name: {"label": found.label, "precision": found.precision, "skipped": missing[name]}
            for name, found in contenders.items()
        },
        "peaks": {},
        "cases": [],
    }
    if not (args.resume and args.out.exists()):
        return report
    before: dict[str, Any] = json.loads(args.out.read_text())
    for key in ("machine", "versions", "settings", "contenders"):
        if before.get(key) != report[key]:
            sys.exit(f"{args.out} cannot be resumed, its {key} differ: {before.get(key)}, now {report[key]}")
    before["cases"] = [case for case in before["cases"] if not any("error" in found for found in case["results"].values())]
    return before


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measures every case at every thread count; the report is written as it grows."""
    family = workload(args.workload)
    everyone = family.contenders()
    contenders = {name: everyone[name] for name in args.contender}
    missing = {name: found.missing() for name, found in contenders.items()}
    present = {name: found for name, found in contenders.items() if not missing[name]}
    report = begun(args, contenders, missing)
    for name, why in missing.items():
        if why:
            console.print(f"{name} does not run: {why}", markup=False)
    settings = Settings(args.repeats, args.min_sample_ms / 1e3, args.seconds, args.cold)
    cases = family.cases(args)
    told: set[str] = set()
    known = {(case["workload"], case["name"], case["threads"]) for case in report["cases"]}
    for threads in args.threads:
        if family.measure is None and str(threads) not in report["peaks"]:
            report["peaks"][str(threads)] = peaks(threads)
    console.print(foretold(cases, args), markup=False, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases) * len(args.threads))
        for case in cases:
            due = [threads for threads in args.threads if (args.workload, case.name, threads) not in known]
            progress.advance(task, len(args.threads) - len(due))
            problem = cache(case.build)
            for threads in due:
                progress.update(task, description=f"{case.name}, {threads}T")
                start = time.perf_counter()
                if family.measure is not None:
                    outcomes = family.measure(case, present, threads, settings)
                else:
                    outcomes = race(problem(), present, threads, settings, report["peaks"][str(threads)], family.baselines)
                where = {"workload": args.workload, "name": case.name, "parameters": dict(case.parameters), "threads": threads}
                seconds = round(time.perf_counter() - start, 2)
                report["cases"].append(recorded({**where, "seconds": seconds, "results": outcomes}))
                save(report, args.out)
                for reason in {
                    f"{name} is skipped: {brief(found['skipped'])}" for name, found in outcomes.items() if "skipped" in found
                }:
                    if reason not in told:
                        console.print(f"{reason} (first at {case.name})", markup=False, highlight=False, soft_wrap=True)
                        told.add(reason)
                console.print(line(case, threads, outcomes), markup=False, highlight=False, soft_wrap=True)
                progress.advance(task)
    return report


@ends_with_its_reader
def main(argv: list[str] | None = None) -> int:
    """0 if every contender that ran was right in every case, else 1."""
    args = parse(argv)
    if args.list:
        listing(args)
        return 0
    warnings.filterwarnings("ignore", module="torch|transformers")
    console = Console(stderr=True)
    report = run(args, console)
    console.print(f"written to {args.out}; a table: python -m benchmarks.tables {args.out}", markup=False)
    wrong = [result for case in report["cases"] for result in case["results"].values() if "error" in result]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
