"""A profile as a table of 100 columns, in which equal layers of a stack share a row."""

import io
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gossamer.backend.profiling.measured import Part, Profile
from gossamer.backend.report.words import count, in_bytes, one_name, span, without_numbers

_WIDTH = 100


def text_of(profile: Profile) -> str:
    """The table, and what it says in words."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, highlight=False, markup=False)
    console.print(_summary(profile))
    if not profile.whole:
        console.print("Not all calls ran the same operations; those that did not are left out.")
    console.print(_table(profile))
    if any(part.dense for part in profile.parts):
        console.print("* torch computes it: its weight has lost its zeros, or changes at every call.")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def in_time(us: float) -> str:
    """Microseconds in a unit that fits."""
    return f"{us / 1e6:.3g} s" if us >= 1e6 else f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} us"


def _summary(profile: Profile) -> str:
    total = profile.us + profile.backward_us
    of = f", {in_time(profile.backward_us)} of it backward" if profile.backward_us else ""
    sparse = sum(part.us for part in profile.parts)
    threads = profile.data()["machine"]["threads"]
    return (
        f"gossamer: {in_time(total)} a call{of}, median of {count(profile.calls, 'call')} on {count(threads, 'thread')}; "
        f"{sparse / total:.0%} in sparse kernels and their calls"
    )


def _table(profile: Profile) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, width=_WIDTH)
    table.add_column("part", overflow="fold", ratio=1)
    for name in ("time", "share", "kernel", "call", "packing", "weights", "other", "roof"):
        table.add_column(name, justify="right", no_wrap=True)
    total = profile.us + profile.backward_us
    groups: dict[object, list[Part]] = {}
    for part in profile.parts:
        groups.setdefault((without_numbers(part.label), part.operation, part.backward, part.dense), []).append(part)
    for parts in groups.values():
        table.add_row(*_row(parts, total))
    dense = [("dense", profile.dense_us), ("dense, backward", profile.dense_backward_us), ("guards", profile.guards_us)]
    dense.append(("Python outside of graphs", max(0.0, profile.outside_us - profile.guards_us)))
    for name, us in dense:
        if us:
            table.add_row(name, in_time(us), f"{us / total:.0%}")
    return table


def _row(parts: Sequence[Part], total: float) -> list[str]:
    us, packing = sum(each.us for each in parts), sum(each.packing_us for each in parts)
    times = f" (x{len(parts)})" if len(parts) > 1 else ""
    roofs = [100 * each.roofline for each in parts if each.roofline is not None]
    return [
        one_name([each.label for each in parts]) + times + "*" * parts[0].dense,
        in_time(us),
        f"{us / total:.0%}",
        in_time(sum(each.kernel_us for each in parts)),
        in_time(sum(each.call_us for each in parts)),
        in_time(packing) if packing else "-",
        in_bytes(sum(each.weights for each in parts)),
        in_bytes(sum(each.activations for each in parts)),
        span(roofs, "{:.0f}", "%"),
    ]
