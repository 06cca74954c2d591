"""Machines: curves between what was measured, and what comes back from JSON."""

import json
from dataclasses import replace
from typing import Any

import pytest

from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules import cost_model
from gossamer.passes.schedules.families import FAMILIES
from gossamer.passes.schedules.machine_speed import Curve, Machine, Speed

MATRIX = Matrix(768, 3072, 1, "f32", 512, 0.1)


def flat(value: float) -> Curve:
    return Curve(((1, value), (128, value)))


def machine(dense_ns: float = 1.0, **families: float) -> Machine:
    curves = {name: flat(rate) for name, rate in families.items()}
    speed = Speed(((1 << 20, flat(dense_ns)),), curves, curves)
    return Machine.usual(512).with_speed("f32", speed)


def test_a_curve_is_straight_between_logarithms_and_level_beyond() -> None:
    curve = Curve(((1, 1.0), (4, 100.0)))
    assert [curve.at(t) for t in (1, 2, 4, 99)] == pytest.approx([1, 10, 100, 100])


def test_dense_time_goes_by_elements_and_tokens() -> None:
    assert cost_model.predict(MATRIX, 100, 1, machine(2.0)).dense_us == pytest.approx(768 * 3072 * 100 * 2e-6)


def test_dense_time_goes_by_the_size_of_the_weight() -> None:
    speed = Speed(((1000, flat(1.0)), (1_000_000, flat(100.0))), {})
    each = [speed.dense_us(size // 4, 4, 10) / (size // 4) for size in (400, 1000, 31_624, 1_000_000, 4_000_000)]
    assert [value / each[0] for value in each] == pytest.approx([1, 1, 10, 100, 100], rel=1e-3)


def test_sparse_time_goes_by_the_rate_of_the_family() -> None:
    slow, fast = (dict(cost_model.predict(MATRIX, 64, 1, machine(broadcast=rate)).by_schedule) for rate in (1000, 4000))
    call = Machine.usual(512).call_us
    assert slow["broadcast"] - call == pytest.approx(4 * (fast["broadcast"] - call))


def test_values_have_to_be_read() -> None:
    fast = replace(machine(1e-9, broadcast=1e9, rowpairs=1e9), read=flat(10.0))
    assert cost_model.predict(MATRIX, 1, 1, fast).sparse_us == pytest.approx(4 * MATRIX.nonzeros / 10e3 + fast.call_us)


def test_values_have_to_be_multiplied() -> None:
    fast = machine(2.0, **dict.fromkeys(FAMILIES, 1e9))
    assert cost_model.predict(MATRIX, 100, 1, fast).gain == pytest.approx(1.25 / MATRIX.density, rel=0.15)


def test_a_family_that_was_not_measured_is_as_fast_as_its_terms_say() -> None:
    assert machine(broadcast=1000, rowpairs=4000).speeds["f32"].cycles_a_us("another", 8) == 3000


def test_rates_lie_between_those_of_two_densities() -> None:
    speed = replace(machine(broadcast=1000, rowpairs=1000).speeds["f32"], half={"broadcast": flat(4000)})
    found = [speed.cycles_a_us("broadcast", 8, density) for density in (0.05, 0.2, 0.1**0.5, 0.5, 0.9)]
    assert found == pytest.approx([1000, 1000, 2000, 4000, 4000])
    assert speed.cycles_a_us("rowpairs", 8, 0.5) == pytest.approx(1000)  # which was not measured with the denser one
    slower = speed.slower("broadcast", 8, 2.0)
    assert [slower.cycles_a_us("broadcast", 8, density) for density in (0.2, 0.5)] == pytest.approx([500, 2000])


def test_half_the_multiply_adds_make_dense_products_slower() -> None:
    """768 x 3072 takes Zen 4 6.4 ms with 128 tokens, twice what others take; one token is bound by memory."""
    machine = Machine.usual(512, fmas=1)
    assert cost_model.predict(MATRIX, 128, 1, machine).dense_us == pytest.approx(6400, rel=0.2)
    assert cost_model.predict(MATRIX, 1, 1, machine).dense_us == pytest.approx(190, rel=0.2)


def test_measured_rates_change_the_choice() -> None:
    def chosen(**families: float) -> str:
        return cost_model.predict(Matrix(768, 3072, 1, "f32", 512, 0.1), 2, 1, machine(**families)).schedule

    rates = dict.fromkeys(FAMILIES, 1.0)
    assert chosen(**rates | {"rowpairs": 1e6}) == "rowpairs"
    assert chosen(**rates | {"broadcast": 1e6}) == "broadcast"


def test_predictions_are_sorted_and_scaled() -> None:
    found = cost_model.predict(MATRIX, 2)
    assert list(found.by_schedule) == sorted(found.by_schedule, key=lambda item: item[1])
    scaled = found.scaled(2.0, {"broadcast": 0.5})
    assert scaled.dense_us == 2 * found.dense_us
    assert scaled.by_schedule == (("broadcast", 0.5 * dict(found.by_schedule)["broadcast"]),)


def test_json() -> None:
    written = machine(broadcast=1000.0, rowpairs=2000.0).to_json()
    read = Machine.usual(512).updated(json.loads(json.dumps(written)))
    assert read.to_json() == written
    assert read.measured == {"f32"}
    assert read.speeds["f64"] is Machine.usual(512).speeds["f64"]


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"name": "x", "read": [[1, 1]], "call_us": 5, "speeds": {"i4": {"dense": [[1, [[1, 1]]]], "families": {}}}},
        {"name": "x", "read": [[1, 1]], "call_us": 5, "speeds": {"f32": {"dense": [], "families": {}}}},
        {"name": "x", "read": [[1, 1]], "call_us": 5, "speeds": {"f32": {"dense": [[1, [[2, 1], [1, 1]]]], "families": {}}}},
        {"name": "x", "read": [[1, 1]], "call_us": 5, "speeds": {"f32": {"dense": [[1, [[1, -1]]]], "families": {}}}},
        {"name": "x", "read": [], "call_us": 5, "speeds": {}},
        {"name": "x", "read": [[1, 1]], "call_us": None, "speeds": {}},
    ],
)
def test_damaged_json_is_refused(damaged: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        Machine.usual(512).updated(damaged)
