"""The tuning database: what is found again, what counts as similar, and what damage does to it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gossamer.backend.devices.measured_times import DENSE, Times, tokens_class
from gossamer.backend.measuring import tune, tuning_db
from gossamer.backend.measuring.tuning_db import Key, TuningDatabase
from gossamer.passes.framework.family import Matrix
from gossamer.runtime.data_cache import first_level_bytes
from gossamer.runtime.target import host
from tests.backend.harness import learn
from tests.runtime.damage import NONSENSE, variations

MATRIX = Matrix(
    768, 3072, 1, "f32", host().vector_bits, 0.1, (4, 4), 0.9, skew=1.5, features=host().instructions, l1d=first_level_bytes()
)
KEY = Key(MATRIX, 16, 1)
TIMES = Times({DENSE: 100.0, "broadcast": 20.0, "rowpairs": 50.0})


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    return tmp_path


def predicted(key: Key) -> dict[str, float]:
    """A model of which all contenders go by the size of the weight."""
    elements, density = key.matrix.rows * key.matrix.columns / 1e6, key.matrix.density
    return {DENSE: 90 * elements, "broadcast": 200 * elements * density, "rowpairs": 400 * elements * density}


def another(**fields: Any) -> Key:
    own = {name: fields.pop(name) for name in ("tokens", "threads") if name in fields}
    return replace(KEY, matrix=replace(MATRIX, **fields), **own)


def journal(directory: Path) -> Path:
    (path,) = directory.glob("tuning-*.jsonl")
    return path


def test_what_was_added_is_found_again() -> None:
    database = TuningDatabase()
    assert database.find(KEY) is None
    database.add(KEY, TIMES)
    assert database.find(KEY) == TIMES
    assert TuningDatabase().find(KEY) == TIMES


def test_the_last_times_count() -> None:
    TuningDatabase().add(KEY, TIMES)
    TuningDatabase().add(KEY, Times({DENSE: 1.0, "broadcast": 2.0}))
    found = TuningDatabase().find(KEY)
    assert found is not None and found.fastest == DENSE


@pytest.mark.parametrize(
    "fields",
    [
        {"rows": 769}, {"columns": 10}, {"density": 0.15}, {"block": None}, {"fill": 1.0}, {"nm": (2, 4)}, {"skew": 2.0},
        {"element": "f64"}, {"reduction": 0}, {"tokens": 32}, {"threads": 2},
    ],
)  # fmt: skip
def test_every_feature_is_part_of_the_key(fields: dict[str, Any]) -> None:
    database = TuningDatabase()
    database.add(KEY, TIMES)
    assert database.find(another(**fields)) is None


@pytest.mark.parametrize("fields", [{"rows": 1024}, {"columns": 2048}, {"density": 0.15}, {"fill": 1.0}, {"skew": 2.0}])
def test_similar_patterns_lend_their_times(fields: dict[str, Any]) -> None:
    database, key = TuningDatabase(), another(**fields)
    database.add(KEY, TIMES)
    times = database.similar(key, predicted)
    reads_alike = not {"rows", "columns", "density"} & {*fields}  # the report names size and share of the other weight
    assert times is not None and times.origin == (None if reads_alike else "768x3072 at 10%")
    for name, us in TIMES.us.items():
        assert times.us[name] == pytest.approx(us * predicted(key)[name] / predicted(KEY)[name])


@pytest.mark.parametrize(
    "fields",
    [{"rows": 3000}, {"columns": 1000}, {"density": 0.3}, {"block": (8, 8)}, {"nm": (2, 4)}, {"element": "f64"}, {"tokens": 8}],
)
def test_others_do_not(fields: dict[str, Any]) -> None:
    database = TuningDatabase()
    database.add(KEY, TIMES)
    assert database.similar(another(**fields), predicted) is None


def test_the_nearest_lends() -> None:
    database = TuningDatabase()
    for rows in (600, 1000, 1400):
        database.add(another(rows=rows), TIMES)
    times = database.similar(another(rows=900), predicted)
    assert times is not None and times.origin == "1000x3072 at 10%"


def test_nothing_is_lent_where_predictions_disagree() -> None:
    database, key = TuningDatabase(), another(rows=1024)
    database.add(KEY, TIMES)

    def torn(asked: Key) -> dict[str, float]:
        us = predicted(asked)
        return us | {"broadcast": us["rowpairs"], "rowpairs": us["broadcast"]} if asked == key else us

    assert database.similar(key, torn) is None


def test_nothing_is_lent_of_schedules_that_cannot_compute_it() -> None:
    database, key = TuningDatabase(), another(rows=1024)
    database.add(KEY, TIMES)
    assert database.similar(key, lambda asked: {k: v for k, v in predicted(asked).items() if k != "rowpairs"}) is None


def test_nothing_is_lent_of_a_close_race() -> None:
    database = TuningDatabase()
    database.add(KEY, Times({DENSE: 100.0, "broadcast": 20.0, "rowpairs": 21.0}))
    assert database.similar(another(rows=1024), predicted) is None


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        json.dumps({"key": {}, "us": {}}),
        json.dumps({"key": KEY.to_json(), "us": {DENSE: 1.0}}),
        json.dumps({"key": KEY.to_json(), "us": {DENSE: 1.0, "broadcast": -1.0}}),
        json.dumps({"key": KEY.to_json(), "us": {DENSE: 1.0, "broadcast": 1.0, "a schedule of another version": 0.5}}),
        json.dumps({"key": KEY.to_json(), "us": {DENSE: "fast", "broadcast": 1.0}}),
        json.dumps({"key": KEY.to_json() | {"tokens": None}, "us": {DENSE: 1.0, "broadcast": 1.0}}),
        '{"key": \x00',
    ],
)
def test_damaged_lines_are_left_out(directory: Path, line: str) -> None:
    TuningDatabase().add(KEY, TIMES)
    with open(journal(directory), "a") as file:
        file.write(line)
    TuningDatabase().add(another(tokens=32), TIMES)
    database = TuningDatabase()
    assert len(database) == 2 and database.find(KEY) == TIMES


@pytest.mark.parametrize("value", NONSENSE, ids=lambda value: f"{value!r:.20}")
def test_whatever_a_line_says_a_similar_product_is_predicted(directory: Path, value: object) -> None:
    """Lines that make no sense are left out; those that do may be of use, and none makes anything fail."""
    TuningDatabase().add(another(vnm=(16, 2, 8), nm=(2, 4)), TIMES)
    whole = json.loads(journal(directory).read_text())
    asked = another(rows=1024, vnm=(16, 2, 8), nm=(2, 4))
    for changed in variations(whole, value):
        journal(directory).write_text(json.dumps(changed))
        database = TuningDatabase()
        assert database.find(asked) is None
        times = database.similar(asked, tune._predicted)
        assert times is None or all(0 < us < 1e12 for us in times.us.values())


def test_a_journal_of_other_bytes_is_empty(directory: Path) -> None:
    TuningDatabase().add(KEY, TIMES)
    journal(directory).write_bytes(bytes(range(256)))
    assert len(TuningDatabase()) == 0


def test_another_machine_has_another_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    TuningDatabase().add(KEY, TIMES)
    monkeypatch.setattr(tuning_db, "identity", lambda: "elsewhere")
    assert len(TuningDatabase()) == 0


def test_without_a_cache_it_remembers_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", "")
    database = TuningDatabase()
    database.add(KEY, TIMES)
    assert database.find(KEY) == TIMES and len(TuningDatabase()) == 0


@pytest.mark.parametrize("tokens, number", [(1, 1), (2, 2), (3, 4), (16, 16), (17, 32), (1000, 1024), (10**6, 1024)])
def test_tokens_class(tokens: int, number: int) -> None:
    assert tokens_class(tokens) == number


def test_times_in_words() -> None:
    assert str(TIMES) == "measured: broadcast 20 us, rowpairs 50 us, dense 100 us"
    times = Times({DENSE: 1234.5, "lookup": 2.345}, "8x8 at 10%")
    assert str(times) == "measured on 8x8 at 10%: lookup 2.35 us, dense 1234 us"


DISTURBED = {"disturbed": True}


def test_disturbed_times_are_measured_again_and_the_least_count() -> None:
    for dense, broadcast in ((100.0, 30.0), (130.0, 20.0)):
        TuningDatabase().add(KEY, Times({DENSE: dense, "broadcast": broadcast}), DISTURBED)
        assert not TuningDatabase().is_settled(KEY)
    found = TuningDatabase().find(KEY)
    assert found is not None and found.us == {DENSE: 100.0, "broadcast": 20.0}


def test_disturbed_times_are_measured_three_times_and_then_when_nobody_disturbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.backend.measuring.kept.quiet_now", lambda: False)
    for number in range(3):
        assert not TuningDatabase().is_settled(KEY), number
        TuningDatabase().add(KEY, TIMES, DISTURBED)
    assert TuningDatabase().is_settled(KEY)
    monkeypatch.setattr("gossamer.backend.measuring.kept.quiet_now", lambda: True)
    assert not TuningDatabase().is_settled(KEY)
    for _ in range(6):
        TuningDatabase().add(KEY, TIMES, DISTURBED)
    assert TuningDatabase().is_settled(KEY), "enough is enough"


def test_times_beside_a_slow_loop_do_not_count_once_the_machine_is_known_to_be_faster() -> None:
    learn(20.0)
    TuningDatabase().add(KEY, TIMES, {"beside": 22.0})
    assert TuningDatabase().is_settled(KEY)
    learn(10.0)
    assert not TuningDatabase().is_settled(KEY)
    better = Times({DENSE: 120.0, "broadcast": 40.0})
    TuningDatabase().add(KEY, better, {"beside": 11.0})
    assert TuningDatabase().is_settled(KEY) and TuningDatabase().find(KEY) == better


def test_undisturbed_times_replace_disturbed_ones_and_stay() -> None:
    better = Times({DENSE: 120.0, "broadcast": 40.0})
    TuningDatabase().add(KEY, TIMES, DISTURBED)
    TuningDatabase().add(KEY, better)
    assert TuningDatabase().is_settled(KEY) and TuningDatabase().find(KEY) == better
    TuningDatabase().add(KEY, TIMES, DISTURBED)
    assert TuningDatabase().is_settled(KEY) and TuningDatabase().find(KEY) == better
