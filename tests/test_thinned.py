"""`--thin` of the test suite: each value of each parameter is met, and fewer combinations than all run."""

from itertools import product
from types import SimpleNamespace
from typing import Any

from tests.thinned import thinned


def combined(name: str, **parameters: list[Any]) -> list[Any]:
    return [
        _Item(f"{name}[{number}]", dict(zip(parameters, values, strict=True)))
        for number, values in enumerate(product(*parameters.values()))
    ]


class _Item:
    def __init__(self, nodeid: str, params: dict[str, Any]) -> None:
        self.nodeid, self.callspec = nodeid, SimpleNamespace(params=params)


def test_each_value_of_each_parameter_is_met() -> None:
    items = combined("f.py::test_a", size=[1, 2, 3], dtype=["f32", "bf16"], shape=[[1], [1], [2]])
    kept = thinned(items)
    assert len(kept) == 3  # equal lists are two values
    for name in ("size", "dtype", "shape"):
        assert {id(item.callspec.params[name]) for item in kept} == {id(item.callspec.params[name]) for item in items}
    assert thinned(items) == kept


def test_lists_of_cases_and_small_tests_stay_whole() -> None:
    lists, small, plain = (
        combined("test_a", case=list(range(9))),
        combined("test_b", one=[1, 2], other=[3, 4]),
        combined("test_c"),
    )
    assert thinned(lists + small + plain) == {*lists, *small, *plain}
