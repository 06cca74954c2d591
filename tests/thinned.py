"""Which combinations of parameters `--thin` keeps: a test of two or more parameters meets each value of each at least once."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

MANY = 6  # with fewer combinations a test stays whole


def thinned(items: Sequence[Any]) -> set[Any]:
    """The tests to run. The combination that meets the most new values comes first, so each run keeps the same ones."""
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    return {
        item
        for combinations in tests.values()
        for item in (_covering(combinations) if len(combinations) >= MANY else combinations)
    }


def _covering(combinations: list[Any]) -> list[Any]:
    # Values are told apart by identity: all combinations hold the same objects, and some cannot be compared.
    values = {item: {(name, id(value)) for name, value in item.callspec.params.items()} for item in combinations}
    unmet = set().union(*values.values())
    kept = []
    while unmet:
        best = max(combinations, key=lambda item: len(values[item] & unmet))
        unmet -= values[best]
        kept.append(best)
    return kept
