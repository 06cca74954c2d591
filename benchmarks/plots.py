"""Figures from the JSON of `python -m benchmarks`: `python -m benchmarks.plots FILE.json …` writes SVG files beside it.

    FILE-speedup-1T.svg     speed-up over the best baseline (of eager and Inductor; torch.sparse for operations), a line each
    FILE-roofline-1T.svg    what each sparse result makes of the machine's peaks
    FILE-memory.svg         bytes of the packed weights over those of the dense ones
    FILE-prediction-1T.svg  the time of the chosen schedule over that of the best one, case by case
    FILE-startup.svg        seconds to the first result

Equal JSON gives equal files. Their ground is transparent, and all colours can be told from white and from black.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.arguments import counted, texts
from benchmarks.registry import workload
from benchmarks.tables import BEST, other_precision, timed
from benchmarks.workloads.prediction import CLOSE, choice
from gossamer.dialects.command_line import ends_with_its_reader

Record = Mapping[str, Any]

TEXT, GRID = "#737a83", "#8b929b"
OURS = "#e8590c"
COLOURS = {
    "sparse": OURS,
    "sparse-graph": OURS,
    "sparse-eager": "#d6336c",
    "sparse-tuned": "#d6336c",
    "csr": "#1c7ed6",
    "coo": "#1c7ed6",
    "mkl": "#0b8a8f",
    "sparse-dot-mkl": "#0b8a8f",
    "scipy": "#8a6d1f",
    "pydata": "#9c5bd8",
    "pyg": "#2b8a3e",
    "pyg-compiled": "#2b8a3e",
    "reference": "#737a83",
    "inductor": "#737a83",
    "openvino": "#9c5bd8",
    "openvino-bf16": "#9c5bd8",
    "onnxruntime": "#2b8a3e",
    "inductor-bf16": "#737a83",
    "dense-bf16": "#737a83",
}
SERIES = ("#e8590c", "#1c7ed6", "#2b8a3e", "#9c5bd8", "#0b8a8f", "#d6336c", "#8a6d1f", "#737a83")
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gossamer",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": GRID,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
RATIOS = (0.25, 0.375, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LOWEST = 0.25  # speed-ups below are drawn at the edge
KERNEL = ("sparse-graph", "sparse")  # whose results stand for the kernels: without guards, where that was measured


def plain(value: float, _: object = None) -> str:
    return f"{value:g}"


def panels(count: int, width: float = 2.1, height: float = 2.6, most: int = 5) -> tuple[Figure, list[Axes]]:
    """Panels that share their axes, row by row."""
    columns = min(count, most)
    rows = -(-count // columns)
    figure = Figure(figsize=(max(width * columns, 4.5), height * rows + 0.9), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def speedups(report: Record, cases: Sequence[Record], title: str) -> Figure | None:
    """A panel for each value of the workload's panel parameters, a line for each contender: geometric means."""
    family = workload(cases[0]["workload"])
    if not family.across:
        return None
    found: dict[tuple[Any, ...], dict[str, dict[float, list[float]]]] = {}
    for case in cases:
        place = tuple(case["parameters"][key] for key in family.panels)
        base = timed(case, BEST)
        for name in case["results"]:
            own = timed(case, name)
            if base and own and name in COLOURS and name not in family.baselines:
                x = float(case["parameters"][family.across])
                found.setdefault(place, {}).setdefault(name, {}).setdefault(x, []).append(base / own)
    if not found:
        return None
    figure, axes = panels(len(found))
    means = [statistics.geometric_mean(ratios) for lines in found.values() for own in lines.values() for ratios in own.values()]
    limits = max(min(*means, 1.0), LOWEST) / 1.1, max(*means, 1.0) * 1.15
    values = sorted({x for lines in found.values() for points in lines.values() for x in points})
    drawn: dict[str, Any] = {}
    for ax, (place, lines) in zip(axes, found.items(), strict=True):
        ax.set_title(" ".join(named(key, value) for key, value in zip(family.panels, place, strict=True)))
        ax.axhline(1, color=TEXT, linewidth=1)
        for name in (name for name in COLOURS if name in lines):
            points = [(values.index(x), statistics.geometric_mean(ratios)) for x, ratios in sorted(lines[name].items())]
            drawn[name] = ax.plot(
                [x for x, _ in points],
                [max(y, LOWEST) for _, y in points],
                color=COLOURS[name],
                linestyle="--" if name == "sparse-graph" or other_precision(cases[0], report["contenders"][name]) else "-",
                linewidth=2.2 if name.startswith("sparse") else 1.1,
                marker="o",
                markersize=4 if name.startswith("sparse") else 2.5,
                zorder=3 if name.startswith("sparse") else 2,
            )[0]
        ax.set_xlabel(family.across)
        ax.set_yscale("log", base=2)
        ax.set_yticks(RATIOS if limits[1] / limits[0] < 12 else RATIOS[::2])
        ax.set_ylim(*limits)
        ax.set_xticks(range(len(values)), [plain(x) for x in values])
        ax.yaxis.set_major_formatter(FuncFormatter(plain))
        ax.yaxis.set_minor_formatter(NullFormatter())
    over = " or ".join(report["contenders"][name]["label"] for name in family.baselines if name in report["contenders"])
    figure.supylabel(f"times as fast as {over}", fontsize=9)
    labels = [report["contenders"][name]["label"] for name in drawn]
    figure.legend(list(drawn.values()), labels, loc="outside lower center", ncols=int(figure.get_figwidth() / 1.9), fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def named(key: str, value: Any) -> str:
    """A parameter's value as a title reads it."""
    return counted(value, "token") if key == "tokens" else f"{value:.0%}" if key == "sparsity" else str(value)


def roofline(report: Record, cases: Sequence[Record], title: str) -> Figure | None:
    """Useful GF/s over operations a byte, below the roofs of each level of memory."""
    of = next((name for name in KERNEL if any("roofline" in case["results"].get(name, {}) for case in cases)), "")
    placed = [(case, found) for case in cases if (found := case["results"].get(of, {}).get("roofline"))]
    if not placed:
        return None
    machine = report["peaks"][str(cases[0]["threads"])]
    precision = cases[0]["parameters"].get("dtype", "f32")
    peak = machine[f"{precision}_gflops"]
    family = workload(cases[0]["workload"])
    key = "tokens" if "tokens" in cases[0]["parameters"] else family.panels[0]
    figure = Figure(figsize=(6.2, 4.2), layout="constrained")
    ax = figure.subplots()
    low = min(found["intensity"] for _, found in placed) / 2
    high = max(*(found["intensity"] for _, found in placed), peak / machine["levels"]["dram"]["copy_gbytes_s"]) * 2
    for name, level in machine["levels"].items():
        ridge = peak / level["copy_gbytes_s"]
        label = f"copies in {name}: {level['copy_gbytes_s']:.0f} GB/s"
        style = {"l2": "-", "l3": "--", "dram": ":"}[name]
        ax.plot([low, ridge], [low * level["copy_gbytes_s"], peak], color=TEXT, linewidth=1, linestyle=style, label=label)
    ax.plot([peak / machine["levels"]["l2"]["copy_gbytes_s"], high], [peak, peak], color=TEXT, linewidth=1.4)
    ax.annotate(
        f"dense product {peak:.0f} GF/s", (high, peak), xytext=(0, 3), textcoords="offset points", ha="right", fontsize=8
    )
    for colour, value in zip(SERIES * 4, dict.fromkeys(case["parameters"][key] for case, _ in placed), strict=False):
        own = [found for case, found in placed if case["parameters"][key] == value]
        x, y = [found["intensity"] for found in own], [found["useful_gflops"] for found in own]
        ax.plot(x, y, "o", color=colour, markersize=4, label=named(key, value))
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(plain))
    ax.yaxis.set_major_formatter(FuncFormatter(plain))
    ax.set_xlabel("useful operations a byte of weights and activations")
    ax.set_ylabel("useful GF/s")
    ax.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return figure


def memory(cases: Sequence[Record], title: str) -> Figure | None:
    """The bytes of the packed weights over those of the dense ones, by the share of zeros and the schedule."""
    points: dict[str, set[tuple[float, float]]] = {}
    for case in cases:
        for name in KERNEL:
            notes = case["results"].get(name, {}).get("notes", {})
            if notes.get("packed_bytes"):
                schedules = notes["schedules"]
                share = notes["packed_bytes"] / notes["dense_bytes"]
                points.setdefault(" + ".join(schedules), set()).add((float(case["parameters"]["sparsity"]), share))
    if not points:
        return None
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    ax = figure.subplots()
    zeros = [0.4, 1.0]
    ax.plot(zeros, [1 - zero for zero in zeros], color=TEXT, linewidth=1, label="the nonzeros alone")
    for colour, (label, found) in zip(SERIES * 4, sorted(points.items()), strict=False):
        ax.plot([x for x, _ in sorted(found)], [y for _, y in sorted(found)], "o", color=colour, markersize=4, label=label)
    ax.set_xlabel("sparsity")
    ax.set_ylabel("bytes packed / dense")
    ax.set_ylim(bottom=0)
    ax.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def prediction(cases: Sequence[Record], title: str) -> Figure | None:
    """The chosen schedule's time over the best one's, from the best prediction to the worst."""
    ratios = sorted(ratio for case in cases if (found := choice(case["results"])) for ratio in found[1:])
    if not ratios:
        return None
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    ax = figure.subplots()
    ax.axhline(CLOSE, color=TEXT, linewidth=1, linestyle="--")
    shares = [100 * index / len(ratios) for index in range(len(ratios))]
    ax.step([*shares, 100], [*ratios, ratios[-1]], where="post", color=OURS, linewidth=2)
    ax.set_xlabel(f"% of {len(ratios)} cases")
    ax.set_ylabel("time chosen / best")
    ax.set_ylim(bottom=0.95)
    ax.set_xlim(0, 100)
    close = sum(ratio <= CLOSE for ratio in ratios) / len(ratios)
    ax.set_title(f"{title}: {close:.0%} within 10 %", fontsize=10)
    return figure


def startup(cases: Sequence[Record], title: str) -> Figure | None:
    """Seconds of the first call, Gossamer's own share apart."""
    rows = [
        (
            f"{case['name']}, {counted(case['threads'], 'thread')}: {name}, {kind}",
            result[f"{kind}_total_s"],
            result[f"{kind}_own_s"],
        )
        for case in cases
        for name, result in case["results"].items()
        if "cold_total_s" in result
        for kind in ("cold", "warm")
    ]
    if not rows:
        return None
    figure = Figure(figsize=(6.4, 0.34 * len(rows) + 1.2), layout="constrained")
    ax = figure.subplots()
    names, ours = [name for name, _, _ in rows], [own for _, _, own in rows]
    ax.barh(names, ours, color=OURS, label="Gossamer")
    ax.barh(names, [total - own for _, total, own in rows], left=ours, color=GRID, label="torch")
    ax.invert_yaxis()
    ax.set_xlabel("seconds to the first result")
    ax.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def figures(report: Record) -> Iterator[tuple[str, Figure]]:
    """The figures of a report, with the ends of their files' names."""
    for family in dict.fromkeys(case["workload"] for case in report["cases"]):
        cases = [case for case in report["cases"] if case["workload"] == family]
        made: dict[str, Figure | None] = {}
        for threads in dict.fromkeys(case["threads"] for case in cases):
            own = [case for case in cases if case["threads"] == threads]
            title = f"{family}, {counted(threads, 'thread')}"
            if workload(family).across:
                made[f"speedup-{threads}T"] = speedups(report, own, title)
                made[f"roofline-{threads}T"] = roofline(report, own, title)
            elif family == "prediction":
                made[f"prediction-{threads}T"] = prediction(own, title)
        if workload(family).across:
            made["memory"] = memory(cases, family)
        elif family == "startup":
            made["startup"] = startup(cases, family)
        yield from ((name, figure) for name, figure in made.items() if figure)


def write(file: Path, contenders: Sequence[str] = ()) -> list[Path]:
    """Draws what a report holds (with `contenders`, no others' results), and returns the files."""
    report = json.loads(file.read_text())
    for case in report["cases"]:
        kept = contenders or case["results"]
        case["results"] = {
            name: found
            for name, found in case["results"].items()
            if name in kept or name in workload(case["workload"]).baselines
        }
    written = []
    with matplotlib.rc_context(STYLE):
        for name, figure in figures(report):
            written.append(file.with_name(f"{file.stem}-{name}.svg"))
            figure.savefig(written[-1], metadata={"Date": None, "Creator": None})
    return written


@ends_with_its_reader
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", allow_abbrev=False)
    parser.add_argument("files", type=Path, nargs="+", help="JSON written by python -m benchmarks")
    parser.add_argument("--contender", type=texts, default=(), help="whose results to draw (default: everyone's)")
    args = parser.parse_args(argv)
    for file in args.files:
        for written in write(file, args.contender):
            print(f"{written}  {written.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
